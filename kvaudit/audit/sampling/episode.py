"""A batch of rows with one live KV cache, into which tokens are fed or sampled; a ledger records the evictions.

Batches are padded on the right, so that a row's chunk boundaries do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import KVHandler
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.rotary import find_rotary
from kvaudit.audit.cache.routing import hook_expert_blocks
from kvaudit.audit.cache.shared import Prompts, SharedPrefill
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Policy, evictor_of, quantiser_of
from kvaudit.audit.sampling.captured import StepRunner
from kvaudit.audit.sampling.decoding import AnswerScore, Completion, Decoding, draw
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.records import Role

# (logits [b, V], number of tokens in each row's turn [b]) -> next token and its log-prob for every row
SampleTokens = Callable[[Tensor, list[int]], tuple[list[int], list[float]]]
EndsTurn = Callable[[int, Sequence[int]], bool]  # (row, tokens of its turn) -> whether the turn is over
OnTurnEnd = Callable[[int, Completion], bool]  # called when a row's turn ends; returns whether the row continues
ShouldPause = Callable[[], bool]  # called after every step; returns whether to pause the unfinished turns


class ServedModel(Protocol):
    """The attributes of a loaded model that the sampler uses."""

    model: Any  # a transformers causal language model with the ``kvaudit`` attention
    device: torch.device
    max_positions: int

    @property
    def chat(self) -> Any: ...


class _Row:
    """The tokens of one row, prompt first, with the other data that its ``Rollout`` needs about each token."""

    def __init__(self, prompt: Sequence[int], keys: tuple[int, int]) -> None:
        self.ids, self.keys = list(prompt), keys  # seeds of the prompt's entries and of the row's later ones
        self.prompt_length = len(prompt)
        self.sampled = [False] * len(prompt)
        self.logprobs = [0.0] * len(prompt)
        self.answer_start, self.retention = len(prompt), 1.0

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


class Episode:
    """A batch of rows with one live KV cache, which compresses prompt and sampled tokens as they enter.

    Once half of the rows in the cache are finished, all finished rows are removed together: the cache is copied only
    once for them, and later steps are cheaper. Other rows can join, even in the middle of a turn. With
    ``recorded=False`` no rollouts are kept.
    """

    def __init__(
        self,
        model: ServedModel,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        group: int,
        roles: Sequence[Sequence[str]] | None,
        shared: SharedPrefill | None = None,
        *,
        recorded: bool = True,
    ) -> None:
        self._model, self._recorded = model, recorded
        self._seeds = torch.tensor(list(seeds), dtype=torch.int64, device=model.device)
        rotary = find_rotary(model.model, policy)
        blocks = hook_expert_blocks(model.model)
        # one row for each prompt until the cache is expanded to its group
        self._cache = EvictingCache(model.model.config, policy, self._seeds[::group], rotary=rotary, blocks=blocks)
        self._rows = [_Row(prompts[n // group], (seeds[n - n % group], seed)) for n, seed in enumerate(seeds)]
        logits = self._prefill([list(p) for p in prompts], roles, shared)
        self._cache.expand(group, self._seeds)
        self._cached = list(range(len(seeds)))  # numbers of the rows in the cache, in cache order
        self._finished = set[int]()  # rows that do not continue
        self._rollouts_kept: dict[int, Rollout] = {}  # of finished rows that have left the cache
        self._turns: dict[int, tuple[list[int], list[float]]] = {}  # tokens and log-probs of unfinished turns
        self._logits = logits.repeat_interleave(group, 0)  # [b, V], for the next token of each cached row
        self._pending: list[list[int]] = [[] for _ in self._rows]  # sampled, not yet in the cache
        self._queued: list[list[tuple[int, str]]] = [[] for _ in self._rows]  # tokens and roles, not yet in the cache
        self._runner: StepRunner | None = None  # of the decode steps, where they are not computed one by one
        self._room = 0  # steps that the present turns may still take
        self._is_whole = True  # False after a failed call, which may have fed some layers and not others

    @property
    def rows(self) -> int:
        """The number of rows in the batch; the rows of one prompt (a group) are consecutive."""
        return len(self._rows)

    @property
    def open_rows(self) -> int:
        """The number of rows that may still continue."""
        return len(self._rows) - len(self._finished)

    @property
    def has_open_turns(self) -> bool:
        """Whether some turn is paused and has to be finished."""
        return bool(self._turns)

    @property
    def bytes(self) -> int:
        """The bytes that the caches of all rows have allocated now."""
        return self._cache.bytes

    @torch.no_grad()
    def decode(
        self,
        decoding: Decoding,
        limits: Sequence[int] | None = None,
        ends_turn: EndsTurn | None = None,
        on_turn_end: OnTurnEnd | None = None,
        should_pause: ShouldPause | None = None,
    ) -> list[Completion | None]:
        """Sample one completion for every row; ``limits`` has the token limit of each row (0: skip the row).

        A turn ends at a stop token, at its limit, or when ``ends_turn`` returns True. ``on_turn_end`` returns whether
        its row may have another turn later; without this callback every row may. ``should_pause`` is called after
        every step. When it returns True, this call ends: the result is None for unfinished turns, and the next call
        continues them.
        """
        caps = [decoding.max_new_tokens] * self.rows if limits is None else list(limits)
        completions: list[Completion | None] = [None] * self.rows

        def sample(logits: Tensor, counts: list[int]) -> tuple[list[int], list[float]]:
            # draws are numbered by position in the row, so neither turns nor other rows of the batch change them
            positions = [len(self._rows[n].ids) + count for n, count in zip(self._cached, counts, strict=True)]  # [b]
            return draw(logits, self._seeds, upload(torch.tensor(positions), logits.device), decoding)

        def finish_turn(n: int, ids: list[int], logprobs: list[float]) -> bool:
            stopped = ids[-1] in self._model.chat.stop_ids or (ends_turn is not None and ends_turn(n, ids))
            if not stopped and len(ids) < caps[n]:
                return False
            completions[n] = done = Completion(tuple(ids), tuple(logprobs), "stop" if stopped else "length")
            if on_turn_end is not None and not on_turn_end(n, done):
                self._finished.add(n)
            return True

        with self._feeding():
            self._run_turns(caps, sample, finish_turn, should_pause)
        return completions

    @torch.no_grad()
    def score(self, answers: Sequence[Sequence[int]]) -> list[AnswerScore | None]:
        """Feed the given answers one token at a time, compressed like sampled tokens; return their log-probs.

        An empty answer leaves its row unchanged, and its result is None.
        """
        assert not self._turns, "paused turns must be finished first"
        scores: list[AnswerScore | None] = [None] * self.rows
        greedy = [True] * self.rows

        def next_tokens(logits: Tensor, counts: list[int]) -> tuple[list[int], list[float]]:
            # 0 pads a row whose answer is over: it is fed, and its result is ignored
            tokens = [answers[n][k] if k < len(answers[n]) else 0 for n, k in zip(self._cached, counts, strict=True)]
            logprobs = logits.double().log_softmax(-1)  # [b, V] nats, at temperature 1
            for n, best, token in zip(self._cached, logprobs.argmax(-1).tolist(), tokens, strict=True):
                greedy[n] &= n not in self._turns or best == token
            index = torch.tensor(tokens, device=logits.device)[:, None]
            return tokens, logprobs.gather(1, index)[:, 0].tolist()

        def finish_turn(n: int, ids: list[int], logprobs: list[float]) -> bool:
            if len(ids) < len(answers[n]):
                return False
            scores[n] = AnswerScore(tuple(logprobs), greedy[n])
            return True

        with self._feeding():
            self._run_turns([len(answer) for answer in answers], next_tokens, finish_turn)
        return scores

    @contextmanager
    def _feeding(self) -> Iterator[None]:
        """Mark the cache as in use inside the context; raise RunError if an earlier use failed halfway.

        After such a failure some layers may hold tokens that others do not.
        """
        if not self._is_whole:
            raise RunError("an earlier call failed and may have left the cache half fed; open the rows again")
        self._is_whole = False
        yield
        self._is_whole = True  # not after an error

    def _run_turns(
        self,
        limits: Sequence[int],
        next_tokens: SampleTokens,
        finish_turn: Callable[[int, list[int], list[float]], bool],
        should_pause: ShouldPause | None = None,
    ) -> None:
        """Run a turn (sample an answer) in every row with a limit above 0, and feed its tokens to the cache one by one.

        ``limits`` has the token limit of each row. ``next_tokens`` chooses each token from the logits. ``finish_turn``
        is called after every token of a row and returns whether the row's turn is over.
        """
        running = [limit > 0 for limit in limits]
        if self._runner is not None:
            self._runner.begin_turn()
        self._room = max(limits, default=0)
        assert not any(running[n] for n in self._finished), "a finished row cannot continue"
        assert all(running[n] for n in self._turns), "a paused turn must continue"
        self._drop_finished()
        self._begin_turns({n for n, on in enumerate(running) if on and n not in self._turns})
        logits = self._logits  # [b, V]
        while any(running):
            # tokens in the turn of every cached row
            counts = [len(self._turns[n][0]) if n in self._turns else 0 for n in self._cached]
            for n, token, logprob in zip(self._cached, *next_tokens(logits, counts), strict=True):
                if running[n]:
                    ids, logprobs = self._turns[n]
                    ids.append(token)
                    logprobs.append(logprob)
                    running[n] = not finish_turn(n, ids, logprobs)
                    if not running[n]:
                        self._rows[n].add(*self._turns.pop(n))
                        self._pending[n] = ids[-1:]  # enters the cache with the row's next tokens
            if any(running):
                # before the step, so that nothing is computed for finished rows
                self._drop_finished()
                self._room = max(limits[n] - len(ids) for n, (ids, _) in self._turns.items())
                logits = self._step([self._turns[n][0][-1] if running[n] else -1 for n in self._cached])
                if should_pause is not None and should_pause():
                    # [b, 1]; rows whose turn is over keep the logits they ended with
                    unfinished = torch.tensor([running[n] for n in self._cached], device=logits.device)[:, None]
                    self._logits = torch.where(unfinished, logits, self._logits)
                    return

    def _begin_turns(self, numbers: Set[int]) -> None:
        """Begin a turn (an answer) of the rows ``numbers``, by feeding their tokens that are not in the cache yet."""
        if not numbers:
            return
        beginning = [n in numbers for n in range(self.rows)]
        self._feed_queued(beginning)  # which feeds the pending token of its rows too
        self._feed_pending(beginning)
        for n, retention in zip(self._cached, self._cache.retention().tolist(), strict=True):
            if beginning[n]:
                self._rows[n].answer_start, self._rows[n].retention = len(self._rows[n].ids), retention
                self._turns[n] = ([], [])

    def join(self, other: Episode) -> None:
        """Append the rows of ``other``, an episode of the same model and policy; do not use ``other`` afterwards.

        Every row samples and records the same as it would alone.
        """
        start = self.rows
        with self._feeding(), other._feeding():
            if self.open_rows:
                # drop finished rows first, so that they are not copied
                self._drop_finished(at_once=True)
                self._cache.join(other._cache)
                self._seeds = torch.cat([self._seeds, other._seeds])
                self._logits = torch.cat([self._logits, other._logits])
            else:
                # every row here is finished: keep its rollout and take over the other episode's cache
                self._keep_rollouts(self._cached)
                self._cache, self._seeds, self._logits, self._cached = other._cache, other._seeds, other._logits, []
        self._cached += [start + n for n in other._cached]
        self._finished |= {start + n for n in other._finished}
        self._rollouts_kept |= {start + n: rollout for n, rollout in other._rollouts_kept.items()}
        self._turns |= {start + n: turn for n, turn in other._turns.items()}
        self._rows += other._rows
        self._pending += other._pending
        self._queued += other._queued

    def _drop_finished(self, *, at_once: bool = False) -> None:
        """Remove finished rows from the cache if they are at least half of its rows, but never all rows.

        With ``at_once`` even a single finished row is removed.
        """
        stay = [index for index, n in enumerate(self._cached) if n not in self._finished]
        if not 0 < len(stay) <= (len(self._cached) - 1 if at_once else len(self._cached) // 2):
            return
        self._keep_rollouts([n for n in self._cached if n in self._finished])
        rows = torch.tensor(stay)
        self._cache.reindex(rows)
        index = rows.to(self._logits.device)
        self._seeds, self._logits = self._seeds[index], self._logits[index]
        self._cached = [self._cached[index] for index in stay]

    def _feed_pending(self, running: Sequence[bool]) -> None:
        """Feed the last sampled token of rows that continue without new input."""
        tokens = [self._pending[n][-1] if running[n] and self._pending[n] else -1 for n in self._cached]
        if any(t >= 0 for t in tokens):
            fed = torch.tensor(tokens, device=self._logits.device)[:, None] >= 0  # [b, 1]
            self._logits = torch.where(fed, self._step(tokens), self._logits)
            for n, token in zip(self._cached, tokens, strict=True):
                if token >= 0:
                    self._pending[n] = []

    def extend(self, chunks: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None = None) -> None:
        """Append input tokens and their roles to each row; they are fed when the row continues.

        ``chunks`` has () for a row that gets none. Several calls have the same effect as one call with the tokens
        joined.
        """
        assert len(chunks) == self.rows
        assert not any(chunks[n] for n in self._finished), "a finished row takes no input"
        assert not any(chunks[n] for n in self._turns), "a row with a paused turn takes no input"
        for n, chunk in enumerate(chunks):
            chunk_roles = [""] * len(chunk) if roles is None else roles[n]
            assert not (self._cache.policy.pinned_roles and chunk and roles is None), "a pinning policy needs roles"
            self._rows[n].add(chunk)
            self._queued[n] += zip(chunk, chunk_roles, strict=True)

    @torch.no_grad()
    def _feed_queued(self, running: Sequence[bool]) -> None:
        """Feed each running row the input that ``extend`` has queued for it.

        Sampled tokens of the row that are not in the cache yet are fed before.
        """
        fed = [on and bool(tokens) for on, tokens in zip(running, self._queued, strict=True)]
        if not any(fed):
            return
        assistant = str(Role.ASSISTANT)
        tokens = [
            [*((token, assistant) for token in self._pending[n]), *self._queued[n]] if fed[n] else []
            for n in self._cached
        ]
        for n, on in enumerate(fed):
            if on:
                self._pending[n], self._queued[n] = [], []
        logits = self._prefill([[t for t, _ in row] for row in tokens], [[role for _, role in row] for row in tokens])
        changed = torch.tensor([fed[n] for n in self._cached], device=logits.device)[:, None]  # [b, 1]
        self._logits = torch.where(changed, logits, self._logits)

    def _keep_rollouts(self, leaving: Sequence[int]) -> None:
        """Store the rollouts of rows that leave the cache; if none are recorded, free the rows' tokens instead."""
        if self._recorded:
            self._rollouts_kept |= self._rollouts(leaving)
            return
        for n in leaving:
            self._rows[n] = _Row((), (0, 0))  # frees the row's tokens

    def rollouts(self) -> list[Rollout]:
        """Return every row's rollout (tokens, log-probs, and the ledger of evictions), in the order of the rows."""
        assert self._recorded
        assert not self._turns, "paused turns must be finished first"
        with self._feeding():
            self._feed_queued([True] * self.rows)
        rollouts = self._rollouts_kept | self._rollouts(self._cached)
        return [rollouts[n] for n in range(self.rows)]

    def _rollouts(self, numbers: Sequence[int]) -> dict[int, Rollout]:
        """Return {number: rollout} of the rows ``numbers``, which must still be in the cache."""
        selected, cache = set(numbers), self._cache
        # in tokens; shorter rows are cut to their own length below
        longest = max(len(self._rows[n].ids) for n in numbers)
        # [b, L, H, T]; times [b, T] of keys and of values, None without codes
        ledger, times = cache.ledger(longest), cache.quantised_at(longest)
        experts, selections = cache.experts(longest), cache.selections()
        peaks, hints = cache.bytes_peaks, None if times is None else cache.hints()
        pinned = cache.pinned()

        def rollout(row: _Row, index: int) -> Rollout:
            tokens = slice(len(row.ids))
            evicted_at, sampled = ledger[index, :, :, tokens].clone(), torch.tensor(row.sampled)
            codes = None if times is None else (times[0][index, tokens].clone(), times[1][index, tokens].clone())
            return Rollout(
                ids=torch.tensor(row.ids),
                prompt_length=row.prompt_length,
                sampled=sampled,
                sampler_logprobs=torch.tensor(row.logprobs, dtype=torch.float64).float(),
                evicted_at=evicted_at,
                kv_bytes_peak=peaks[index],
                kv_bytes_dense=cache.dense_bytes(len(row.ids)),
                kv_bytes_live=cache.live_bytes(evicted_at, codes, sampled),
                retention=row.retention,
                answer_start=row.answer_start,
                row_keys=row.keys if evictor_of(cache.policy).seeded else None,
                codec=None if codes is None else quantiser_of(cache.policy),
                keys_quantised_at=None if codes is None else codes[0],
                values_quantised_at=None if codes is None else codes[1],
                hints=None if hints is None else hints[index],
                experts=None if experts is None else experts[index, tokens].clone(),
                selection=None if selections is None else selections[index],
                pinned=None if pinned is None else pinned[index],
            )

        return {n: rollout(self._rows[n], index) for index, n in enumerate(self._cached) if n in selected}

    def _step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token per row (-1 = nothing) and return the next logits [B, V]."""
        pinned = self._pinned([[str(Role.ASSISTANT)]] * len(tokens), 1)
        runner = self._runner
        if runner is None or runner.cache is not self._cache or runner.rows != len(tokens):
            runner = self._runner = StepRunner.for_cache(self._model.model, self._cache, self._model.device)
        if runner is not None:
            return runner(tokens, self._room, pinned)
        ids = torch.tensor(tokens)[:, None]  # [b, 1]
        positions = torch.where(ids >= 0, self._cache.seen[:, None], -1)  # [b, 1], -1 where nothing is fed
        self._cache.begin(positions, decoding=True, pinned=pinned)
        return self._forward(ids.clamp(min=0), positions, columns=None)[:, -1]

    def _pinned(self, roles: Sequence[Sequence[str]] | None, width: int) -> Tensor | None:
        """Return which input tokens the policy pins (never evicts), bool [B, width]; None if it pins no roles."""
        pinned = self._cache.policy.pinned_roles
        if not pinned:
            return None
        assert roles is not None, "a pinning policy needs roles"
        return torch.tensor([[role in pinned for role in row] + [False] * (width - len(row)) for row in roles])

    def _prefill(
        self, rows: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None, shared: SharedPrefill | None = None
    ) -> Tensor:
        """Feed the token lists ``rows`` chunk by chunk; return the logits [B, V] after each row's last token.

        ``shared`` lets several policies compute the first chunk only once: their caches are still empty, so its keys,
        values and logits are the same under each of them.
        """
        lengths = torch.tensor([len(r) for r in rows])  # [b] tokens
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row, dtype=torch.int64)
        # padding on the right: positions count up from what a row has seen
        columns = torch.arange(ids.shape[1])  # [T]
        positions = torch.where(columns < lengths[:, None], columns + self._cache.seen[:, None], -1)  # [b, T]
        if int(positions.max()) >= self._model.max_positions:
            raise SpecError(
                f"context of {int(positions.max()) + 1} tokens is longer than the model's {self._model.max_positions} "
                "positions; ask for a shorter context"
            )
        size, pinned = self._cache.policy.chunk, self._pinned(roles, ids.shape[1])
        result = None
        for start in range(0, ids.shape[1], size):
            chunk = slice(start, start + size)
            last = lengths - 1 - start  # column of each row's last token within this chunk
            ending = (last >= 0) & (last < ids[:, chunk].shape[1])  # [b], rows that end in this chunk
            # compute logits only in columns where a row ends, not [B, chunk, V]
            last_columns, inverse = torch.unique(last[ending], return_inverse=True)  # [n]; index into it by ending row
            self._cache.begin(positions[:, chunk], decoding=False, pinned=None if pinned is None else pinned[:, chunk])
            forward = partial(self._forward, ids[:, chunk], positions[:, chunk], columns=last_columns)
            first = shared if start == 0 else None
            logits = forward() if first is None else first.logits(self._cache, Prompts(ids, positions), forward)
            if result is None:
                result = logits.new_zeros(len(rows), logits.shape[-1])  # [b, V]
            rows_ending = ending.nonzero()[:, 0].to(logits.device)
            result[rows_ending] = logits[rows_ending, inverse.to(logits.device)]
        assert result is not None
        return result

    @torch.no_grad()
    def _forward(
        self, ids: Tensor, positions: Tensor, through: KVHandler | None = None, *, columns: Tensor | None
    ) -> Tensor:
        """Run the model on the tokens ``ids`` [B, T] and return logits [B, n, V] at the n ``columns`` of each row.

        ``columns`` None means the last column. The cache's ``begin`` must have been called for the same positions.
        Attention goes through ``through`` instead of the cache if it is given, as in a prefill that policies share.
        """
        device, kv = self._model.device, self._cache if through is None else through
        output = self._model.model(
            input_ids=upload(ids, device),
            position_ids=upload(positions.clamp(min=0), device),
            use_cache=False,
            kv=kv,
            logits_to_keep=1 if columns is None else columns.to(device),
        )
        kv.settle()
        logits: Tensor = output.logits  # [b, n, V]
        return logits
