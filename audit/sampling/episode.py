"""A batch of rows with one living cache: given tokens go in, drawn tokens come out, the ledger is kept.

Batches are right-padded, so that the chunk a token falls into depends on its row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from audit.cache.attention import Attends
from audit.cache.cache import EvictingCache
from audit.cache.ledger import Rollout
from audit.cache.rotary import rotary_for
from audit.cache.routing import watched_blocks
from audit.cache.shared import Prompts, SharedPrefill
from audit.core.errors import SpecError
from audit.core.records import Role
from audit.policies import Policy, evictor_of, quantiser_of
from audit.sampling.decoding import Completion, Decoding, Scored, draw

Pick = Callable[[Tensor, int], tuple[list[int], list[float]]]  # from logits [B, V] and the number of the step
Ended = Callable[[int, Sequence[int]], bool]  # whether a row's turn is over, from its number and what it has drawn


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
    """A batch of rows with one living cache: given tokens and drawn tokens are compressed as they come."""

    def __init__(
        self,
        model: ServedModel,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        group: int,
        roles: Sequence[Sequence[str]] | None,
        shared: SharedPrefill | None = None,
    ) -> None:
        self._model = model
        self._seeds = torch.tensor(list(seeds), dtype=torch.int64, device=model.device)
        rotary = rotary_for(model.model, policy)
        blocks = watched_blocks(model.model)
        self._cache = EvictingCache(model.model.config, policy, self._seeds[::group], rotary=rotary, blocks=blocks)
        self._rows = [_Row(prompts[n // group], (seeds[n - n % group], seed)) for n, seed in enumerate(seeds)]
        logits = self._prefill([list(p) for p in prompts], roles, shared)
        self._cache.expand(group, self._seeds)
        self._logits = logits.repeat_interleave(group, 0)  # [B, V] of the next token
        self._pending: list[list[int]] = [[] for _ in self._rows]  # drawn, not yet in the cache
        self._given: list[list[tuple[int, str]]] = [[] for _ in self._rows]  # tokens and roles, not yet in the cache

    @property
    def rows(self) -> int:
        """Rows of the batch, group members consecutive."""
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """Bytes that the caches of all rows have allocated now."""
        return self._cache.bytes

    @torch.no_grad()
    def decode(
        self, decoding: Decoding, limits: Sequence[int] | None = None, ended: Ended | None = None
    ) -> list[Completion | None]:
        """Draw one completion for every row; ``limits`` gives each row its own number of tokens, 0 for none at all.

        A row ends with a stop token, or where ``ended`` says so of what it has drawn.
        """
        most = [decoding.max_new_tokens] * self.rows if limits is None else list(limits)
        # draws are numbered by row position: turns, and whatever shares the batch, change none
        start = torch.tensor([len(row.ids) for row in self._rows], device=self._logits.device)

        def over(n: int, ids: Sequence[int]) -> bool:
            return ids[-1] in self._stops or (ended is not None and ended(n, ids))

        drawn = self._answer(most, lambda logits, step: draw(logits, self._seeds, start + step, decoding), over)
        return [
            Completion(tuple(ids), logprobs, "stop" if over(n, ids) else "length") if ids else None
            for n, (ids, logprobs) in enumerate(drawn)
        ]

    @torch.no_grad()
    def score(self, answers: Sequence[Sequence[int]]) -> list[Scored | None]:
        """Let every row say given tokens, one at a time and compressed as drawn ones are; () leaves a row as it is."""
        likely = [True] * self.rows

        def given(logits: Tensor, step: int) -> tuple[list[int], list[float]]:
            tokens = [answer[step] if step < len(answer) else 0 for answer in answers]
            logprobs = logits.double().log_softmax(-1)
            for n, best in enumerate(logprobs.argmax(-1).tolist()):
                likely[n] &= step >= len(answers[n]) or best == tokens[n]
            picked = torch.tensor(tokens, device=logits.device)[:, None]
            return tokens, logprobs.gather(1, picked)[:, 0].tolist()

        said = self._answer([len(answer) for answer in answers], given, lambda *_: False)
        return [Scored(logprobs, greedy) if ids else None for (ids, logprobs), greedy in zip(said, likely, strict=True)]

    def _answer(self, most: Sequence[int], pick: Pick, over: Ended) -> list[tuple[list[int], tuple[float, ...]]]:
        """Every row's turn: the tokens that ``pick`` gives, each fed to the cache alone, and their log-probs."""
        running = [limit > 0 for limit in most]
        self._feed_given(running)
        self._feed_pending(running)  # after what was given, which takes its row's drawn token along
        for row, retention, on in zip(self._rows, self._cache.retention().tolist(), running, strict=True):
            if on:
                row.answer_start, row.retention = len(row.ids), retention
        ids: list[list[int]] = [[] for _ in self._rows]
        logprobs: list[list[float]] = [[] for _ in self._rows]
        logits = self._logits
        for step in range(max(most)):
            for n, (token, logprob) in enumerate(zip(*pick(logits, step), strict=True)):
                if running[n]:
                    ids[n].append(token)
                    logprobs[n].append(logprob)
                    running[n] = step + 1 < most[n] and not over(n, ids[n])
            if not any(running):
                break
            logits = self._step([own[-1] if on else -1 for own, on in zip(ids, running, strict=True)])
        for row, own, found in zip(self._rows, ids, logprobs, strict=True):
            row.add(own, found)
        # not fed yet: it enters with what is given next
        self._pending = [own[-1:] or before for own, before in zip(ids, self._pending, strict=True)]
        return [(own, tuple(found)) for own, found in zip(ids, logprobs, strict=True)]

    def _feed_pending(self, running: Sequence[bool]) -> None:
        """A row that goes on without having been given anything still has to see its last drawn token."""
        tokens = [p[-1] if on and p else -1 for p, on in zip(self._pending, running, strict=True)]
        if any(t >= 0 for t in tokens):
            fed = torch.tensor(tokens, device=self._logits.device)[:, None] >= 0
            self._logits = torch.where(fed, self._step(tokens), self._logits)
            self._pending = [[] if t >= 0 else p for t, p in zip(tokens, self._pending, strict=True)]

    def extend(self, chunks: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None = None) -> None:
        """Append given tokens, with their roles, to each row (() = nothing); they enter when the row goes on.

        What is given in several calls enters as if it were given in one.
        """
        assert len(chunks) == self.rows
        for n, chunk in enumerate(chunks):
            own = [""] * len(chunk) if roles is None else roles[n]
            assert not (self._cache.policy.pinned_roles and chunk and roles is None), "pinned roles must be named"
            self._rows[n].add(chunk)
            self._given[n] += zip(chunk, own, strict=True)

    @torch.no_grad()
    def _feed_given(self, running: Sequence[bool]) -> None:
        """Given tokens attend causally, behind the last drawn one, then the policy evicts."""
        fed = [on and bool(given) for on, given in zip(running, self._given, strict=True)]
        if not any(fed):
            return
        drawn = str(Role.ASSISTANT)
        tokens = [
            [*((token, drawn) for token in self._pending[n]), *self._given[n]] if on else [] for n, on in enumerate(fed)
        ]
        for n, on in enumerate(fed):
            if on:
                self._pending[n], self._given[n] = [], []
        logits = self._prefill([[t for t, _ in row] for row in tokens], [[role for _, role in row] for row in tokens])
        self._logits = torch.where(torch.tensor(fed, device=logits.device)[:, None], logits, self._logits)

    def rollouts(self) -> list[Rollout]:
        """Every row as it stands, with its ledger."""
        self._feed_given([True] * self.rows)
        longest = max(len(row.ids) for row in self._rows)
        ledger, times = self._cache.ledger(longest), self._cache.quantised_at(longest)
        codec, experts = quantiser_of(self._cache.policy), self._cache.experts(longest)
        rows = [self._rollout(row, ledger[n]) for n, row in enumerate(self._rows)]
        if experts is not None:
            rows = [replace(row, experts=experts[n, : len(row.ids)].clone()) for n, row in enumerate(rows)]
        selections = self._cache.selections()
        if selections is not None:
            rows = [replace(row, selection=own) for row, own in zip(rows, selections, strict=True)]
        if codec is None or times is None:
            return rows
        return [
            replace(
                row,
                codec=codec,
                keys_quantised_at=times[0][n, : len(row.ids)].clone(),
                values_quantised_at=times[1][n, : len(row.ids)].clone(),
                hints=hints,
            )
            for n, (row, hints) in enumerate(zip(rows, self._cache.hints(), strict=True))
        ]

    @property
    def _stops(self) -> frozenset[int]:
        stops: frozenset[int] = self._model.chat.stop_ids
        return stops

    def _rollout(self, row: _Row, ledger: Tensor) -> Rollout:
        length = len(row.ids)
        return Rollout(
            ids=torch.tensor(row.ids),
            prompt_length=row.prompt_length,
            sampled=torch.tensor(row.sampled),
            sampler_logprobs=torch.tensor(row.logprobs, dtype=torch.float64).float(),
            evicted_at=ledger[:, :, :length].clone(),
            kv_bytes_peak=self._cache.bytes_peak // self.rows,
            kv_bytes_dense=self._cache.dense_bytes(length),
            retention=row.retention,
            answer_start=row.answer_start,
            row_keys=row.keys if evictor_of(self._cache.policy).seeded else None,
        )

    def _step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token per row (-1 = nothing) and return the next logits [B, V]."""
        ids = torch.tensor(tokens)[:, None]
        positions = torch.where(ids >= 0, self._cache.seen[:, None], -1)
        self._cache.begin(positions, decoding=True, pinned=self._pinned([[str(Role.ASSISTANT)]] * self.rows, 1))
        return self._forward(ids.clamp(min=0), positions, columns=None)[:, -1]

    def _pinned(self, roles: Sequence[Sequence[str]] | None, width: int) -> Tensor | None:
        """Which given tokens [B, width] the policy pins, None where it pins none."""
        pinned = self._cache.policy.pinned_roles
        if not pinned:
            return None
        assert roles is not None, "a policy that pins roles needs the roles of what is given"
        return torch.tensor([[role in pinned for role in row] + [False] * (width - len(row)) for row in roles])

    def _prefill(
        self,
        rows: Sequence[Sequence[int]],
        roles: Sequence[Sequence[str]] | None,
        shared: SharedPrefill | None = None,
    ) -> Tensor:
        """Feed whole token lists chunk by chunk; logits [B, V] after each row's last token.

        What is ``shared`` with other policies is the first chunk, into empty caches.
        """
        lengths = torch.tensor([len(r) for r in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row, dtype=torch.int64)
        columns = torch.arange(ids.shape[1])
        positions = torch.where(columns < lengths[:, None], columns + self._cache.seen[:, None], -1)
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
            ending = (last >= 0) & (last < ids[:, part].shape[1])
            # rows end in different columns: a head over all of them would make [B, chunk, V]
            wanted, inverse = torch.unique(last[ending], return_inverse=True)
            self._cache.begin(positions[:, part], decoding=False, pinned=None if pinned is None else pinned[:, part])
            forward = partial(self._forward, ids[:, part], positions[:, part], columns=wanted)
            first = shared if start == 0 else None
            logits = forward() if first is None else first.logits(self._cache, Prompts(ids, positions), forward)
            if result is None:
                result = logits.new_zeros(len(rows), logits.shape[-1])
            rows_ending = ending.nonzero()[:, 0].to(logits.device)
            result[rows_ending] = logits[rows_ending, inverse.to(logits.device)]
        assert result is not None
        return result

    @torch.no_grad()
    def _forward(
        self, ids: Tensor, positions: Tensor, through: Attends | None = None, *, columns: Tensor | None
    ) -> Tensor:
        """The forward that was announced; logits [B, n, V] at ``columns`` (None: the last one)."""
        device, kv = self._model.device, self._cache if through is None else through
        output = self._model.model(
            input_ids=ids.to(device),
            position_ids=positions.clamp(min=0).to(device),
            use_cache=False,
            kv=kv,
            logits_to_keep=1 if columns is None else columns.to(device),
        )
        kv.settle()
        logits: Tensor = output.logits
        return logits
