"""The slots of one layer: keys, values, positions and accumulated attention, with real allocation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.tensors import gather_entries
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.store import EntryBytes
from kvaudit.audit.cache.rows import Victims

SLACK, SHARE = 8, 16  # a store grows by 8 slots and a sixteenth, so that not every token copies the cache
LATE = 2**31 - 1  # sorts empty slots behind all others


class Entries(NamedTuple):
    """Keys and values [b, H, length, D] of some rows, as attention sees them."""

    rows: slice
    keys: Tensor
    values: Tensor


class Store:
    """Slots [B, H, C] of one layer; the first ``length`` are in use, a position of -1 marks an empty one.

    Slots are in order of position while ``ordered``. Tensors are created at the first append, when dtype and device
    are known. ``evicted_at`` [B, H, T + 1] is the ledger; its last column takes the writes of empty slots.
    """

    def __init__(self, *, accumulates: bool = False) -> None:
        self._accumulates = accumulates
        self.length = 0
        self.ordered = True
        self.uniform = True  # all heads hold the same positions
        self._slots: dict[str, Tensor] = {}  # by name, all [B, H, C, ...]
        self._blank: dict[str, float] = {"positions": -1}  # what an empty slot holds, 0 unless said here
        self.evicted_at = torch.empty(0)
        self.entry_bytes = EntryBytes()
        self._heads = 0

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of one row's keys and values of one token, uncompressed."""
        return self._heads * int(sum(self.entry_bytes.exact))

    @property
    def positions(self) -> Tensor:
        """[B, H, length] int32."""
        return self._front("positions")

    @property
    def keys(self) -> Tensor:
        """[B, H, length, D]."""
        return self.entries(slice(None))[0]

    @property
    def values(self) -> Tensor:
        """[B, H, length, D]."""
        return self.entries(slice(None))[1]

    @property
    def mass(self) -> Tensor | None:
        """Accumulated attention [B, H, length] float32, where the policy asks."""
        return self._front("mass") if self._accumulates else None

    def read(self) -> Iterator[Entries]:
        """Everything the cache holds, in one or several parts by rows."""
        yield Entries(slice(None), *self.entries(slice(None)))

    def entries(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values [b, H, length, D] of some rows."""
        keys, values = self._front("keys"), self._front("values")
        if isinstance(rows, slice) and rows == slice(None):
            return keys, values
        return keys[rows], values[rows]

    def _front(self, name: str) -> Tensor:
        """The slots in use: a view costs an operator, so none is made of what is used whole."""
        tensor = self._slots[name]
        return tensor if tensor.shape[2] == self.length else tensor.narrow(2, 0, self.length)

    def append(self, key: Tensor, value: Tensor, positions: Tensor, even: int | None, *, limit: int | None) -> None:
        """Add slots for ``key`` [B, H, Q, D] at ``positions`` [B, 1, Q]; ``limit`` caps the slack.

        ``even`` is the position of the first column where all rows stand there without padding.
        """
        if not self._slots:
            self._create(key, value)
        start, end = self.length, self.length + key.shape[2]
        self._reserve(end, limit)
        self._slots["positions"].narrow(2, start, end - start).copy_(positions)  # alike in every head
        if self._accumulates:
            self._slots["mass"].narrow(2, start, end - start).zero_()
        self._fill(start, key, value, even)
        self.length = end

    def _create(self, key: Tensor, value: Tensor) -> None:
        batch, heads = key.shape[:2]
        self._slots["positions"] = torch.full((batch, heads, 0), -1, dtype=torch.int32, device=key.device)
        # the column of empty slots alone, until tokens are there
        self.evicted_at = torch.full((batch, heads, 1), NEVER, dtype=torch.int32, device=key.device)
        if self._accumulates:
            self._slots["mass"] = torch.zeros(batch, heads, 0, device=key.device)
        self._heads = heads
        # bytes of one entry of one head
        exact = (float(key.shape[3] * key.element_size()), float(value.shape[3] * value.element_size()))
        self.entry_bytes = EntryBytes(exact, exact)
        self._allocate(key, value)

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        for name, tensor in (("keys", key), ("values", value)):
            self._slots[name] = tensor.new_zeros(*tensor.shape[:2], 0, tensor.shape[3])

    def _fill(self, start: int, key: Tensor, value: Tensor, even: int | None) -> None:  # noqa: ARG002
        self._slots["keys"].narrow(2, start, key.shape[2]).copy_(key)
        self._slots["values"].narrow(2, start, key.shape[2]).copy_(value)

    def _reserve(self, slots: int, limit: int | None) -> None:
        held = self._slots["positions"].shape[2]
        if slots > held:
            roomy = slots + SLACK + slots // SHARE
            # the limit caps what is spare, never what is needed now
            grow = (roomy if limit is None else max(slots, min(roomy, limit))) - held
            for name, tensor in self._slots.items():
                self._slots[name] = _pad(tensor, grow, self._blank.get(name, 0))

    def keep(self, kept: Tensor, counts: int, gone: Tensor, longest: int) -> None:
        """Drop every slot where ``kept`` [B, H, length] is False, pack to the front by position, write the ledger.

        ``counts`` is the largest number of kept slots in any row; ``gone`` int32 [B, 1, 1] the index of the next query,
        at most ``longest``.
        """
        positions = self.positions
        self._write_ledger(torch.where((positions >= 0) & ~kept, positions, -1), gone, longest)
        self._move_to_front(kept, counts)
        self.uniform = False

    def _move_to_front(self, kept: Tensor, counts: int) -> None:
        positions = self.positions
        if self.ordered:
            # kept slots first, in the order in which they stand: [B, H, counts]
            order = torch.sort((~kept).int(), dim=2, stable=True).indices[:, :, :counts]
        else:
            order = torch.where(kept, positions, LATE).argsort(dim=2)[:, :, :counts]
        # before packing: heads with fewer entries carry dropped slots along, which have to read as empty
        self._slots["positions"][:, :, : self.length] = torch.where(kept, positions, -1)
        self._pack(order)
        self.length, self.ordered = counts, True

    def _pack(self, order: Tensor) -> None:
        counts = order.shape[2]
        # memory goes back once a ninth idles, but not what the next few tokens would ask for again
        shrink = self._slots["positions"].shape[2] > counts + counts // 8 + 2 * SLACK
        for name, tensor in self._slots.items():
            moved = gather_entries(tensor, order)
            if shrink:
                self._slots[name] = moved
            else:
                tensor[:, :, :counts] = moved
                tensor[:, :, counts:] = self._blank.get(name, 0)

    def replace(self, victims: Victims, gone: Tensor, longest: int) -> None:
        """Drop one slot per row and head, and move the last slot into its place; see ``keep``."""
        last = self.length - 1
        if isinstance(victims.positions, int):  # in every row, which have then all seen as many
            self._widen_ledger(longest)
            self.evicted_at.select(2, victims.positions).fill_(longest)
        else:
            self._widen_ledger(longest)
            self.evicted_at.scatter_(2, victims.positions.long(), gone.expand(*victims.positions.shape))
        # the index that ``scatter_`` takes, by how many dimensions a tensor has
        places = {} if isinstance(victims.slots, int) else {3: victims.slots[:, :, None]}
        for tensor in self._slots.values():  # the last slot stays as it is: what is appended next overwrites it
            if isinstance(victims.slots, int):
                tensor.select(2, victims.slots).copy_(tensor.select(2, last))
                continue
            if tensor.dim() == 4 and 4 not in places:
                places[4] = places[3][..., None]
            at = places[3] if tensor.dim() == 3 else places[4].expand(-1, -1, -1, tensor.shape[3])
            newest = tensor.narrow(2, last, 1)
            if newest.is_contiguous():  # with one row and one head it is a view into the memory that is written
                newest = newest.clone()
            tensor.scatter_(2, at, newest)
        self.length, self.ordered, self.uniform = last, False, False

    def _write_ledger(self, dropped: Tensor, gone: Tensor, longest: int) -> None:
        """Enter positions ``dropped`` [B, H, n] (-1 = none) as gone from query ``gone`` [B, 1, 1] on."""
        self._widen_ledger(longest)
        trash = self.evicted_at.shape[2] - 1  # the column of empty slots
        index = torch.where(dropped >= 0, dropped, trash).long()
        self.evicted_at.scatter_(2, index, gone.expand(*index.shape))

    def _widen_ledger(self, longest: int) -> None:
        needed = longest + 1
        if needed > self.evicted_at.shape[2]:
            self.evicted_at = self._ledger_of(2 * needed)  # twice, so that few steps copy

    def _ledger_of(self, columns: int) -> Tensor:
        """The ledger with so many columns, at least as many as it has."""
        grow = columns - self.evicted_at.shape[2]
        wider = _pad(self.evicted_at, grow, NEVER)
        wider[:, :, -grow - 1] = NEVER  # until now the column of empty slots, from here a token's or still that one's
        return wider

    def overwrite_keys(self, rows: Tensor | slice, slots: int, keys: Tensor) -> None:
        """Replace the keys of the first ``slots`` slots of some rows by ``keys`` [b, H, slots, D]."""
        self._slots["keys"][rows, :, :slots] = keys

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        if not self._slots:  # a layer that holds none
            return
        for name in self._slots:  # one after the other, so that the old ones go before the next is copied
            self._slots[name] = self._slots[name].index_select(0, rows)
        self.evicted_at = self.evicted_at.index_select(0, rows)

    def close_gaps(self) -> None:
        """Pack to the front, where every row has room in fewer slots: rows that come and go would else widen it."""
        if self._slots:  # a layer may hold none
            used = self.positions >= 0
            widest = int(used.sum(-1).max())
            if widest < self.length:
                self._move_to_front(used, widest)

    def join(self, other: Store) -> None:
        """Hold the rows of another store too, behind its own."""
        if not self._slots:
            return
        length = max(self.length, other.length)
        for name, blank in ((name, self._blank.get(name, 0)) for name in self._slots):
            # what is behind a store's length may be left over from an entry that has left
            both = [
                _pad(store._slots[name][:, :, : store.length], length - store.length, blank) for store in (self, other)
            ]
            self._slots[name] = torch.cat(both)
        columns = max(self.evicted_at.shape[2], other.evicted_at.shape[2])
        self.evicted_at = torch.cat([self._ledger_of(columns), other._ledger_of(columns)])
        self.length, self.ordered = length, self.ordered and other.ordered
        self.uniform = self.uniform and other.uniform

    @property
    def bytes(self) -> int:
        """Allocated bytes of all slots, the ledger left out."""
        return sum(t.nbytes for t in self._held())

    def _held(self) -> Iterator[Tensor]:
        yield from self._slots.values()


def _pad(tensor: Tensor, grow: int, value: float) -> Tensor:
    """Add ``grow`` slots of ``value`` along dimension 2 of a [B, H, C, ...] tensor."""
    more = tensor.new_full((*tensor.shape[:2], grow, *tensor.shape[3:]), value)
    return torch.cat([tensor, more], 2)
