"""One thread that samples: requests for the same checkpoint, policy and temperature share a batch.

Those that come while it decodes join it as soon as there is room, unless another request has waited longer for a batch
of its own; a request is answered as soon as its own rows are over.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvaudit.audit.cache.rotary import rotary_length_limit
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.chat import ChatTokens
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import AnyEpisode, Completion, Decoding, Sampler, join_episodes
from kvaudit.audit.serving.wire import ChatRequest, Choice
from kvaudit.core.errors import AuditError, RunError, SpecError, UnknownName

DEFAULT_TOKENS = 512
_MOST_ROWS = 4096  # that one batch ever has, since it counts them at every step
_CLOSING = "the server is shutting down"
_OPEN_END = "�"  # what the first bytes of a character decode to until the others come
TextListener = Callable[[int, str], None]  # number of the choice, and its text so far


class QueueFull(RunError):
    """More requests wait than the server holds."""


@dataclass(frozen=True)
class ModelAndPolicy:
    """What a model name stands for."""

    model: LoadedModel
    policy: Policy


class PendingAnswers(Future[list[Choice]]):
    """The answers to be of one request."""

    is_abandoned = False  # nobody waits for them: what is under way ends at its next token

    def abandon(self) -> None:
        """Say that nobody waits any more; what has not begun will not."""
        self.is_abandoned = True
        self.cancel()


@dataclass
class _Job:
    """One request on its way. ``listener`` hears of text as it is drawn, from the sampling thread."""

    asked: ChatRequest
    served: ModelAndPolicy
    prompt: ChatTokens
    limit: int
    listener: TextListener | None
    done: PendingAnswers = field(default_factory=PendingAnswers)
    answers: dict[int, Choice] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, float, float]:
        return id(self.served.model), self.served.policy.hash, self.asked.temperature, self.asked.top_p

    @property
    def length(self) -> int:
        return len(self.prompt.ids) + self.limit

    def answer(self, number: int, choice: Choice) -> None:
        """Take one answer, and hand all over once there are as many as were asked for."""
        self.answers[number] = choice
        if len(self.answers) == self.asked.choices and not self.done.done():
            self.done.set_result([self.answers[n] for n in range(self.asked.choices)])


class SamplingEngine:
    """Checkpoints by name, served under any policy. ``aliases`` are other names, which do not tell what they serve."""

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        aliases: Mapping[str, str] | None = None,
        *,
        batch_tokens: int = 16_384,
        most_waiting: int = 1024,
    ) -> None:
        self._models, self._aliases = {name: pack_weights(model) for name, model in models.items()}, dict(aliases or {})
        self._longest_token = {id(m): max(map(len, m.chat.tokenizer.get_vocab())) for m in self._models.values()}
        self._batch_tokens, self._most_waiting = batch_tokens, most_waiting
        self._waiting: queue.Queue[_Job | None] = queue.Queue()
        self._next = deque[_Job]()  # requests that were taken from the queue and wait for a batch
        self._ends = False  # the thread, with the batch that is under way
        self._closing, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)
        for name in self._aliases:
            self.served(name)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """What a client can ask for; a checkpoint's name alone is served under none."""
        return [*self._models, *self._aliases]

    def served(self, name: str) -> ModelAndPolicy:
        """What a name stands for; raises UnknownName or SpecError."""
        checkpoint, _, policy = self._aliases.get(name, name).partition("@")
        if checkpoint not in self._models:
            raise UnknownName("model", name, self.names)
        return ModelAndPolicy(self._models[checkpoint], parse_policy(policy or "none"))

    def submit(self, asked: ChatRequest, listener: TextListener | None = None) -> tuple[int, PendingAnswers]:
        """Queue a request; its prompt tokens, and answers to be. Raises SpecError, UnknownName, Busy or RunError."""
        if self._waiting.qsize() + len(self._next) >= self._most_waiting:
            raise QueueFull(f"{self._most_waiting} requests wait already; try again later")
        served = self.served(asked.model)
        self._check_length(asked)
        prompt = served.model.chat.prompt(asked.messages)
        steady = rotary_length_limit(served.model.model.config)  # beyond it a row would depend on its batch
        positions = min(served.model.max_positions, steady or served.model.max_positions)
        room = positions - len(prompt.ids)
        limit = min(asked.max_tokens or DEFAULT_TOKENS, room)
        if room < 1 or (asked.max_tokens or 0) > room:
            raise SpecError(
                f"the prompt takes {len(prompt.ids)} tokens and max_tokens is {asked.max_tokens}, the model has "
                f"{positions} positions; send less"
            )
        job = _Job(asked, served, prompt, limit, listener)
        with self._lock:  # nothing may be queued behind the end, where nobody would answer it
            if self._closing:
                raise RunError(_CLOSING)
            self._waiting.put(job)
        return len(prompt.ids), job.done

    def _check_length(self, asked: ChatRequest) -> None:
        """Raise SpecError for a prompt that is too long whatever its tokens are: to count them takes minutes."""
        model = self.served(asked.model).model
        most = model.max_positions * self._longest_token[id(model)]
        given = sum(len(message.content) for message in asked.messages)
        if given > most:
            raise SpecError(
                f"the prompt has {given} characters, the {model.max_positions} positions of the model hold {most} at "
                "the most; send less"
            )

    def close(self) -> None:
        """Finish what is under way; requests that still wait fail."""
        with self._lock:
            self._closing = True
            self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._gather(wait=not self._next)
            if self._ends:
                for job in _wanted(self._next):
                    job.done.set_exception(RunError(_CLOSING))
                return
            if begun := _wanted(self._first()):
                self._answer(begun)

    def _gather(self, *, wait: bool) -> None:
        """Take what waits from the queue, at least one request where there is time to ``wait``."""
        with suppress(queue.Empty):
            while not self._ends:
                job = self._waiting.get(block=wait)  # only the first is waited for
                wait = False
                if job is None:
                    self._ends = True
                else:
                    self._next.append(job)

    def _first(self) -> list[_Job]:
        """The oldest request with those that can share its batch; the rest wait, in their order."""
        batch, rest, size = list[_Job](), list[_Job](), _Size(0, 0)
        for job in self._next:
            alike = not batch or job.key == batch[0].key
            if batch and not (alike and size.fits(job, self._batch_tokens)):
                rest.append(job)
                continue
            batch.append(job)
            size = size.plus(job)
        self._next = deque(rest)
        return batch

    def _answer(self, jobs: Sequence[_Job]) -> None:
        """Serve a batch and whoever joins it, until all of them are answered."""
        batch = _Batch()
        while jobs or batch.goes_on:
            opened = _opened(jobs)
            try:
                for some, episode in opened:
                    batch.take(some, episode)
                batch.decode(lambda: self._may_join(batch))
            except Exception as error:  # a request must be answered whatever a model does, or its client waits for ever
                for job in (*batch.jobs, *(job for some, _ in opened for job in some)):
                    if not job.done.done():
                        job.done.set_exception(_client_error(error))
                return
            jobs = []
            while self._may_join(batch, jobs):
                jobs = [*jobs, *_wanted([self._next.popleft()])]

    def _may_join(self, batch: _Batch, others: Sequence[_Job] = ()) -> bool:
        """Whether the request that waits longest fits the batch, beside ``others`` that are about to join."""
        self._gather(wait=False)
        while self._next and self._next[0].done.cancelled():
            self._next.popleft()
        if self._ends or not self._next or not batch.goes_on or self._next[0].key != batch.key:
            return False
        size = batch.size
        for job in others:
            size = size.plus(job)
        ever = batch.rows + sum(job.asked.choices for job in (*others, self._next[0]))
        return ever <= _MOST_ROWS and size.fits(self._next[0], self._batch_tokens)


