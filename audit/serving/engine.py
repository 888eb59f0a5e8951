"""One thread that samples: requests that wait for the same checkpoint, policy and temperature become one batch."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from audit.core.errors import AuditError, RunError, SpecError, UnknownName
from audit.policies import Policy, parse_policy
from audit.policies.draws import derive_seed
from audit.sampling.chat import Rendered
from audit.sampling.model import LoadedModel
from audit.sampling.packed import packed
from audit.sampling.sampler import Completion, Decoding, Sampler
from audit.serving.wire import ChatRequest, Choice

DEFAULT_TOKENS = 512
_CLOSING = "the server is shutting down"
_OPEN_END = "�"  # what the first bytes of a character decode to until the others come
Told = Callable[[int, str], None]  # number of the choice, and its text so far


class Busy(RunError):
    """More requests wait than the server holds."""


@dataclass(frozen=True)
class ServedName:
    """What a model name stands for."""

    model: LoadedModel
    policy: Policy


@dataclass
class _Job:
    """One request on its way. ``told`` hears of text as it is drawn, from the sampling thread."""

    asked: ChatRequest
    served: ServedName
    prompt: Rendered
    limit: int
    told: Told | None
    done: Future[list[Choice]] = field(default_factory=Future)

    @property
    def key(self) -> tuple[int, str, float, float]:
        """What requests of one batch share."""
        return id(self.served.model), self.served.policy.hash, self.asked.temperature, self.asked.top_p


class Engine:
    """Checkpoints by name, served under any policy. ``aliases`` are other names, which do not tell what they serve."""

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        aliases: Mapping[str, str] | None = None,
        *,
        batch_tokens: int = 16_384,
        most_waiting: int = 1024,
    ) -> None:
        self._models, self._aliases = {name: packed(model) for name, model in models.items()}, dict(aliases or {})
        self._batch_tokens, self._most_waiting = batch_tokens, most_waiting
        self._waiting: queue.Queue[_Job | None] = queue.Queue()
        self._kept = 0  # requests that were taken from the queue and wait for another batch
        self._closing, self._door = False, threading.Lock()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)
        for name in self._aliases:
            self.served(name)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """What a client can ask for; a checkpoint's name alone is served under none."""
        return [*self._models, *self._aliases]

    def served(self, name: str) -> ServedName:
        """What a name stands for; raises UnknownName or SpecError."""
        checkpoint, _, policy = self._aliases.get(name, name).partition("@")
        if checkpoint not in self._models:
            raise UnknownName("model", name, self.names)
        return ServedName(self._models[checkpoint], parse_policy(policy or "none"))

    def submit(self, asked: ChatRequest, told: Told | None = None) -> tuple[int, Future[list[Choice]]]:
        """Queue a request; returns its prompt tokens and its answers to be.

        Raises SpecError, UnknownName, Busy, or RunError once the engine closes.
        """
        if self._waiting.qsize() + self._kept >= self._most_waiting:
            raise Busy(f"{self._most_waiting} requests wait already; try again later")
        served = self.served(asked.model)
        prompt = served.model.chat.opening(asked.messages)
        room = served.model.max_positions - len(prompt.ids)
        limit = min(asked.max_tokens or DEFAULT_TOKENS, room)
        if room < 1 or (asked.max_tokens or 0) > room:
            raise SpecError(
                f"the prompt takes {len(prompt.ids)} tokens and max_tokens is {asked.max_tokens}, the model has "
                f"{served.model.max_positions} positions; send less"
            )
        job = _Job(asked, served, prompt, limit, told)
        with self._door:  # nothing may be queued behind the end, where nobody would answer it
            if self._closing:
                raise RunError(_CLOSING)
            self._waiting.put(job)
        return len(prompt.ids), job.done

    def close(self) -> None:
        """Finish what is under way; requests that still wait fail."""
        with self._door:
            self._closing = True
            self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        kept: list[_Job] = []
        while True:
            kept, open_ = self._gathered(kept)
            if not open_:
                for job in _wanted(kept):
                    job.done.set_exception(RunError(_CLOSING))
                return
            batch, kept = self._chosen(kept)
            self._kept = len(kept)
            if begun := _wanted(batch):
                self._answer(begun)

    def _gathered(self, kept: list[_Job]) -> tuple[list[_Job], bool]:
        """Everything that waits now, at least one request; False when the engine closes."""
        found = list(kept)
        while True:
            try:
                job = self._waiting.get(block=not found)
            except queue.Empty:
                return found, True
            if job is None:
                return found, False
            found.append(job)

    def _chosen(self, jobs: Sequence[_Job]) -> tuple[list[_Job], list[_Job]]:
        """The oldest request with those that can share its batch, and the rest, in their order."""
        batch, rest = list[_Job](), list[_Job]()
        longest = rows = 0
        for job in jobs:
            length, own = len(job.prompt.ids) + job.limit, job.asked.choices
            fits = (rows + own) * max(longest, length) <= self._batch_tokens
            if batch and not (job.key == batch[0].key and fits):
                rest.append(job)
                continue
            batch.append(job)
            longest, rows = max(longest, length), rows + own
        return batch, rest

    def _answer(self, jobs: Sequence[_Job]) -> None:
        try:
            answers = _sampled(jobs)
        except AuditError as error:
            for job in jobs:
                job.done.set_exception(error)
            return
        except Exception as error:  # a request must be answered whatever a model does, or its client waits for ever
            for job in jobs:
                job.done.set_exception(RunError(f"sampling failed: {type(error).__name__}"))
            return
        for job, choices in zip(jobs, answers, strict=True):
            job.done.set_result(choices)


