"""When rows compress and how many entries they then hold: alike in all layers that go by one evictor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.policies import Evictor


class Counts(NamedTuple):
    """A whole number of every row, int64 [B] on the CPU, with the least and the largest of them."""

    rows: Tensor
    least: int
    largest: int

    def all_are(self, number: int) -> bool:
        """Whether every row has this number."""
        return self.least == self.largest == number

    def joined(self, other: Counts) -> Counts:
        """The numbers of these rows and of others behind them."""
        return Counts(
            torch.cat([self.rows, other.rows]), min(self.least, other.least), max(self.largest, other.largest)
        )


def counts_of(rows: Tensor) -> Counts:
    """The numbers of [B] rows, read once."""
    numbers = rows.tolist()
    return Counts(rows, min(numbers), max(numbers))


class Eviction(NamedTuple):
    """Rows that compress now to their ``budgets``: ``due`` bool [B] on the CPU, ``rows`` their index on the device."""

    due: Tensor
    rows: Tensor | slice
    budgets: Counts

    @property
    def every(self) -> bool:
        """Whether all rows are due."""
        return isinstance(self.rows, slice)


class Victims(NamedTuple):
    """The one entry of every head that leaves: its slot, one number where it is the same in all, and its position."""

    slots: Tensor | int  # [B, H]
    positions: Tensor  # [B, H, 1]

    def joined(self) -> Victims:
        """The same with one number for all slots, where they are alike."""
        slots = torch.as_tensor(self.slots)
        first = slots[0, 0]
        return self._replace(slots=int(first)) if bool((slots == first).all()) else self


class Schedule:
    """What one forward means for the layers of an evictor: a function of each row's own tokens, read once for all.

    Entries are counted in the mean over heads: ``arrived`` with those of the forward, ``left`` once it is compressed.
    """

    def __init__(self, evictor: Evictor, rows: int) -> None:
        self.evictor = evictor
        self._since = torch.zeros(rows, dtype=torch.int64)  # decoded tokens since the last eviction
        self.arrived = self.left = counts_of(torch.zeros_like(self._since))
        self.limit: int | None = None  # slots that are ever needed, where the budget bounds them
        self.eviction: Eviction | None = None
        self.victims: Victims | None = None  # of the layers so far, where what leaves is the same in all
        self.places: tuple[Tensor, Tensor] | None = None  # rows that have one new token, and its place in their ring

    def begin(self, positions: Tensor, seen: Tensor, device: torch.device, *, decoding: bool) -> None:
        """Count the tokens at CPU positions [B, Q] (-1 = padding) of rows that have then ``seen`` [B]."""
        evictor, real = self.evictor, positions >= 0
        new, width = real.sum(1), positions.shape[1]
        self.arrived = self.left = counts_of(self.left.rows + new)
        self.limit = self.eviction = self.victims = self.places = None
        if width == 1 and evictor.observed_queries:
            fed = real[:, 0].nonzero()[:, 0]
            self.places = (fed.to(device), (positions[fed, 0] % evictor.observed_queries).to(device))
        if not evictor.evicts:
            return
        budgets = counts_of(evictor.budget_at(seen))
        if not evictor.shares_heads and not (decoding and evictor.phase == "prefill"):
            self.limit = budgets.largest + max(width, evictor.interval)
        due = self.due(new, budgets.rows, decoding=decoding)
        if bool(due.any()):
            self._since[due] = 0
            self.left = counts_of(torch.where(due, budgets.rows, self.arrived.rows))
            rows = slice(None) if bool(due.all()) else due.nonzero()[:, 0].to(device)
            self.eviction = Eviction(due, rows, budgets)

    def due(self, new: Tensor, budgets: Tensor, *, decoding: bool) -> Tensor:
        """Rows [B] that compress once their ``new`` [B] tokens are in, to ``budgets`` [B]."""
        # a row that was given nothing is left as it is, whatever the others of its batch do
        over = (self.arrived.rows > budgets) & (new > 0)
        if not decoding:
            return over & (self.evictor.phase != "decode")
        self._since += new
        return over & (self._since >= self.evictor.interval) & (self.evictor.phase != "prefill")

    def reindex(self, rows: Tensor) -> None:
        """Count for these rows [n], by an index on the CPU, each as often as it is named."""
        self._since = self._since[rows]
        self.arrived = self.left = counts_of(self.left.rows[rows])

    def join(self, other: Schedule) -> None:
        """Count for the rows of another schedule too, behind its own."""
        self._since = torch.cat([self._since, other._since])
        self.arrived = self.left = self.left.joined(other.left)