def _wanted(jobs: Sequence[_Job]) -> list[_Job]:
    """Those that somebody still waits for. From here on they cannot be cancelled, and must be answered."""
    return [job for job in jobs if job.done.set_running_or_notify_cancel()]


def _opened(jobs: Sequence[_Job]) -> list[tuple[Sequence[_Job], AnyEpisode]]:
    """The prompts of requests that agree, prefilled, a row for each answer.

    Where that fails each is tried by itself: what one prompt does is no fault of the others.
    """
    if not jobs:
        return []
    served, rows = jobs[0].served, _rows(jobs)
    sampler = Sampler(served.model, served.policy, recorded=False)
    prompts, roles = [job.prompt.ids for job, _ in rows], [job.prompt.roles for job, _ in rows]
    try:
        seeds = [derive_seed("serve", _seed(job), number) for job, number in rows]
        return [(jobs, sampler.open(prompts, seeds, roles=roles))]
    except Exception as error:
        if len(jobs) > 1:
            return [found for job in jobs for found in _opened([job])]
        jobs[0].done.set_exception(_client_error(error))
        return []


def _rows(jobs: Sequence[_Job]) -> list[tuple[_Job, int]]:
    """Every answer that is asked for: its request, and its number there."""
    return [(job, number) for job in jobs for number in range(job.asked.choices)]


def _client_error(error: Exception) -> AuditError:
    return error if isinstance(error, AuditError) else RunError(f"sampling failed: {type(error).__name__}")