def _wanted(jobs: Sequence[_Job]) -> list[_Job]:
    """Those that somebody still waits for. From here on they cannot be cancelled, and must be answered."""
    return [job for job in jobs if job.done.set_running_or_notify_cancel()]


def _sampled(jobs: Sequence[_Job]) -> list[list[Choice]]:
    """Every job's choices, sampled as one batch of rows."""
    first = jobs[0]
    rows = [(job, number) for job in jobs for number in range(job.asked.choices)]
    texts = [_Text(job, number) for job, number in rows]
    sampler = Sampler(first.served.model, first.served.policy)
    seeds = [derive_seed("serve", _seed(job), number) for job, number in rows]
    prompts, roles = [job.prompt.ids for job, _ in rows], [job.prompt.roles for job, _ in rows]
    episode = sampler.open(prompts, seeds, roles=roles)
    limits = [job.limit for job, _ in rows]
    decoding = Decoding(max(limits), first.asked.temperature, first.asked.top_p)
    drawn = episode.decode(decoding, limits, lambda n, ids: texts[n].heard(ids), lambda *_: False)
    found: dict[int, list[Choice]] = {id(job): [] for job in jobs}
    for (job, _), text, completion in zip(rows, texts, drawn, strict=True):
        assert completion is not None, "every row has room for a token"
        found[id(job)].append(text.choice(completion))
    return [found[id(job)] for job in jobs]


def _seed(job: _Job) -> int:
    return job.asked.seed if job.asked.seed is not None else secrets.randbits(63)


class _Text:
    """The text of one row as it grows, cut at the first stop text."""

    def __init__(self, job: _Job, number: int) -> None:
        self._job, self._number, self._said = job, number, ""

    def heard(self, ids: Sequence[int]) -> bool:
        """Tell what is certain by now; whether a stop text has come."""
        if self._job.told is None and not self._job.asked.stop:
            return False  # nobody wants to know
        text = self._job.served.model.chat.text(ids)
        cut = self._cut(text)
        if self._job.told is not None:
            certain = text[:cut] if cut is not None else text[: len(text) - self._uncertain(text)]
            if len(certain) > len(self._said):
                self._tell(certain)
        return cut is not None

    def choice(self, completion: Completion) -> Choice:
        """The finished answer; what had been held back is told."""
        chat = self._job.served.model.chat
        text = chat.text(completion.ids)
        cut = self._cut(text)
        text = text if cut is None else text[:cut]
        if self._job.told is not None and text != self._said:
            self._tell(text)
        tokens = tuple(chat.text([token]) for token in completion.ids)
        reason = "stop" if cut is not None else completion.finish_reason
        return Choice(text, reason, tokens, completion.logprobs)

    def _tell(self, text: str) -> None:
        assert self._job.told is not None
        self._said = text
        self._job.told(self._number, text)

    def _cut(self, text: str) -> int | None:
        places = [place for stop in self._job.asked.stop if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def _uncertain(self, text: str) -> int:
        """Characters at the end that may yet change, or turn out to begin a stop text."""
        whole = text.rstrip(_OPEN_END)  # some tokenizers show every byte of an open character as one of its own
        longest = max(map(len, self._job.asked.stop), default=1) - 1
        ends = range(min(longest, len(whole)), 0, -1)
        begun = next((n for n in ends if any(stop.startswith(whole[-n:]) for stop in self._job.asked.stop)), 0)
        return len(text) - len(whole) + begun
