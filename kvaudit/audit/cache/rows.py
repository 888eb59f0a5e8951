"""What a cache knows of each of its rows: keys to draw by, pins, and since when entries are codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.rows import Counts
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Evictor, Quantiser
from kvaudit.core.errors import SpecError


def join_parts(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Have parts of one cache take in the rows of their like in another; both have a part, or neither has."""
    for own, other in pairs:
        assert (own is None) == (other is None), (own, other)
        if own is not None:
            own.join(other)


class RowKeys:
    """The number of each row [B], by which policies draw; group members share that of their prompt's entries."""

    def __init__(self, keys: Tensor) -> None:
        self._own = keys
        self._shared: tuple[Tensor, Tensor] | None = None  # key and length [B] of the prompt that a group shares

    def entries(self, positions: Tensor, rows: Tensor | slice) -> Tensor:
        """The key of the row that each entry at positions [b, H, K] was made for: [b, H, K], or alike along H and K."""
        own = self._own[rows][:, None, None]  # [b, 1, 1]
        if self._shared is None:
            return own
        keys, lengths = (part[rows][:, None, None] for part in self._shared)
        return torch.where(positions < lengths, keys, own)

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        self._own = self._own[rows]
        if self._shared is not None:
            keys, lengths = self._shared
            self._shared = (keys[rows], lengths[rows])

    def join(self, other: RowKeys) -> None:
        """Hold the rows of another one too, behind its own."""
        if self._shared is not None or other._shared is not None:
            keys, lengths = (torch.cat(both) for both in zip(self._of_prompts, other._of_prompts, strict=True))
            self._shared = (keys, lengths)
        self._own = torch.cat([self._own, other._own])

    @property
    def _of_prompts(self) -> tuple[Tensor, Tensor]:
        """Key and length of the prompt that a row shares, of length 0 where it shares none."""
        return (self._own, torch.zeros_like(self._own)) if self._shared is None else self._shared

    def part(self, keys: Tensor, seen: Tensor) -> None:
        """Give rows that have ``seen`` [B] tokens ``keys`` [B] of their own from now on."""
        # what was fed until now stays under the key that it was drawn by
        self._shared, self._own = (self._own, seen.to(self._own.device)), keys


class Pins:
    """Which positions of each row never leave: bool [B, T] on the CPU, grown as pinned tokens come."""

    def __init__(self, policies: Sequence[Evictor], rows: int) -> None:
        self._policy = min(policies, key=lambda policy: policy.budget)  # of the layer with the least room
        self._at = torch.zeros(rows, 0, dtype=torch.bool)
        self._there: Tensor | None = None  # the same where entries are

    def add(self, positions: Tensor, pinned: Tensor) -> None:
        """Note the new tokens [B, Q], on the CPU: positions (-1 = padding) and whether each is pinned."""
        rows, columns = ((positions >= 0) & pinned).nonzero().unbind(1)  # [n] each
        if not len(rows):
            return
        at = positions[rows, columns]
        grow = max(int(at.max()) + 1 - self._at.shape[1], 0)
        self._at, self._there = torch.nn.functional.pad(self._at, (0, grow)), None
        self._at[rows, at] = True
        self._check()

    def _check(self) -> None:
        policy = self._policy
        beyond = self._at[:, policy.sink :].sum(1)  # pins among the sinks take no room of their own
        if len(beyond) and int(beyond.max()) + policy.sink + policy.window > policy.budget:
            raise SpecError(
                f"policy {policy.name}: pin={policy.pin} holds {int(beyond.max())} tokens, which do not fit "
                f"budget={policy.budget} with sink={policy.sink}, window={policy.window}; raise the budget or pin less"
            )

    def at(self, positions: Tensor, rows: Tensor | slice) -> Tensor:
        """Bool [b, H, K] for slots at positions [b, H, K] (-1 = empty) of some rows."""
        if not self._at.shape[1]:
            return torch.zeros_like(positions, dtype=torch.bool)
        if self._there is None:
            self._there = upload(self._at, positions.device)
        table = self._there[rows]  # [b, T]
        # any place for empty slots, which are masked out below
        index = positions.clamp(min=0, max=table.shape[1] - 1).long()
        found = table[:, None].expand(-1, positions.shape[1], -1).gather(2, index)
        return found & (positions >= 0) & (positions < table.shape[1])  # later tokens were never announced as pins

    def runs(self) -> list[tuple[tuple[int, int], ...]]:
        """Every row's pinned positions, as runs from their first to behind their last."""
        edges = torch.nn.functional.pad(self._at.int(), (1, 1)).diff(dim=1)  # 1 where a run begins, -1 behind it
        return [
            tuple(zip((own > 0).nonzero()[:, 0].tolist(), (own < 0).nonzero()[:, 0].tolist(), strict=True))
            for own in edges
        ]

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, by an index on the CPU, in this order, each as often as it is named."""
        self._at, self._there = self._at[rows], None

    def join(self, other: Pins) -> None:
        """Hold the rows of another one too, behind its own."""
        width = max(self._at.shape[1], other._at.shape[1])
        both = (torch.nn.functional.pad(own._at, (0, width - own._at.shape[1])) for own in (self, other))
        self._at, self._there = torch.cat(list(both)), None


class QuantisationTimes:
    """Since which query each key and value is seen quantised; the same in every layer and head."""

    def __init__(self, codec: Quantiser, rows: int) -> None:
        self._codec = codec
        self._keys: list[list[int]] = [[] for _ in range(rows)]  # one query index per quantised position
        self._values: list[list[int]] = [[] for _ in range(rows)]

    def advance(self, seen: Sequence[int], new: Sequence[int]) -> None:
        """Rows that were given ``new`` tokens have now seen ``seen``."""
        for row, (count, fresh) in enumerate(zip(seen, new, strict=True)):
            if fresh:
                for until, times in ((self._codec.keys_until, self._keys), (self._codec.values_until, self._values)):
                    before = len(times[row])  # entries that are codes already
                    times[row] += self._codec.first_queries(before, until(before, count), count)

    def until(self) -> tuple[Counts, Counts]:
        """How many keys and values of each row are quantised."""
        keys, values = (Counts([len(t) for t in times]) for times in (self._keys, self._values))
        return keys, values

    def tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        """``keys_quantised_at`` and ``values_quantised_at`` [B, tokens] int32."""
        keys, values = (
            torch.tensor([(t + [NEVER] * tokens)[:tokens] for t in times], dtype=torch.int32)
            for times in (self._keys, self._values)
        )
        return keys, values

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        self._keys, self._values = ([list(part[row]) for row in rows.tolist()] for part in (self._keys, self._values))

    def join(self, other: QuantisationTimes) -> None:
        """Hold the rows of another one too, behind its own."""
        self._keys += other._keys
        self._values += other._values
