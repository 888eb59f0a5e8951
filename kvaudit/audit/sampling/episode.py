"""A batch of rows with one living cache: given tokens go in, drawn tokens come out, the ledger is kept.

Batches are right-padded, so that the chunk a token falls into depends on its row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
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
from kvaudit.audit.sampling.decoding import Completion, Decoding, AnswerScore, draw
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Role

SampleTokens = Callable[[Tensor, list[int]], tuple[list[int], list[float]]]  # from logits [b, V], and tokens drawn so far [b]
EndsTurn = Callable[[int, Sequence[int]], bool]  # whether a row's turn is over, from its number and what it has drawn
OnTurnEnd = Callable[[int, Completion], bool]  # takes a row's turn as soon as it is over; whether the row may go on
ShouldPause = Callable[[], bool]  # whether turns are to stop where they are


class ServedModel(Protocol):
    """What the sampler needs of a loaded model."""

    model: Any  # a transformers causal language model with the ``kvaudit`` attention
    device: torch.device
    max_positions: int

    @property
    def chat(self) -> Any: ...


class _Row:
    """What one row has seen, was given and has drawn."""

    def __init__(self, prompt: Sequence[int], keys: tuple[int, int]) -> None:
        self.ids, self.keys = list(prompt), keys  # of the prompt's entries and of its own
        self.prompt_length = len(prompt)
        self.sampled = [False] * len(prompt)
        self.logprobs = [0.0] * len(prompt)
        self.answer_start, self.retention = len(prompt), 1.0

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


class Episode:
    """A batch of rows with one living cache: given tokens and drawn tokens are compressed as they come.

    Rows that are over leave once they are half of those in the cache: then it is copied once for what every later step
    costs. Others may join them, between two tokens too. Not ``recorded``: rollouts are not kept, and not asked for.
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
        self._held = list(range(len(seeds)))  # the rows in the cache, in its order
        self._over = set[int]()  # the rows that do not go on
        self._gone: dict[int, Rollout] = {}  # those of them that have left the cache
        self._turns: dict[int, tuple[list[int], list[float]]] = {}  # tokens and log-probs of turns that are under way
        self._logits = logits.repeat_interleave(group, 0)  # [b, V] of the next token of the rows in the cache
        self._pending: list[list[int]] = [[] for _ in self._rows]  # drawn, not yet in the cache
        self._queued: list[list[tuple[int, str]]] = [[] for _ in self._rows]  # tokens and roles, not yet in the cache

    @property
    def rows(self) -> int:
        """Rows of the batch, group members consecutive."""
        return len(self._rows)

    @property
    def open_rows(self) -> int:
        """Rows that may still be asked or told something."""
        return len(self._rows) - len(self._over)

    @property
    def has_open_turns(self) -> bool:
        """Whether a turn is under way."""
        return bool(self._turns)

    @property
    def bytes(self) -> int:
        """Bytes that the caches of all rows have allocated now."""
        return self._cache.bytes

    @torch.no_grad()
    def decode(
        self,
        decoding: Decoding,
        limits: Sequence[int] | None = None,
        ended: EndsTurn | None = None,
        heard: OnTurnEnd | None = None,
        pause: ShouldPause | None = None,
    ) -> list[Completion | None]:
        """Draw one completion for every row; ``limits`` gives each row its own number of tokens, 0 for none at all.

        A row ends with a stop token, or where ``ended`` says so of what it has drawn. One that ``heard`` lets go must
        not go on later; without it every row may. ``pause`` is asked after every step: where it says so, turns that
        are under way have no completion yet, and the next call goes on with them.
        """
        most = [decoding.max_new_tokens] * self.rows if limits is None else list(limits)
        found: list[Completion | None] = [None] * self.rows

        def pick(logits: Tensor, drawn: list[int]) -> tuple[list[int], list[float]]:
            # draws are numbered by row position: turns, and whatever shares the batch, change none
            # [b] position of the token that is drawn
            index = [len(self._rows[n].ids) + count for n, count in zip(self._held, drawn, strict=True)]
            return draw(logits, self._seeds, upload(torch.tensor(index), logits.device), decoding)

        def said(n: int, ids: list[int], logprobs: list[float]) -> bool:
            stopped = ids[-1] in self._model.chat.stop_ids or (ended is not None and ended(n, ids))
            if not stopped and len(ids) < most[n]:
                return False
            found[n] = done = Completion(tuple(ids), tuple(logprobs), "stop" if stopped else "length")
            if heard is not None and not heard(n, done):
                self._over.add(n)
            return True

        self._answer([limit > 0 for limit in most], pick, said, pause)
        return found

    @torch.no_grad()
    def score(self, answers: Sequence[Sequence[int]]) -> list[AnswerScore | None]:
        """Let every row say given tokens, one at a time and compressed as drawn ones are; () leaves a row as it is."""
        assert not self._turns, "a turn that was begun goes on"
        found: list[AnswerScore | None] = [None] * self.rows
        likely = [True] * self.rows

        def next_given(logits: Tensor, said: list[int]) -> tuple[list[int], list[float]]:
            # 0 where a row has nothing more to say: it is fed and what comes of it is never looked at
            tokens = [answers[n][at] if at < len(answers[n]) else 0 for n, at in zip(self._held, said, strict=True)]
            logprobs = logits.double().log_softmax(-1)  # [b, V] nats, at temperature 1
            for n, best, token in zip(self._held, logprobs.argmax(-1).tolist(), tokens, strict=True):
                likely[n] &= n not in self._turns or best == token  # rows whose answer is over are not looked at
            picked = torch.tensor(tokens, device=logits.device)[:, None]
            return tokens, logprobs.gather(1, picked)[:, 0].tolist()

        def said(n: int, ids: list[int], logprobs: list[float]) -> bool:
            if len(ids) < len(answers[n]):
                return False
            found[n] = AnswerScore(tuple(logprobs), likely[n])
            return True

        self._answer([len(answer) > 0 for answer in answers], next_given, said)
        return found

    def _answer(
        self,
        running: list[bool],
        pick: SampleTokens,
        said: Callable[[int, list[int], list[float]], bool],
        pause: ShouldPause | None = None,
    ) -> None:
        """The turn of every row that is ``running``: the tokens that ``pick`` gives, each fed to the cache alone.

        ``said`` is asked after every token of a row whether its turn is over.
        """
        assert not any(running[n] for n in self._over), "a row that was let go does not go on"
        assert all(running[n] for n in self._turns), "a turn that was begun goes on"
        self._let_go()
        self._begin({n for n, on in enumerate(running) if on and n not in self._turns})
        logits = self._logits  # [b, V]
        while any(running):
            # tokens of its turn so far, for every row in the cache
            drawn = [len(self._turns[n][0]) if n in self._turns else 0 for n in self._held]
            for n, token, logprob in zip(self._held, *pick(logits, drawn), strict=True):
                if running[n]:
                    ids, logprobs = self._turns[n]
                    ids.append(token)
                    logprobs.append(logprob)
                    running[n] = not said(n, ids, logprobs)
                    if not running[n]:
                        self._rows[n].add(*self._turns.pop(n))
                        self._pending[n] = ids[-1:]  # not fed yet: it enters with what is given next
            if any(running):
                # before the step, which then computes nothing for rows that are over
                self._let_go()
                logits = self._step([self._turns[n][0][-1] if running[n] else -1 for n in self._held])
                if pause is not None and pause():
                    # [b, 1]; rows that are over keep the logits they ended with
                    under_way = torch.tensor([running[n] for n in self._held], device=logits.device)[:, None]
                    self._logits = torch.where(under_way, logits, self._logits)
                    return

    def _begin(self, numbers: Set[int]) -> None:
        """Let these rows begin a turn: they see what they have not seen yet."""
        if not numbers:
            return
        beginning = [n in numbers for n in range(self.rows)]
        self._feed_queued(beginning)
        self._feed_pending(beginning)  # after what was given, which takes its row's drawn token along
        for n, retention in zip(self._held, self._cache.retention().tolist(), strict=True):
            if beginning[n]:
                self._rows[n].answer_start, self._rows[n].retention = len(self._rows[n].ids), retention
                self._turns[n] = ([], [])

    def join(self, other: Episode) -> None:
        """Take in the rows of an episode of the same model and policy, behind its own; that one is used up.

        A row sees, draws and leaves behind what it would have by itself.
        """
        first = self.rows
        if self.open_rows:
            # rows that are over leave first, or they would be copied along
            self._let_go(at_once=True)
            self._cache.join(other._cache)
            self._seeds, self._logits = torch.cat([self._seeds, other._seeds]), torch.cat([self._logits, other._logits])
        else:
            # nobody here goes on: what is left is recorded, and the other's cache takes the place of this one
            self._keep(self._held)
            self._cache, self._seeds, self._logits, self._held = other._cache, other._seeds, other._logits, []
        self._held += [first + n for n in other._held]
        self._over |= {first + n for n in other._over}
        self._gone |= {first + n: rollout for n, rollout in other._gone.items()}
        self._turns |= {first + n: turn for n, turn in other._turns.items()}
        self._rows += other._rows
        self._pending += other._pending
        self._queued += other._queued

    def _let_go(self, *, at_once: bool = False) -> None:
        """Let the rows that are over leave the cache, once they are half of it or ``at_once``, while others stay."""
        stay = [place for place, n in enumerate(self._held) if n not in self._over]
        if not 0 < len(stay) <= (len(self._held) - 1 if at_once else len(self._held) // 2):
            return
        self._keep([n for n in self._held if n in self._over])
        rows = torch.tensor(stay)
        self._cache.reindex(rows)
        there = rows.to(self._logits.device)
        self._seeds, self._logits = self._seeds[there], self._logits[there]
        self._held = [self._held[place] for place in stay]

    def _feed_pending(self, running: Sequence[bool]) -> None:
        """A row that goes on without having been given anything still has to see its last drawn token."""
        tokens = [self._pending[n][-1] if running[n] and self._pending[n] else -1 for n in self._held]
        if any(t >= 0 for t in tokens):
            fed = torch.tensor(tokens, device=self._logits.device)[:, None] >= 0  # [b, 1]
            self._logits = torch.where(fed, self._step(tokens), self._logits)
            for n, token in zip(self._held, tokens, strict=True):
                if token >= 0:
                    self._pending[n] = []

    def extend(self, chunks: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None = None) -> None:
        """Append given tokens, with their roles, to each row (() = nothing); they enter when the row goes on.

        What is given in several calls enters as if it were given in one.
        """
        assert len(chunks) == self.rows
        assert not any(chunks[n] for n in self._over), "a row that was let go is given nothing"
        assert not any(chunks[n] for n in self._turns), "a row in the middle of its turn is given nothing"
        for n, chunk in enumerate(chunks):
            own = [""] * len(chunk) if roles is None else roles[n]
            assert not (self._cache.policy.pinned_roles and chunk and roles is None), "pinned roles must be named"
            self._rows[n].add(chunk)
            self._queued[n] += zip(chunk, own, strict=True)

    @torch.no_grad()
    def _feed_queued(self, running: Sequence[bool]) -> None:
        """Given tokens attend causally, behind the last drawn one, then the policy evicts."""
        fed = [on and bool(tokens) for on, tokens in zip(running, self._queued, strict=True)]
        if not any(fed):
            return
        drawn = str(Role.ASSISTANT)
        tokens = [
            [*((token, drawn) for token in self._pending[n]), *self._queued[n]] if fed[n] else [] for n in self._held
        ]
        for n, on in enumerate(fed):
            if on:
                self._pending[n], self._queued[n] = [], []
        logits = self._prefill([[t for t, _ in row] for row in tokens], [[role for _, role in row] for row in tokens])
        changed = torch.tensor([fed[n] for n in self._held], device=logits.device)[:, None]  # [b, 1]
        self._logits = torch.where(changed, logits, self._logits)

    def _keep(self, leaving: Sequence[int]) -> None:
        if self._recorded:
            self._gone |= self._rollouts(leaving)
            return
        for n in leaving:
            self._rows[n] = _Row((), (0, 0))  # its text is no longer held either

    def rollouts(self) -> list[Rollout]:
        """Every row as it stands, with its ledger."""
        assert self._recorded
        assert not self._turns, "a turn that was begun goes on"
        self._feed_queued([True] * self.rows)
        found = self._gone | self._rollouts(self._held)
        return [found[n] for n in range(self.rows)]

    def _rollouts(self, numbers: Sequence[int]) -> dict[int, Rollout]:
        wanted, cache = set(numbers), self._cache
        # in tokens; what lies behind the end of a shorter row is cut off below
        longest = max(len(self._rows[n].ids) for n in numbers)
        # [b, L, H, T]; times [b, T] of keys and of values, None without codes
        ledger, times = cache.ledger(longest), cache.quantised_at(longest)
        experts, selections = cache.experts(longest), cache.selections()
        peaks, hints = cache.bytes_peaks, None if times is None else cache.hints()
        pinned = cache.pinned()

        def rollout(row: _Row, place: int) -> Rollout:
            own = slice(len(row.ids))
            evicted_at, sampled = ledger[place, :, :, own].clone(), torch.tensor(row.sampled)
            codes = None if times is None else (times[0][place, own].clone(), times[1][place, own].clone())
            return Rollout(
                ids=torch.tensor(row.ids),
                prompt_length=row.prompt_length,
                sampled=sampled,
                sampler_logprobs=torch.tensor(row.logprobs, dtype=torch.float64).float(),
                evicted_at=evicted_at,
                kv_bytes_peak=peaks[place],
                kv_bytes_dense=cache.dense_bytes(len(row.ids)),
                kv_bytes_live=cache.live_bytes(evicted_at, codes, sampled),
                retention=row.retention,
                answer_start=row.answer_start,
                row_keys=row.keys if evictor_of(cache.policy).seeded else None,
                codec=None if codes is None else quantiser_of(cache.policy),
                keys_quantised_at=None if codes is None else codes[0],
                values_quantised_at=None if codes is None else codes[1],
                hints=None if hints is None else hints[place],
                experts=None if experts is None else experts[place, own].clone(),
                selection=None if selections is None else selections[place],
                pinned=None if pinned is None else pinned[place],
            )

        return {n: rollout(self._rows[n], place) for place, n in enumerate(self._held) if n in wanted}

    def _step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token per row (-1 = nothing) and return the next logits [B, V]."""
        ids = torch.tensor(tokens)[:, None]  # [b, 1]
        positions = torch.where(ids >= 0, self._cache.seen[:, None], -1)  # [b, 1], -1 where nothing is fed
        self._cache.begin(positions, decoding=True, pinned=self._pinned([[str(Role.ASSISTANT)]] * len(ids), 1))
        return self._forward(ids.clamp(min=0), positions, columns=None)[:, -1]

    def _pinned(self, roles: Sequence[Sequence[str]] | None, width: int) -> Tensor | None:
        """Which given tokens [B, width] the policy pins, None where it pins none."""
        pinned = self._cache.policy.pinned_roles
        if not pinned:
            return None
        assert roles is not None, "a policy that pins roles needs the roles of what is given"
        return torch.tensor([[role in pinned for role in row] + [False] * (width - len(row)) for row in roles])

    def _prefill(
        self, rows: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None, shared: SharedPrefill | None = None
    ) -> Tensor:
        """Feed whole token lists chunk by chunk; logits [B, V] after each row's last token.

        What is ``shared`` with other policies is the first chunk, into empty caches.
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
        chunk, pinned = self._cache.policy.chunk, self._pinned(roles, ids.shape[1])
        result = None
        for start in range(0, ids.shape[1], chunk):
            part = slice(start, start + chunk)
            last = lengths - 1 - start  # column of each row's last token within this chunk
            ending = (last >= 0) & (last < ids[:, part].shape[1])  # [b], rows that end in this chunk
            # rows end in different columns: a head over all of them would make [B, chunk, V]
            wanted, inverse = torch.unique(last[ending], return_inverse=True)  # [n]; which of them, by ending row
            self._cache.begin(positions[:, part], decoding=False, pinned=None if pinned is None else pinned[:, part])
            forward = partial(self._forward, ids[:, part], positions[:, part], columns=wanted)
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
        """The forward that was announced; logits [B, n, V] at ``columns`` (None: the last one)."""
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