class _Size(NamedTuple):
    """What a batch may come to: its rows, and the tokens of the longest."""

    rows: int
    longest: int

    def plus(self, job: _Job) -> _Size:
        return _Size(self.rows + job.asked.choices, max(self.longest, job.length))

    def fits(self, job: _Job, tokens: int) -> bool:
        """Whether a request fits beside it into so many tokens, padding counted."""
        own = self.plus(job)
        return own.rows * own.longest <= tokens


class _Batch:
    """The rows of requests that share a checkpoint, a policy and how tokens are drawn."""

    def __init__(self) -> None:
        self.rows = 0  # all there ever were
        self._texts: dict[int, _RowText] = {}  # of the rows that are not over
        self._first: _Job | None = None
        self._episode: AnyEpisode | None = None

    @property
    def goes_on(self) -> bool:
        return bool(self._texts)

    @property
    def jobs(self) -> list[_Job]:
        return list({id(text.job): text.job for text in self._texts.values()}.values())

    @property
    def key(self) -> tuple[int, str, float, float]:
        assert self._first is not None
        return self._first.key

    @property
    def size(self) -> _Size:
        return _Size(len(self._texts), max((text.job.length for text in self._texts.values()), default=0))

    def take(self, jobs: Sequence[_Job], episode: AnyEpisode) -> None:
        """Let requests that agree with the batch take part in it, with the rows of their ``episode``."""
        self._first = self._first or jobs[0]
        # numbered on behind all there ever were
        self._texts |= {n: _RowText(*row) for n, row in enumerate(_rows(jobs), self.rows)}
        self.rows += episode.rows
        if self._episode is None:
            self._episode = episode
        else:
            join_episodes(self._episode, episode)

    def decode(self, pause: Callable[[], bool]) -> None:
        """Draw for every row until all are over, or ``pause`` says that another request may join."""
        if not self._texts:
            return
        assert self._episode is not None
        assert self._first is not None
        asked = self._first.asked
        # rows that are over draw no more
        limits = [self._texts[n].job.limit if n in self._texts else 0 for n in range(self.rows)]
        decoding = Decoding(max(limits), asked.temperature, asked.top_p)
        self._episode.decode(decoding, limits, lambda n, ids: self._texts[n].heard(ids), self._heard, pause)

    def _heard(self, n: int, completion: Completion) -> bool:
        text = self._texts[n]
        text.job.answer(text.number, text.choice(completion))
        del self._texts[n]  # a batch that others join goes on for long
        return False


def _seed(job: _Job) -> int:
    return job.asked.seed if job.asked.seed is not None else secrets.randbits(63)


class _RowText:
    """The text of one row as it grows, cut at the first stop text."""

    def __init__(self, job: _Job, number: int) -> None:
        self.job, self.number, self._passed_on = job, number, ""

    def heard(self, ids: Sequence[int]) -> bool:
        """Tell what is certain by now; whether it is to end here: a stop text has come, or nobody waits any more."""
        if self.job.done.is_abandoned:
            return True
        if self.job.listener is None and not self.job.asked.stop:
            return False  # nobody wants to know
        text = self.job.served.model.chat.text(ids)
        cut = self._cut(text)
        if self.job.listener is not None:
            certain = text[:cut] if cut is not None else text[: len(text) - self._uncertain(text)]
            if len(certain) > len(self._passed_on):
                self._pass_on(certain)
        return cut is not None

    def choice(self, completion: Completion) -> Choice:
        """The finished answer; what had been held back is passed on."""
        chat = self.job.served.model.chat
        text = chat.text(completion.ids)
        cut = self._cut(text)
        text = text if cut is None else text[:cut]
        if self.job.listener is not None and text != self._passed_on:
            self._pass_on(text)
        tokens = tuple(chat.text([token]) for token in completion.ids)
        reason = "stop" if cut is not None else completion.finish_reason
        return Choice(text, reason, tokens, completion.logprobs)

    def _pass_on(self, text: str) -> None:
        assert self.job.listener is not None
        self._passed_on = text
        try:
            self.job.listener(self.number, text)
        except Exception as error:  # of this request alone: a stream that lacks its end must not look whole
            self.job.listener = None
            self.job.done.set_exception(_client_error(error))

    def _cut(self, text: str) -> int | None:
        places = [place for stop in self.job.asked.stop if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def _uncertain(self, text: str) -> int:
        """Characters at the end that may yet change, or turn out to begin a stop text."""
        whole = text.rstrip(_OPEN_END)  # some tokenizers show every byte of an open character as one of its own
        longest = max(map(len, self.job.asked.stop), default=1) - 1  # all of a stop text but its last character
        ends = range(min(longest, len(whole)), 0, -1)
        begun = next((n for n in ends if any(stop.startswith(whole[-n:]) for stop in self.job.asked.stop)), 0)
        return len(text) - len(whole) + begun
