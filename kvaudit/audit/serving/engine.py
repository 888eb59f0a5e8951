"""The sampling thread of the server: requests with the same checkpoint, policy, temperature and top_p share a batch.

A request joins a running batch as soon as there is room, unless another request has waited longer for a batch with
other settings. It is answered as soon as its own rows are complete.
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
from kvaudit.audit.sampling.chat import Chat, ChatTokens
from kvaudit.audit.sampling.decoding import Completion, Decoding
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import AnyEpisode, Sampler, join_episodes
from kvaudit.audit.serving.answers import AnswerReader
from kvaudit.audit.serving.wire import ChatRequest, Choice, count_characters
from kvaudit.core.errors import AuditError, RunError, SpecError, UnknownName

DEFAULT_TOKENS = 512  # of an answer, if the request sets no max_tokens
_MAX_ROWS = 4096  # of a batch over its whole life: each decoding step visits all of them
_CLOSING = "the server is shutting down"
_REPLACEMENT = "�"  # the decoded form of an incomplete character
TextListener = Callable[[int, str], None]  # called with the number of a choice and its text so far


class QueueFull(RunError):
    """The error of a new request while the largest allowed number of requests is already waiting."""


@dataclass(frozen=True)
class ModelAndPolicy:
    """The checkpoint and policy that a model name stands for."""

    model: LoadedModel
    policy: Policy


class PendingAnswers(Future[list[Choice]]):
    """The future answers to one request; ``reader`` finds the tool calls in them (None for a request without tools)."""

    reader: AnswerReader | None = None
    tool_form = ""  # in which the request offers its tools
    is_abandoned = False  # the client is gone: the request ends at its next token

    def abandon(self) -> None:
        """Cancel the request; if it is already running, end it at its next token."""
        self.is_abandoned = True
        self.cancel()

    def read_tools(self, request: ChatRequest, chat: Chat) -> None:
        """Set ``reader``, which reads tool calls in the answers, and ``tool_form``, the model's own syntax of calls.

        Does nothing for a request without tools.
        """
        if request.tools:
            self.tool_form = chat.tool_form_of(request.messages, request.tools)
            form, opens_thought = chat.reader_of(self.tool_form), chat.opens_thought
            self.reader = AnswerReader(
                request.tools, form, opens_thought=opens_thought, parallel=request.parallel_calls
            )


@dataclass
class _Job:
    """One request, with its answers (choices) so far; the sampling thread calls ``listener`` as text is sampled.

    ``target`` is the checkpoint and policy of its model name, ``limit`` the largest number of new tokens.
    """

    request: ChatRequest
    target: ModelAndPolicy
    prompt: ChatTokens
    limit: int
    listener: TextListener | None
    pending: PendingAnswers = field(default_factory=PendingAnswers)
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, float, float]:
        """The checkpoint, policy, temperature and top_p; requests with equal keys can share a batch."""
        return id(self.target.model), self.target.policy.hash, self.request.temperature, self.request.top_p

    @property
    def length(self) -> int:
        return len(self.prompt.ids) + self.limit

    def add(self, number: int, choice: Choice) -> None:
        """Add answer number ``number``; once all answers of the request are there, complete it."""
        self.choices[number] = choice
        if len(self.choices) == self.request.choices and not self.pending.done():
            self.pending.set_result([self.choices[n] for n in range(self.request.choices)])


class SamplingEngine:
    """The server's sampling thread, which answers requests to several checkpoints, each under any policy.

    ``models`` are the checkpoints by name; ``aliases`` maps further names to CHECKPOINT@POLICY.
    """

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        aliases: Mapping[str, str] | None = None,
        *,
        batch_tokens: int = 16_384,
        max_waiting: int = 1024,
    ) -> None:
        self._models, self._aliases = {name: pack_weights(model) for name, model in models.items()}, dict(aliases or {})
        self._longest_token = {id(m): max(map(len, m.chat.tokenizer.get_vocab())) for m in self._models.values()}
        self._batch_tokens, self._max_waiting = batch_tokens, max_waiting
        self._queue: queue.Queue[_Job | None] = queue.Queue()  # None: shut down
        self._waiting = deque[_Job]()  # taken from the queue by the thread, but in no batch yet
        self._is_ending = False  # set by the thread, which finishes the running batch
        self._is_closed, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        for name in self._aliases:
            self.resolve(name)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """The model names that clients see: aliases and checkpoints; a checkpoint's name alone means no compression."""
        return [*self._models, *self._aliases]

    def resolve(self, name: str) -> ModelAndPolicy:
        """Return the checkpoint and policy of a model name such as ``NAME@POLICY``; raise UnknownName or SpecError."""
        checkpoint, _, policy = self._aliases.get(name, name).partition("@")
        if checkpoint not in self._models:
            raise UnknownName("model", name, self.names)
        return ModelAndPolicy(self._models[checkpoint], parse_policy(policy or "none"))

    def submit(self, request: ChatRequest, listener: TextListener | None = None) -> tuple[int, PendingAnswers]:
        """Queue a request; return the number of its prompt tokens, and the future answers.

        Raises SpecError for a prompt that does not fit the model, UnknownName for an unknown model, QueueFull if too
        many requests wait, and RunError once the server is shutting down.
        """
        if self._queue.qsize() + len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests are waiting, the maximum; try again later")
        target = self.resolve(request.model)
        self._check_characters(request, target.model)
        prompt = target.model.chat.prompt(request.messages, (), request.tools)
        longest = rotary_length_limit(target.model.model.config)  # beyond it a row would depend on its batch
        positions = min(target.model.max_positions, longest or target.model.max_positions)
        room, wanted = positions - len(prompt.ids), request.max_tokens or 1
        if wanted > room:
            raise SpecError(
                f"the prompt has {len(prompt.ids)} tokens and its answer up to {wanted}, the model has {positions} "
                "positions; shorten the prompt or lower max_tokens"
            )
        # without max_tokens an answer may be shorter than the default
        limit = min(request.max_tokens or DEFAULT_TOKENS, room)
        job = _Job(request, target, prompt, limit, listener)
        job.pending.read_tools(request, target.model.chat)
        with self._lock:  # nothing may be queued after None, where it would never be answered
            if self._is_closed:
                raise RunError(_CLOSING)
            self._queue.put(job)
        return len(prompt.ids), job.pending

    def _check_characters(self, request: ChatRequest, model: LoadedModel) -> None:
        """Raise SpecError if a prompt has too many characters to fit; counting its tokens would take minutes."""
        most = model.max_positions * self._longest_token[id(model)]
        length = sum(len(message.content) for message in request.messages)
        length += count_characters(request.tools, [call for message in request.messages for call in message.tool_calls])
        if length > most:
            raise SpecError(
                f"the prompt has {length} characters, the {model.max_positions} positions of the model hold at most "
                f"{most}; shorten the prompt"
            )

    def close(self) -> None:
        """Shut down after the running batch; waiting requests fail."""
        with self._lock:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._receive(wait=not self._waiting)
            if self._is_ending:
                for job in _start(self._waiting):
                    job.pending.set_exception(RunError(_CLOSING))
                return
            if jobs := _start(self._next_batch()):
                self._answer(jobs)

    def _receive(self, *, wait: bool) -> None:
        """Move requests from the queue to ``_waiting``; with ``wait``, first wait until one arrives."""
        with suppress(queue.Empty):
            while not self._is_ending:
                job = self._queue.get(block=wait)
                wait = False
                if job is None:
                    self._is_ending = True
                else:
                    self._waiting.append(job)

    def _next_batch(self) -> list[_Job]:
        """Take the oldest request, and those that can share a batch with it, out of ``_waiting``; return them."""
        batch, others, size = list[_Job](), list[_Job](), _Size(0, 0)
        for job in self._waiting:
            if not batch or (job.key == batch[0].key and size.plus(job).fits(self._batch_tokens)):
                batch.append(job)
                size = size.plus(job)
            else:
                others.append(job)
        self._waiting = deque(others)
        return batch

    def _answer(self, jobs: Sequence[_Job]) -> None:
        """Serve a batch of requests, and those that join it meanwhile, until all of them are answered."""
        batch = _Batch()
        while jobs or batch.is_running:
            prefilled = _prefill(jobs)
            try:
                for group, episode in prefilled:
                    batch.add(group, episode)
                batch.decode(lambda: self._can_join(batch))
            except Exception as error:  # whatever a model raises, each client must get a response
                for job in (*batch.jobs, *(job for group, _ in prefilled for job in group)):
                    if not job.pending.done():
                        job.pending.set_exception(_client_error(error))
                return
            jobs = []
            while self._can_join(batch, jobs):
                jobs = [*jobs, *_start([self._waiting.popleft()])]

    def _can_join(self, batch: _Batch, joining: Sequence[_Job] = ()) -> bool:
        """Return whether the request that has waited longest can join the batch.

        It must have the batch's settings, and fit into it together with the ``joining`` requests.
        """
        self._receive(wait=False)
        while self._waiting and self._waiting[0].pending.cancelled():
            self._waiting.popleft()
        if self._is_ending or not self._waiting or not batch.is_running or self._waiting[0].key != batch.key:
            return False
        size, rows = batch.size, batch.rows
        for job in (*joining, self._waiting[0]):
            size, rows = size.plus(job), rows + job.request.choices
        return rows <= _MAX_ROWS and size.fits(self._batch_tokens)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first of the stop texts begins, None if the text has none of them."""
    return min((index for stop in stops if (index := text.find(stop)) >= 0), default=None)


def _start(jobs: Sequence[_Job]) -> list[_Job]:
    """Mark requests as running, so that they can no longer be cancelled; leave out those that already were."""
    return [job for job in jobs if job.pending.set_running_or_notify_cancel()]


def _prefill(jobs: Sequence[_Job]) -> list[tuple[Sequence[_Job], AnyEpisode]]:
    """Prefill the prompts of requests with equal keys, one row for each answer; return (requests, their rows) pairs.

    If that fails, each request is tried alone, so that one bad prompt does not fail the others.
    """
    if not jobs:
        return []
    target, rows = jobs[0].target, _rows(jobs)
    sampler = Sampler(target.model, target.policy, recorded=False)
    prompts, roles = [job.prompt.ids for job, _ in rows], [job.prompt.roles for job, _ in rows]
    try:
        seeds = [derive_seed("serve", _seed(job), number) for job, number in rows]
        return [(jobs, sampler.open(prompts, seeds, roles=roles))]
    except Exception as error:
        if len(jobs) > 1:
            return [group for job in jobs for group in _prefill([job])]
        jobs[0].pending.set_exception(_client_error(error))
        return []


def _rows(jobs: Sequence[_Job]) -> list[tuple[_Job, int]]:
    return [(job, number) for job in jobs for number in range(job.request.choices)]


def _client_error(error: Exception) -> AuditError:
    return error if isinstance(error, AuditError) else RunError(f"sampling failed: {type(error).__name__}")


class _Size(NamedTuple):
    """The size of a batch: its number of rows, and the tokens of the longest row, prompt and answer together."""

    rows: int
    longest: int

    def plus(self, job: _Job) -> _Size:
        return _Size(self.rows + job.request.choices, max(self.longest, job.length))

    def fits(self, tokens: int) -> bool:
        """Return whether the batch has at most ``tokens`` tokens, padding included."""
        return self.rows * self.longest <= tokens


class _Batch:
    """The running batch: the rows of requests of one checkpoint, policy, temperature and top_p (``_Job.key``)."""

    def __init__(self) -> None:
        self.rows = 0  # including completed rows
        self._texts: dict[int, _RowText] = {}  # of incomplete rows
        self._first: _Job | None = None
        self._episode: AnyEpisode | None = None

    @property
    def is_running(self) -> bool:
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

    def add(self, jobs: Sequence[_Job], episode: AnyEpisode) -> None:
        """Add requests to the batch; ``episode`` holds their rows, with prompts already prefilled."""
        self._first = self._first or jobs[0]
        self._texts |= {n: _RowText(*row) for n, row in enumerate(_rows(jobs), self.rows)}
        self.rows += episode.rows
        if self._episode is None:
            self._episode = episode
        else:
            join_episodes(self._episode, episode)

    def decode(self, pause: Callable[[], bool]) -> None:
        """Sample tokens until all rows are complete, or ``pause`` returns True because another request may join."""
        if not self._texts:
            return
        assert self._episode is not None
        assert self._first is not None
        request = self._first.request
        # completed rows draw no more
        limits = [self._texts[n].job.limit if n in self._texts else 0 for n in range(self.rows)]
        decoding = Decoding(max(limits), request.temperature, request.top_p)
        self._episode.decode(decoding, limits, lambda n, ids: self._texts[n].update(ids), self._complete, pause)

    def _complete(self, n: int, completion: Completion) -> bool:
        text = self._texts[n]
        text.job.add(text.number, text.choice(completion))
        del self._texts[n]  # only now: if the lines above raise, ``jobs`` must still hold this request
        return False


def _seed(job: _Job) -> int:
    return job.request.seed if job.request.seed is not None else secrets.randbits(63)


class _RowText:
    """The growing text of one row (one answer of a request), cut at the first stop text."""

    def __init__(self, job: _Job, number: int) -> None:
        self.job, self.number, self._sent = job, number, ""

    def update(self, ids: Sequence[int]) -> bool:
        """Send the listener the text that cannot change any more; return whether the row ends.

        ``ids`` are the tokens sampled so far. A row ends at a stop text, or because the client has disconnected.
        """
        if self.job.pending.is_abandoned:
            return True
        if self.job.listener is None and not self.job.request.stop:
            return False
        text = self.job.target.model.chat.text(ids)
        cut = find_stop(text, self.job.request.stop)
        if self.job.listener is not None:
            final = text[:cut] if cut is not None else text[: len(text) - self._pending_characters(text)]
            if len(final) > len(self._sent):
                self._send(final)
        return cut is not None

    def choice(self, completion: Completion) -> Choice:
        """Return the complete answer, after sending the rest of its text."""
        chat = self.job.target.model.chat
        text = chat.text(completion.ids)
        cut = find_stop(text, self.job.request.stop)
        text = text if cut is None else text[:cut]
        if self.job.listener is not None and text != self._sent:
            self._send(text)
        tokens = tuple(chat.text([token]) for token in completion.ids)
        reason = "stop" if cut is not None else completion.finish_reason
        return Choice(text, reason, tokens, completion.logprobs)

    def _send(self, text: str) -> None:
        assert self.job.listener is not None
        self._sent = text
        try:
            self.job.listener(self.number, text)
        except Exception as error:  # fails only this request, so that an incomplete stream does not look complete
            self.job.listener = None
            self.job.pending.set_exception(_client_error(error))

    def _pending_characters(self, text: str) -> int:
        """Return how many characters at the end of the text cannot be sent yet.

        They may still change, or be the beginning of a stop text.
        """
        decoded = text.rstrip(_REPLACEMENT)  # some tokenizers show one for each byte of an incomplete character
        longest = max(map(len, self.job.request.stop), default=1) - 1  # a proper beginning of a stop text
        lengths = range(min(longest, len(decoded)), 0, -1)
        stop_start = next(
            (n for n in lengths if any(stop.startswith(decoded[-n:]) for stop in self.job.request.stop)), 0
        )
        return len(text) - len(decoded) + stop_start
