"""A model whose waiting requests share a batch: requests that arrive during a batch make up the next one.

A request cannot join a running batch, as it can in ``SamplingEngine``. Batches are answered by kvaudit's own cache or
by a serving engine; answers by kvaudit's cache come with measurements of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvaudit.audit.policies import Policy
from kvaudit.audit.sampling.chat import Chat, ChatTokens
from kvaudit.audit.sampling.conversations import holds_stop, survival
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.serving.engine import DEFAULT_TOKENS, PendingAnswers, find_stop
from kvaudit.audit.serving.wire import ChatRequest, Choice
from kvaudit.core.errors import AuditError, RunError, SpecError
from kvaudit.core.records import CacheUse, Role

_PAUSE = 0.05  # seconds without a new request after which a batch begins; agents' tools answer faster


class AskedPrompt(NamedTuple):
    """A chat request with its prompt as tokens and the token limit of its answer."""

    request: ChatRequest
    prompt: ChatTokens
    limit: int


AnswerBatch = Callable[[Sequence[AskedPrompt]], Sequence[Choice | AuditError]]  # an error is that of one request


class BatchedModel:
    """A queue of chat requests, and a thread that passes them batch by batch to the function ``answer``.

    A batch has at most ``at_once`` requests; ``chat`` renders their prompts. If ``answer`` raises an error, it is kept
    in ``failure``, and every further request fails with it.
    """

    def __init__(self, chat: Chat, positions: int, answer: AnswerBatch, at_once: int) -> None:
        self._chat, self._positions, self._answer, self._at_once = chat, positions, answer, at_once
        self._queue: queue.Queue[tuple[AskedPrompt, PendingAnswers] | None] = queue.Queue()  # None: stop
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="batched-model", daemon=True)
        self._thread.start()

    def submit(self, request: ChatRequest) -> tuple[int, PendingAnswers]:
        """Queue a request; return the number of its prompt tokens, and the future answers.

        Raises SpecError if prompt and answer are too long for the model.
        """
        prompt = self._chat.prompt(request.messages, (), request.tools)
        limit = request.max_tokens or DEFAULT_TOKENS
        if len(prompt.ids) + limit > self._positions:
            raise SpecError(
                f"the prompt has {len(prompt.ids)} tokens and its answer up to {limit}, the model has "
                f"{self._positions} positions"
            )
        pending = PendingAnswers()
        pending.read_tools(request, self._chat)
        self._queue.put((AskedPrompt(request, prompt, limit), pending))
        return len(prompt.ids), pending

    def close(self) -> None:
        """Answer the requests that wait, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (waiting := self._gather()) is not None:
            try:
                if self.failure is not None:
                    raise self.failure
                answers = self._answer([asked for asked, _ in waiting])
            except BaseException as error:  # whatever ends a batch, each request must get a response
                self.failure = error
                answers = [error if isinstance(error, AuditError) else RunError(type(error).__name__)] * len(waiting)
            for (_, pending), answer in zip(waiting, answers, strict=True):
                if not pending.set_running_or_notify_cancel():
                    continue
                if isinstance(answer, AuditError):
                    pending.set_exception(answer)
                else:
                    pending.set_result([answer])

    def _gather(self) -> list[tuple[AskedPrompt, PendingAnswers]] | None:
        """Wait for a request; return it together with the requests that follow shortly after.

        None if the thread has to end.
        """
        entry = self._queue.get()
        batch = []
        with suppress(queue.Empty):
            while entry is not None:
                batch.append(entry)
                if len(batch) >= self._at_once:
                    return batch
                entry = self._queue.get(timeout=_PAUSE)
            self._queue.put(None)  # answer these, then stop
        return batch or None


def cache_answers(model: LoadedModel, policy: Policy, batch_tokens: int) -> AnswerBatch:
    """Return a function that answers requests by sampling from ``model`` with its cache compressed by ``policy``.

    It samples in batches of at most ``batch_tokens`` tokens, padding included.
    """

    def answer(asked: Sequence[AskedPrompt]) -> list[Choice | AuditError]:
        answers: dict[int, Choice | AuditError] = {}
        for numbers in _group_requests(asked, batch_tokens):
            rows = [asked[n] for n in numbers]
            answers |= zip(numbers, _sample(model, policy, rows), strict=True)
        return [answers[n] for n in range(len(asked))]

    return answer


def _group_requests(asked: Sequence[AskedPrompt], batch_tokens: int) -> list[list[int]]:
    """Return batches of request numbers (indices into ``asked``); a batch has one temperature and one top_p.

    A batch has at most ``batch_tokens`` tokens, padding included, unless a single request has more.
    """
    batches: list[list[int]] = []
    sizes = [len(entry.prompt.ids) + entry.limit for entry in asked]

    def sampling(n: int) -> tuple[float, float]:
        return asked[n].request.temperature, asked[n].request.top_p

    for n in sorted(range(len(asked)), key=lambda n: (sampling(n), sizes[n])):
        # sizes ascend, so this request would be the longest of its batch
        fits = batches and (len(batches[-1]) + 1) * sizes[n] <= batch_tokens
        if fits and sampling(batches[-1][0]) == sampling(n):
            batches[-1].append(n)
        else:
            batches.append([n])
    return batches


def _sample(model: LoadedModel, policy: Policy, asked: Sequence[AskedPrompt]) -> list[Choice]:
    chat, first = model.chat, asked[0].request
    seeds = [entry.request.seed or 0 for entry in asked]
    prompts = [entry.prompt for entry in asked]
    episode = Sampler(model, policy).open([p.ids for p in prompts], seeds, roles=[p.roles for p in prompts])
    decoding = Decoding(max(entry.limit for entry in asked), first.temperature, first.top_p)
    completions = episode.decode(
        decoding,
        [entry.limit for entry in asked],
        lambda n, ids: holds_stop(chat, ids, asked[n].request.stop),
        lambda n, completion: False,  # noqa: ARG005 - a row is over with its answer
    )
    choices = []
    for entry, completion, rollout in zip(asked, completions, episode.rollouts(), strict=True):
        assert completion is not None
        use = CacheUse(
            retention=rollout.retention,
            survival=survival(rollout, (*entry.prompt.roles, *[str(Role.ASSISTANT)] * len(completion.ids))),
            kv_bytes_peak=rollout.kv_bytes_peak,
            kv_bytes_dense=rollout.kv_bytes_dense,
            kv_bytes_live=rollout.kv_bytes_live,
        )
        text, finish = chat.text(completion.ids), completion.finish_reason
        choices.append(cut_choice(chat, entry, text, finish, completion.ids, use))
    return choices


def cut_choice(
    chat: Chat, asked: AskedPrompt, text: str, finish: str, ids: Sequence[int], use: CacheUse | None
) -> Choice:
    """Return an answer to ``asked``, cut before the first stop text of this request.

    ``use`` holds what was measured of the cache while the answer was sampled, None if nothing was.
    """
    if (cut := find_stop(text, asked.request.stop)) is not None:
        text, finish = text[:cut], "stop"
    return Choice(text, finish, tuple(chat.text([token]) for token in ids), (), use=use)
