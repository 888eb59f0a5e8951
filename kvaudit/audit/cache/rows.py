"""The state of each row that a cache keeps on the host.

It says when to compress the row, seeds its random draws (row keys), and holds its pinned (never evicted) positions and
which of its entries are codes. It is kept as Python numbers: a decode step needs only a few, and a tensor operator for
each would take longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Evictor, Quantiser
from kvaudit.core.errors import SpecError


class Counts:
    """One integer per row, with the smallest and largest, kept on the host so that reading waits for no device."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self.smallest, self.largest = min(self.numbers), max(self.numbers)
        self._on_device: Tensor | None = None

    def to(self, device: torch.device) -> Tensor:
        """Return the numbers as int64 [B] on a device, copied once."""
        if self._on_device is None or self._on_device.device != device:
            self._on_device = upload(torch.tensor(self.numbers), device)
        return self._on_device

    def all_equal(self, number: int) -> bool:
        return self.smallest == self.largest == number

    def select(self, rows: Tensor) -> Counts:
        return Counts([self.numbers[row] for row in rows.tolist()])

    def concat(self, other: Counts) -> Counts:
        return Counts(self.numbers + other.numbers)


# --- when rows compress -----------------------------------------------------------------------------------------------


class NewTokens(NamedTuple):
    """How many tokens each row adds in a forward of ``width`` columns.

    ``counts`` has the number for each row, ``first`` the position of the row's first new token, -1 if there is none.
    """

    width: int
    counts: tuple[int, ...]
    first: tuple[int, ...]

    @property
    def is_aligned(self) -> bool:
        """Whether the forward has no padding and all rows begin at the same position."""
        return min(self.counts) == self.width and len(set(self.first)) == 1


def read_new_tokens(positions: Tensor) -> NewTokens:
    """Return the number of new tokens of each row, from their positions on the CPU [B, Q] (-1: padding)."""
    width = positions.shape[1]
    if width == 1:
        first = tuple(row[0] for row in positions.tolist())
        return NewTokens(1, tuple(int(position >= 0) for position in first), first)
    real = positions >= 0
    # positions rise, so the first is the smallest
    smallest = torch.where(real, positions, NEVER).amin(1) if width else torch.full((len(positions),), NEVER)
    first = tuple(-1 if position == NEVER else position for position in smallest.tolist())
    return NewTokens(width, tuple(real.sum(1).tolist()), first)


class Eviction(NamedTuple):
    """One step of eviction: ``rows`` are the rows that lose entries in it, ``budgets`` the budgets of all rows.

    A budget is how many entries per head the step keeps. ``rows`` is a slice for all rows, otherwise a tensor of row
    numbers on the device.
    """

    rows: Tensor | slice
    budgets: Counts


class Victims(NamedTuple):
    """The slot and position of the one entry per head that is evicted.

    If it is the same in all rows and heads, it is one number, or a tensor [1] into which a step that is replayed as a
    CUDA graph writes the number.
    """

    slots: Tensor | int  # [B, H]
    positions: Tensor | int  # [B, H, 1]

    def simplify(self) -> Victims:
        """Return the victims with one number as ``slots`` if the slot is the same in all rows and heads.

        Only on a CPU; elsewhere the victims are returned unchanged, since comparing would wait for the device.
        """
        slots = torch.as_tensor(self.slots)
        if slots.device.type != "cpu":
            return self
        first = slots[0, 0]
        return self._replace(slots=int(first)) if bool((slots == first).all()) else self


