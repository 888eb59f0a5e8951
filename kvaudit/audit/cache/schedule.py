"""When rows compress and how many entries they then hold: alike in all layers that go by one evictor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Evictor


class Counts:
    """A whole number of every row, with the least and the largest of them: known to the host, so nothing waits."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self.least, self.largest = min(self.numbers), max(self.numbers)
        self._there: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The same int64 [B] on a device, copied there once."""
        if self._there is None or self._there.device != device:
            self._there = upload(torch.tensor(self.numbers), device)
        return self._there

    def all_are(self, number: int) -> bool:
        """Whether every row has this number."""
        return self.least == self.largest == number

    def of(self, rows: Tensor) -> Counts:
        """The numbers of these rows [n]."""
        return Counts([self.numbers[row] for row in rows.tolist()])

    def joined(self, other: Counts) -> Counts:
        """The numbers of these rows and of others behind them."""
        return Counts(self.numbers + other.numbers)


class Eviction(NamedTuple):
    """Rows that compress now to their ``budgets``: whether each is ``due``, and ``rows``, their index on the device."""

    due: Sequence[bool]
    rows: Tensor | slice
    budgets: Counts

    @property
    def every(self) -> bool:
        """Whether all rows are due."""
        return isinstance(self.rows, slice)


class Arriving(NamedTuple):
    """What a forward of ``width`` columns brings to every row: how many tokens, and the position of the first.

    ``first`` is -1 where a row gets none. ``even``: there is no padding, and all rows begin at one position.
    """

    width: int
    new: tuple[int, ...]
    first: tuple[int, ...]

    @property
    def even(self) -> bool:
        """Whether every column holds a token of every row, at one position for all."""
        return min(self.new) == self.width and len(set(self.first)) == 1


def arriving_of(positions: Tensor) -> Arriving:
    """Read off CPU row positions [B, Q], -1 for padding, which rise along a row."""
    width = positions.shape[1]
    if width == 1:
        places = tuple(row[0] for row in positions.tolist())
        return Arriving(1, tuple(int(at >= 0) for at in places), places)
    real = positions >= 0
    # positions rise, so that the first is the least
    first = torch.where(real, positions, NEVER).amin(1) if width else torch.full((len(positions),), NEVER)
    return Arriving(width, tuple(real.sum(1).tolist()), tuple(-1 if at == NEVER else at for at in first.tolist()))


class Victims(NamedTuple):
    """The one entry of every head that leaves: its slot and its position, a number where it is the same in all."""

    slots: Tensor | int  # [B, H]
    positions: Tensor | int  # [B, H, 1]

    def joined(self) -> Victims:
        """The same with one number for all slots, where they are alike; a device is not asked."""
        slots = torch.as_tensor(self.slots)
        if slots.device.type != "cpu":
            return self
        first = slots[0, 0]
        return self._replace(slots=int(first)) if bool((slots == first).all()) else self


class Schedule:
    """What one forward means for the layers of an evictor: a function of each row's own tokens, the same for all.

    Entries are counted in the mean over heads: ``arrived`` with those of the forward, ``left`` once it is compressed.
    In plain numbers, as a step of decoding has a few, and an operator for each would take longer.
    """

    def __init__(self, evictor: Evictor, rows: int) -> None:
        self.evictor = evictor
        self._since = [0] * rows  # decoded tokens since the last eviction
        self.arrived = self.left = Counts(self._since)
        # positions by slot before the forward, where all rows, heads and layers hold the same; None: not known here
        self.order: list[int] | None = None
        self.limit: int | None = None  # slots that are ever needed, where the budget bounds them
        self.eviction: Eviction | None = None
        self.victims: Victims | None = None  # of the layers so far, where what leaves is the same in all
        self.places: tuple[Tensor, Tensor] | None = None  # rows with one new token, and its place in their ring

    def begin(self, arriving: Arriving, seen: Tensor, device: torch.device, *, decoding: bool) -> None:
        """Count the tokens of a forward; rows have then ``seen`` [B]."""
        evictor, new = self.evictor, arriving.new
        self.arrived = self.left = Counts([left + more for left, more in zip(self.left.numbers, new, strict=True)])
        self.limit = self.eviction = self.victims = self.places = None
        if arriving.width > 1 or not arriving.even:
            self.order = None
        if arriving.width == 1 and evictor.observed_queries:
            self.places = self._places(arriving, device)
        if not evictor.evicts:
            return
        budgets = Counts(evictor.budget_at(seen).tolist())
        # of heads that share, the fullest may hold more; phase prefill never cuts what was decoded
        if not evictor.shares_heads and not (decoding and evictor.phase == "prefill"):
            self.limit = budgets.largest + max(arriving.width, evictor.interval)
        due = self.due(new, budgets, decoding=decoding)
        if any(due):
            self._since = [0 if now else since for now, since in zip(due, self._since, strict=True)]
            numbers = zip(due, budgets.numbers, self.arrived.numbers, strict=True)
            self.left = Counts([budget if now else held for now, budget, held in numbers])
            some = torch.tensor([n for n, now in enumerate(due) if now])
            self.eviction = Eviction(due, slice(None) if all(due) else upload(some, device), budgets)

    def _places(self, arriving: Arriving, device: torch.device) -> tuple[Tensor, Tensor]:
        fed = [row for row, more in enumerate(arriving.new) if more]
        places = [arriving.first[row] % self.evictor.observed_queries for row in fed]
        # both by one copy
        rows, place = upload(torch.tensor([fed, places], dtype=torch.int64), device).unbind(0)
        return rows, place

    def due(self, new: Sequence[int], budgets: Counts, *, decoding: bool) -> list[bool]:
        """Which rows compress once their ``new`` tokens are in, to ``budgets``."""
        # a row that was given nothing is left as it is, whatever the others of its batch do
        numbers = zip(self.arrived.numbers, budgets.numbers, new, strict=True)
        over = [held > budget and more > 0 for held, budget, more in numbers]
        if not decoding:
            return [now and self.evictor.phase != "decode" for now in over]
        self._since = [since + more for since, more in zip(self._since, new, strict=True)]
        waited = [since >= self.evictor.interval for since in self._since]
        return [a and b and self.evictor.phase != "prefill" for a, b in zip(over, waited, strict=True)]

    def reindex(self, rows: Tensor) -> None:
        """Count for these rows [n], by an index on the CPU, each as often as it is named."""
        self._since, self.order = [self._since[row] for row in rows.tolist()], None
        self.arrived = self.left = self.left.of(rows)

    def join(self, other: Schedule) -> None:
        """Count for the rows of another schedule too, behind its own."""
        self._since, self.order = self._since + other._since, None
        self.arrived = self.left = self.left.joined(other.left)
