"""What the slots of a quantised cache hold, known to the host, so that no layer asks the device how far it has come."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.rows import Counts


class Span(NamedTuple):
    """The slots from the first to the last that are meant, and which of those are, by place; None for all."""

    first: int
    end: int
    places: Tensor | None  # on the CPU


def span_of(columns: Tensor) -> Span:
    """The span of some slots, which rise."""
    first, end = int(columns[0]), int(columns[-1]) + 1
    return Span(first, end, None if len(columns) == end - first else columns - first)


class Layout:
    """Row positions [B, tail] of the exact entries of layers that nothing leaves: alike in all of them and all heads.

    Forward by forward: ``add`` before the first layer, then each layer asks the same. What rows of another cache bring
    is not known here: the first layer that asks afterwards is read, once.
    """

    def __init__(self, rows: int) -> None:
        self._at: Tensor | None = torch.zeros(rows, 0, dtype=torch.int64)
        self._cut: int | None = None  # slots that the last forward has freed, once a layer has said or asked
        self._found: dict[tuple[Counts, Counts], Span | None] = {}

    def add(self, positions: Tensor) -> None:
        """The next forward brings these positions [B, Q], on the CPU."""
        self._found.clear()
        if self._at is not None:
            self._at = torch.cat([self._at[:, self._cut :] if self._cut else self._at, positions], 1)
        self._cut = None

    def learn(self, tail: Tensor) -> None:
        """Take positions [B, tail] from a layer, where they are not known."""
        if self._at is None:
            self._at = tail.cpu().long()

    def between(self, done: Counts, until: Counts) -> Span | None:
        """The slots of the tail that hold entries from ``done`` to ``until``; None for none."""
        if (done, until) not in self._found:
            assert self._at is not None
            first, end = (torch.tensor(counts.numbers)[:, None] for counts in (done, until))
            columns = ((self._at >= first) & (self._at < end)).any(0).nonzero()[:, 0]
            self._found[done, until] = span_of(columns) if len(columns) else None
        return self._found[done, until]

    def free(self, slots: int) -> None:
        """Learn from a layer how many first slots of the tail it frees."""
        self._cut = slots

    def freed(self, keys_done: Counts, values_done: Counts) -> int:
        """How many first slots of the tail hold nothing that is exact any more."""
        if self._cut is None:
            assert self._at is not None
            least = torch.tensor([min(both) for both in zip(keys_done.numbers, values_done.numbers, strict=True)])
            exact = (self._at >= least[:, None]).any(0)
            self._cut = int(exact.int().argmax()) if bool(exact.any()) else len(exact)
        return self._cut

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, by an index on the CPU."""
        if self._at is not None:
            self._at = self._at[rows]

    def join(self, other: Layout) -> None:  # noqa: ARG002
        """Hold the rows of another cache too, which may have moved into other slots."""
        self._at, self._cut = None, None