class Schedule:
    """The schedule of evictions: which rows evict now, and how many entries they keep.

    Layers with the same eviction policy share one schedule. A row's schedule depends on its own tokens alone.
    ``arrived`` and ``remaining`` count entries, averaged over heads, before and after the evictions of the current
    forward.
    """

    def __init__(self, evictor: Evictor, rows: int) -> None:
        self.evictor = evictor
        self._since_eviction = [0] * rows  # tokens decoded since the last eviction
        self.arrived = self.remaining = Counts(self._since_eviction)
        # positions by slot before the forward, if all rows, heads and layers hold the same; None: not known
        self.slot_positions: list[int] | None = None
        self.max_slots: int | None = None  # slots that are ever needed, if the budget bounds them
        self.eviction: Eviction | None = None
        self.victims: Victims | None = None  # of an earlier layer, if they are the same in all layers
        self._ring_places: list[tuple[int, int]] = []  # rows with a new token, and its index in ``LastQueries``
        self._ring_places_on_device: tuple[Tensor, Tensor] | None = None

    def begin(self, tokens: NewTokens, seen: Tensor, device: torch.device, *, decoding: bool) -> None:
        """Count the new tokens of a forward, and set ``eviction`` if rows must evict after it.

        ``seen`` [B] are all tokens of each row, the new ones included.
        """
        evictor, counts = self.evictor, tokens.counts
        before = self.remaining.numbers
        self.arrived = self.remaining = Counts([count + new for count, new in zip(before, counts, strict=True)])
        self.max_slots = self.eviction = self.victims = self._ring_places_on_device = None
        self._ring_places = []
        if tokens.width > 1 or not tokens.is_aligned:
            self.slot_positions = None
        if tokens.width == 1 and evictor.observed_queries:
            window = evictor.observed_queries
            self._ring_places = [(row, tokens.first[row] % window) for row, count in enumerate(counts) if count]
        if not evictor.evicts:
            return
        budgets = Counts(evictor.budget_at(seen).tolist())
        # heads that share a budget may each exceed it; phase prefill never evicts while decoding
        if not evictor.shares_heads and not (decoding and evictor.phase == "prefill"):
            self.max_slots = budgets.largest + max(tokens.width, evictor.interval)
        due = self.are_due(counts, budgets, decoding=decoding)
        if any(due):
            self._since_eviction = [0 if is_due else n for is_due, n in zip(due, self._since_eviction, strict=True)]
            numbers = zip(due, budgets.numbers, self.arrived.numbers, strict=True)
            self.remaining = Counts([budget if is_due else count for is_due, budget, count in numbers])
            due_rows = torch.tensor([row for row, is_due in enumerate(due) if is_due])
            self.eviction = Eviction(slice(None) if all(due) else upload(due_rows, device), budgets)

    def ring_places(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the rows that have a new token, and the index of each one's query in the ring buffer ``LastQueries``.

        None unless the forward has at most one token per row and the policy stores past queries.
        """
        if self._ring_places and self._ring_places_on_device is None:
            # both in one copy
            rows, places = upload(torch.tensor(self._ring_places, dtype=torch.int64), device).unbind(1)
            self._ring_places_on_device = rows, places
        return self._ring_places_on_device

    def are_due(self, new: Sequence[int], budgets: Counts, *, decoding: bool) -> list[bool]:
        """Return which rows evict now: those that got new tokens, exceed their budget and may evict at this time.

        ``new`` are the numbers of new tokens of each row, ``budgets`` the entries per head that an eviction keeps in
        it.
        """
        # a row without new tokens never evicts, so that it does not depend on other rows of the batch
        numbers = zip(self.arrived.numbers, budgets.numbers, new, strict=True)
        over = [count > budget and more > 0 for count, budget, more in numbers]
        if not decoding:
            return [row and self.evictor.phase != "decode" for row in over]
        self._since_eviction = [n + more for n, more in zip(self._since_eviction, new, strict=True)]
        waited = [n >= self.evictor.interval for n in self._since_eviction]
        return [a and b and self.evictor.phase != "prefill" for a, b in zip(over, waited, strict=True)]

    def reindex(self, rows: Tensor) -> None:
        self._since_eviction, self.slot_positions = [self._since_eviction[row] for row in rows.tolist()], None
        self.arrived = self.remaining = self.remaining.select(rows)

    def join(self, other: Schedule) -> None:
        self._since_eviction, self.slot_positions = self._since_eviction + other._since_eviction, None
        self.arrived = self.remaining = self.remaining.concat(other.remaining)


# --- row keys and pins ------------------------------------------------------------------------------------------------


class RowKeys:
    """The random key of each row, which seeds the policy's random draws in that row: int64 [B].

    Rows of a group, sampled from one prompt, share the key for the prompt's tokens.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        self._prompts: tuple[Tensor, Tensor] | None = None  # key and length [B] of the prompt that a group shares

    def tensors(self) -> Iterator[Tensor]:
        """Yield keys and prompt keys, which a step that is replayed as a CUDA graph reads at fixed addresses."""
        yield self._keys
        yield from self._prompts or ()

    def entries(self, positions: Tensor, rows: Tensor | slice) -> Tensor:
        """Return the random key of each entry, which seeds its draws; broadcastable to [b, H, K]."""
        keys = self._keys[rows][:, None, None]  # [b, 1, 1]
        if self._prompts is None:
            return keys
        prompt_keys, lengths = (tensor[rows][:, None, None] for tensor in self._prompts)
        return torch.where(positions < lengths, prompt_keys, keys)

    def reindex(self, rows: Tensor) -> None:
        self._keys = self._keys[rows]
        if self._prompts is not None:
            keys, lengths = self._prompts
            self._prompts = (keys[rows], lengths[rows])

    def join(self, other: RowKeys) -> None:
        if self._prompts is not None or other._prompts is not None:
            pairs = zip(self._prompts_or_none(), other._prompts_or_none(), strict=True)
            keys, lengths = (torch.cat(pair) for pair in pairs)
            self._prompts = (keys, lengths)
        self._keys = torch.cat([self._keys, other._keys])

    def _prompts_or_none(self) -> tuple[Tensor, Tensor]:
        """Return the key [B] and the length [B] of each row's shared prompt, with length 0 for a row without one."""
        return (self._keys, torch.zeros_like(self._keys)) if self._prompts is None else self._prompts

    def set_member_keys(self, keys: Tensor, seen: Tensor) -> None:
        """Give each member of a group its own key, ``keys`` [B], for its later tokens.

        The first ``seen`` [B] tokens of a row, the prompt, keep the key that they had.
        """
        self._prompts, self._keys = (self._keys, seen.to(self._keys.device)), keys


class Pins:
    """The pinned positions of each row, which are never evicted: bool [B, T] on the CPU, growing with the tokens."""

    def __init__(self, policies: Sequence[Evictor], rows: int) -> None:
        self._policy = min(policies, key=lambda policy: policy.budget)  # of the layer with the smallest budget
        self._pinned = torch.zeros(rows, 0, dtype=torch.bool)
        self._on_device: Tensor | None = None

    def add(self, positions: Tensor, pinned: Tensor) -> None:
        """Add the new tokens that ``pinned`` [B, Q] marks, at CPU ``positions`` [B, Q] (-1 = padding).

        Raises SpecError if the pinned tokens of a row, with sink and window, exceed the policy's budget.
        """
        rows, columns = ((positions >= 0) & pinned).nonzero().unbind(1)  # [n] each
        if not len(rows):
            return
        new = positions[rows, columns]
        grow = max(int(new.max()) + 1 - self._pinned.shape[1], 0)
        self._pinned, self._on_device = torch.nn.functional.pad(self._pinned, (0, grow)), None
        self._pinned[rows, new] = True
        policy = self._policy
        count = int(self._pinned[:, policy.sink :].sum(1).max())  # pins among the sinks take no extra room
        if count + policy.sink + policy.window > policy.budget:
            raise SpecError(
                f"policy {policy.name}: pin={policy.pin} holds {count} tokens, which do not fit "
                f"budget={policy.budget} with sink={policy.sink}, window={policy.window}; raise the budget or pin less"
            )

    def at(self, positions: Tensor, rows: Tensor | slice) -> Tensor:
        """Return which slots of some rows hold a pinned entry, bool [b, H, K].

        ``positions`` [b, H, K] are those of the slots, -1 = empty.
        """
        if not self._pinned.shape[1]:
            return torch.zeros_like(positions, dtype=torch.bool)
        if self._on_device is None:
            self._on_device = upload(self._pinned, positions.device)
        table = self._on_device[rows]  # [b, T]
        # any index will do for empty slots and for later tokens, which are not pinned
        index = positions.clamp(min=0, max=table.shape[1] - 1).long()
        pinned = table[:, None].expand(-1, positions.shape[1], -1).gather(2, index)
        return pinned & (positions >= 0) & (positions < table.shape[1])

    def runs(self) -> list[tuple[tuple[int, int], ...]]:
        """Return every row's pinned positions as runs [start, end)."""
        edges = torch.nn.functional.pad(self._pinned.int(), (1, 1)).diff(dim=1)  # 1 at a start, -1 at an end
        return [
            tuple(zip((row > 0).nonzero()[:, 0].tolist(), (row < 0).nonzero()[:, 0].tolist(), strict=True))
            for row in edges
        ]

    def reindex(self, rows: Tensor) -> None:
        self._pinned, self._on_device = self._pinned[rows], None

    def join(self, other: Pins) -> None:
        width = max(self._pinned.shape[1], other._pinned.shape[1])
        tables = (torch.nn.functional.pad(pins, (0, width - pins.shape[1])) for pins in (self._pinned, other._pinned))
        self._pinned, self._on_device = torch.cat(list(tables)), None


# --- when entries are quantised ---------------------------------------------------------------------------------------


class QuantisationClock:
    """The time at which each key and value was quantised, the same in every layer and head.

    It is given as the position of the first query that reads the entry as a code.
    """

    def __init__(self, codec: Quantiser, rows: int) -> None:
        self._codec = codec
        self._keys: list[list[int]] = [[] for _ in range(rows)]  # one query index per quantised position
        self._values: list[list[int]] = [[] for _ in range(rows)]

    def advance(self, seen: Sequence[int], new: Sequence[int]) -> None:
        """Count ``new`` tokens per row, and record which entries are quantised because of them.

        ``seen`` are the tokens of each row, the new ones included.
        """
        for row, (count, more) in enumerate(zip(seen, new, strict=True)):
            if more:
                for until, times in ((self._codec.keys_until, self._keys), (self._codec.values_until, self._values)):
                    before = len(times[row])  # entries that are codes already
                    times[row] += self._codec.first_queries(before, until(before, count), count)

    def counts(self) -> tuple[Counts, Counts]:
        """Return how many keys and how many values of each row are quantised."""
        keys, values = (Counts([len(t) for t in times]) for times in (self._keys, self._values))
        return keys, values

    def tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the position of the first query that reads each key, and each value, as a code.

        Both are int32 [B, tokens], named ``keys_quantised_at`` and ``values_quantised_at`` in the ledger.
        """
        keys, values = (
            torch.tensor([(t + [NEVER] * tokens)[:tokens] for t in times], dtype=torch.int32)
            for times in (self._keys, self._values)
        )
        return keys, values

    def reindex(self, rows: Tensor) -> None:
        self._keys, self._values = ([list(times[row]) for row in rows.tolist()] for times in (self._keys, self._values))

    def join(self, other: QuantisationClock) -> None:
        self._keys += other._keys
        self._values += other._values


class Span(NamedTuple):
    """A set of slots: all from ``first`` up to, but not including, ``end``, or some of these.

    ``places`` are the offsets from ``first`` of the slots in the set; None if it has all.
    """

    first: int
    end: int
    places: Tensor | None


def span_of(columns: Tensor) -> Span:
    """Return the smallest span that contains ``columns``, slot numbers in rising order."""
    first, end = int(columns[0]), int(columns[-1]) + 1
    return Span(first, end, None if len(columns) == end - first else columns - first)


class TailLayout:
    """The positions [B, tail] of exact (not yet quantised) entries in layers that quantise without evicting.

    They are equal in all such layers, and kept on the host, so that no layer reads the device. ``add`` is called once
    per forward, before the first layer. After ``join``, which adds another batch, the positions are unknown until the
    first layer sets them.
    """

    def __init__(self, rows: int) -> None:
        self._positions: Tensor | None = torch.zeros(rows, 0, dtype=torch.int64)
        self._freed: int | None = None  # first slots that the last forward has freed, once known
        self._spans: dict[tuple[Counts, Counts], Span | None] = {}

    def add(self, positions: Tensor) -> None:
        """Append the positions [B, Q], on the CPU, of the entries that the next forward adds."""
        self._spans.clear()
        if self._positions is not None:
            tail = self._positions[:, self._freed :] if self._freed else self._positions
            self._positions = torch.cat([tail, positions], 1)
        self._freed = None

    def set_if_unknown(self, tail: Tensor) -> None:
        """Set the positions of the exact entries from those of a layer, ``tail`` [B, tail], unless they are known."""
        if self._positions is None:
            self._positions = tail.cpu().long()

    def span_between(self, done: Counts, until: Counts) -> Span | None:
        """Return the slots of exact (not yet quantised) entries at positions from ``done`` to below ``until``.

        None if there are none.
        """
        if (done, until) not in self._spans:
            assert self._positions is not None
            first, end = (torch.tensor(counts.numbers)[:, None] for counts in (done, until))
            columns = ((self._positions >= first) & (self._positions < end)).any(0).nonzero()[:, 0]
            self._spans[done, until] = span_of(columns) if len(columns) else None
        return self._spans[done, until]

    def set_freed(self, slots: int) -> None:
        self._freed = slots

    def freed(self, keys_done: Counts, values_done: Counts) -> int:
        """Return how many slots at the start of the tail (the last slots, with unquantised entries) can be freed.

        A slot can be freed once its key and its value are quantised in every row. In each row the first ``keys_done``
        keys and the first ``values_done`` values are quantised.
        """
        if self._freed is None:
            assert self._positions is not None
            smallest = torch.tensor([min(pair) for pair in zip(keys_done.numbers, values_done.numbers, strict=True)])
            is_exact = (self._positions >= smallest[:, None]).any(0)
            self._freed = int(is_exact.int().argmax()) if bool(is_exact.any()) else len(is_exact)
        return self._freed

    def reindex(self, rows: Tensor) -> None:
        if self._positions is not None:
            self._positions = self._positions[rows]

    def join(self, other: TailLayout) -> None:  # noqa: ARG002
        # the rows of another batch may move into other slots
        self.forget()

    def forget(self) -> None:
        """Forget the positions; the next layer that quantises sets them from its own tensor (``set_if_unknown``)."""
        self._positions, self._freed = None, None
