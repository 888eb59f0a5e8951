"""The storage of one layer: keys, values, positions and accumulated attention by slot; and the bytes of entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache import decode_kernels
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.rows import Victims
from kvaudit.audit.cache.tensors import fusable, gather_entries

SLACK, SHARE = 8, 16  # a store grows by 8 slots and a sixteenth, so that not every token copies the cache
_LATEST = 2**31 - 1  # sorts empty slots behind all others


class Entries(NamedTuple):
    """A block of rows of a store: the slice of ``rows``, and their keys and values [b, H, length, D]."""

    rows: slice
    keys: Tensor
    values: Tensor


class EntryBytes(NamedTuple):
    """The bytes of one cache entry in one head, as pairs (key, value).

    There is a pair for entries stored exactly, and a pair for codes with their parameters.
    """

    exact: tuple[float, float] = (0.0, 0.0)
    coded: tuple[float, float] = (0.0, 0.0)


class Store:
    """The slots [B, H, C] of one layer, each with room for one entry; the first ``length`` of them are in use.

    An empty slot has position -1. ``ordered``: slots are in order of position. ``uniform``: all heads hold the same
    positions. Tensors are created at the first append, when dtype and device are known. ``evicted_at`` [B, H, T + 1] is
    the ledger; its last column is a dummy, to which evictions of empty slots are written.
    """

    def __init__(self, *, accumulates: bool = False) -> None:
        self._accumulates = accumulates
        self.length = 0
        self.ordered = True
        self.uniform = True
        self._slots: dict[str, Tensor] = {}  # all [B, H, C, ...]
        self._blank: dict[str, float] = {"positions": -1}  # values of an empty slot other than 0
        self.evicted_at = torch.empty(0)
        self.entry_bytes = EntryBytes()
        self._heads = 0
        self._least_slots = 0  # slots that packing does not give back

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in one row, uncompressed."""
        return self._heads * int(sum(self.entry_bytes.exact))

    @property
    def positions(self) -> Tensor:
        """The position of each slot in use, int32 [B, H, length]."""
        return self._in_use("positions")

    @property
    def mass(self) -> Tensor | None:
        """Accumulated attention [B, H, length] float32; None unless the policy needs it."""
        return self._in_use("mass") if self._accumulates else None

    def read(self) -> Iterator[Entries]:
        """Yield all entries, in one or several blocks of rows; a block is an ``Entries``."""
        yield Entries(slice(None), *self.entries(slice(None)))

    def entries(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return keys and values [b, H, length, D] of some rows."""
        keys, values = self._in_use("keys"), self._in_use("values")
        if isinstance(rows, slice) and rows == slice(None):
            return keys, values
        return keys[rows], values[rows]

    def _in_use(self, name: str) -> Tensor:
        """Return the tensor ``name`` in the slots in use.

        If all slots are in use the tensor itself is returned, since making a view takes time.
        """
        tensor = self._slots[name]
        return tensor if tensor.shape[2] == self.length else tensor.narrow(2, 0, self.length)

    def append(
        self, key: Tensor, value: Tensor, positions: Tensor, first_position: int | None, *, max_slots: int | None
    ) -> None:
        """Append ``key`` [B, H, Q, D] and ``value`` at ``positions`` [B, 1, Q].

        ``first_position`` is the position of the first column if it is the same in all rows and none has padding. When
        the store grows, it allocates spare slots for later entries, but not more than ``max_slots`` slots in all.
        """
        if not self._slots:
            self._create(key, value)
        start, end = self.length, self.length + key.shape[2]
        self._reserve(end, max_slots)
        self._slots["positions"].narrow(2, start, end - start).copy_(positions)  # the same in every head
        if self._accumulates:
            self._slots["mass"].narrow(2, start, end - start).zero_()
        self._fill(start, key, value, first_position)
        self.length = end

    def _create(self, key: Tensor, value: Tensor) -> None:
        batch, heads = key.shape[:2]
        self._slots["positions"] = torch.full((batch, heads, 0), -1, dtype=torch.int32, device=key.device)
        # only the column of empty slots, until there are tokens
        self.evicted_at = torch.full((batch, heads, 1), NEVER, dtype=torch.int32, device=key.device)
        if self._accumulates:
            self._slots["mass"] = torch.zeros(batch, heads, 0, device=key.device)
        self._heads = heads
        exact = (float(key.shape[3] * key.element_size()), float(value.shape[3] * value.element_size()))
        self.entry_bytes = EntryBytes(exact, exact)
        self._allocate(key, value)

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        for name, tensor in (("keys", key), ("values", value)):
            self._slots[name] = tensor.new_zeros(*tensor.shape[:2], 0, tensor.shape[3])

    def _fill(self, start: int, key: Tensor, value: Tensor, first_position: int | None) -> None:  # noqa: ARG002
        self._slots["keys"].narrow(2, start, key.shape[2]).copy_(key)
        self._slots["values"].narrow(2, start, key.shape[2]).copy_(value)

    def _reserve(self, slots: int, max_slots: int | None) -> None:
        allocated = self._slots["positions"].shape[2]
        if slots > allocated:
            roomy = slots + SLACK + slots // SHARE
            # the cap applies to spare slots, not to those needed now
            self._grow((roomy if max_slots is None else max(slots, min(roomy, max_slots))) - allocated)

    def _grow(self, slots: int) -> None:
        for name, tensor in self._slots.items():
            self._slots[name] = _pad(tensor, slots, self._blank.get(name, 0))

    # --- a step of fixed shapes (``fixed_step``) ----------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """The number of allocated slots.

        Those not in use are empty, except that the first may still hold a copy of the entry that ``replace`` moved.
        """
        return self._slots["positions"].shape[2]

    @property
    def is_reserved(self) -> bool:
        """Whether places for the entries of later decode steps are allocated (``reserve_for_steps``)."""
        return self._least_slots > 0

    def ledger_holds(self, longest: int) -> bool:
        """Whether the ledger is wide enough for rows of ``longest`` tokens."""
        return longest < self.evicted_at.shape[2]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a decode step of fixed shapes (a CUDA graph) reads or writes."""
        yield from self._tensors()

    def reserve_for_steps(self, slots: int, room: int, *, max_slots: int | None) -> None:
        """Allocate ``slots`` slots (places for an entry) and up to ``room`` more, at most ``max_slots`` in all.

        Packing never frees them, so that the tensors of later decode steps keep their shapes.
        """
        roomy = slots + room
        target = roomy if max_slots is None else max(slots, min(roomy, max_slots))
        if target > self.slots:
            self._grow(target - self.slots)
        self._least_slots = max(self._least_slots, self.slots)

    def reserve_ledger(self, longest: int) -> None:
        """Widen the ledger, if it is too narrow for rows of ``longest`` tokens."""
        if not self.ledger_holds(longest):
            self.evicted_at = self._wider_ledger(2 * (longest + 1))  # twice, so that few steps copy

    def write_at(self, slot: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Write the entry of a step into slot number ``slot`` [1], the same in all rows and heads.

        The entry is ``key`` [B, H, 1, D] and ``value``, at ``positions`` int32 [B, 1].
        """
        slot_positions, mass = self._slots["positions"], self._slots.get("mass")
        if decode_kernels.is_used(key):
            self._write_by_kernel(slot, key, value, positions[:, 0])
            return
        slot_positions.index_copy_(2, slot, positions[:, None].expand(-1, slot_positions.shape[1], -1))
        if mass is not None:
            mass.index_fill_(2, slot, 0.0)
        self._write_entries_at(slot, key, value, positions)

    def _write_by_kernel(self, slot: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> None:
        slots, mass = self._slots, self._slots.get("mass")
        parts = (slots["keys"], slots["values"])
        decode_kernels.write_entry(parts, slots["positions"], (key, value), positions, slot, mass)

    def _write_entries_at(self, slot: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> None:  # noqa: ARG002
        self._slots["keys"].index_copy_(2, slot, key)
        self._slots["values"].index_copy_(2, slot, value)

    # --- eviction -----------------------------------------------------------------------------------------------------

    def keep(self, is_kept: Tensor, width: int, next_query: Tensor, longest: int) -> None:
        """Drop every slot where ``is_kept`` [B, H, length] is False, pack the others by position, and write the ledger.

        ``width`` is the largest number of kept slots in any head; ``next_query`` int32 [B, 1, 1] is the position of
        each row's next query, at most ``longest``.
        """
        positions = self.positions
        self._write_ledger(torch.where((positions >= 0) & ~is_kept, positions, -1), next_query, longest)
        self._move_to_front(is_kept, width)
        self.uniform = False

    def _move_to_front(self, is_kept: Tensor, width: int) -> None:
        positions = self.positions
        if self.ordered:
            # kept slots first, in their present order: [B, H, width]
            order = torch.sort((~is_kept).int(), dim=2, stable=True).indices[:, :, :width]
        else:
            order = torch.where(is_kept, positions, _LATEST).argsort(dim=2)[:, :, :width]
        # before packing: heads with fewer entries take dropped slots along, which must read as empty
        self._slots["positions"][:, :, : self.length] = torch.where(is_kept, positions, -1)
        self._pack(order)
        self.length, self.ordered = width, True

    def _pack(self, order: Tensor) -> None:
        width = order.shape[2]
        # memory is returned once a ninth is idle, but not what the next few tokens would ask for again
        shrink = self.slots > max(width + width // 8 + 2 * SLACK, self._least_slots)
        for name, tensor in self._slots.items():
            moved = gather_entries(tensor, order)
            if shrink:
                self._slots[name] = moved
            else:
                tensor[:, :, :width] = moved
                tensor[:, :, width:] = self._blank.get(name, 0)

    def replace(self, victims: Victims, next_query: Tensor, longest: int) -> None:
        """Evict the entry in one slot per row and head, and move the entry of the last slot in use into it.

        ``next_query`` int32 [B, 1, 1] is the position of each row's next query, at most ``longest``.
        """
        last = self.length - 1
        self.reserve_ledger(longest)
        if isinstance(victims.slots, Tensor) and isinstance(victims.positions, Tensor) and victims.slots.dim() == 1:
            _move_newest(self.evicted_at, [*self._slots.values()], victims.slots, victims.positions, next_query, last)
            self.length, self.ordered, self.uniform = last, False, False
            return
        if isinstance(victims.positions, int):  # the same in every row, so all have seen as many tokens
            self.evicted_at.select(2, victims.positions).fill_(longest)
        else:
            self.evicted_at.scatter_(2, victims.positions.long(), next_query.expand(*victims.positions.shape))
        # the index for ``scatter_``, by the number of dimensions of a tensor
        index = {} if isinstance(victims.slots, int) else {3: victims.slots[:, :, None]}
        for tensor in self._slots.values():  # the last slot itself is overwritten by the next append
            if isinstance(victims.slots, int):
                tensor.select(2, victims.slots).copy_(tensor.select(2, last))
                continue
            if tensor.dim() == 4 and 4 not in index:
                index[4] = index[3][..., None]
            slots = index[3] if tensor.dim() == 3 else index[4].expand(-1, -1, -1, tensor.shape[3])
            newest = tensor.narrow(2, last, 1)
            if newest.is_contiguous():  # with one row and one head it is a view of the memory that is written
                newest = newest.clone()
            tensor.scatter_(2, slots, newest)
        self.length, self.ordered, self.uniform = last, False, False

    def _write_ledger(self, dropped: Tensor, next_query: Tensor, longest: int) -> None:
        """Record that positions ``dropped`` [B, H, n] (-1 = none) were evicted before ``next_query`` [B, 1, 1]."""
        self.reserve_ledger(longest)
        unused = self.evicted_at.shape[2] - 1  # the column of empty slots
        index = torch.where(dropped >= 0, dropped, unused).long()
        self.evicted_at.scatter_(2, index, next_query.expand(*index.shape))

    def _wider_ledger(self, columns: int) -> Tensor:
        grow = columns - self.evicted_at.shape[2]
        wider = _pad(self.evicted_at, grow, NEVER)
        wider[:, :, -grow - 1] = NEVER  # the old column of empty slots becomes a token's, or stays if none was added
        return wider

    def overwrite_keys(self, rows: Tensor | slice, slots: int, keys: Tensor) -> None:
        """Replace the keys of the first ``slots`` slots of some rows by ``keys`` [b, H, slots, D]."""
        self._slots["keys"][rows, :, :slots] = keys

    def reindex(self, rows: Tensor) -> None:
        if not self._slots:  # a layer without entries
            return
        for name in self._slots:  # one after the other, so that each old tensor is freed before the next copy
            self._slots[name] = self._slots[name].index_select(0, rows)
        self.evicted_at = self.evicted_at.index_select(0, rows)

    def close_gaps(self) -> None:
        """Move the entries of every head into its first slots, if the store then needs fewer slots.

        Without this, the store would grow with every row that joins or leaves.
        """
        if self._slots:  # not a layer without entries
            used = self.positions >= 0
            widest = int(used.sum(-1).max())
            if widest < self.length:
                self._move_to_front(used, widest)

    def join(self, other: Store) -> None:
        if not self._slots:
            return
        length = max(self.length, other.length)
        for name in self._slots:
            blank = self._blank.get(name, 0)
            # slots from ``length`` on may still hold evicted entries
            self._slots[name] = torch.cat(
                [
                    _pad(store._slots[name][:, :, : store.length], length - store.length, blank)
                    for store in (self, other)
                ]
            )
        columns = max(self.evicted_at.shape[2], other.evicted_at.shape[2])
        self.evicted_at = torch.cat([self._wider_ledger(columns), other._wider_ledger(columns)])
        self.length, self.ordered = length, self.ordered and other.ordered
        self.uniform = self.uniform and other.uniform

    @property
    def bytes(self) -> int:
        """Allocated bytes of all slots, without the ledger."""
        return sum(t.nbytes for t in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._slots.values()


@fusable
def _move_newest(
    ledger: Tensor, slots: Sequence[Tensor], slot: Tensor, position: Tensor, next_query: Tensor, last: int
) -> None:
    """Evict the entry at ``position`` [1] from ``slot`` [1], and move the newest entry there from slot ``last``.

    This is done in every tensor of ``slots`` [B, H, C, ...]; ``ledger`` records that ``next_query`` does not see the
    evicted entry.
    """
    ledger.index_copy_(2, position, next_query.expand(*ledger.shape[:2], 1))
    for tensor in slots:
        tensor.index_copy_(2, slot, tensor.narrow(2, last, 1).clone())


def _pad(tensor: Tensor, grow: int, value: float) -> Tensor:
    """Append ``grow`` slots of ``value`` along dimension 2 of a [B, H, C, ...] tensor."""
    return torch.cat([tensor, tensor.new_full((*tensor.shape[:2], grow, *tensor.shape[3:]), value)], 2)


def peak_live_bytes(
    evicted_at: Tensor, entries: Sequence[EntryBytes], coded_at: tuple[Tensor, Tensor] | None, sampled: Tensor
) -> float:
    """Return the peak bytes of one row's entries while decoding.

    ``evicted_at`` [L, H, T] says when entries were evicted, and ``coded_at`` ([T] for keys, [T] for values) when they
    were quantised; ``entries`` has the sizes of one entry in each layer. ``sampled`` [T] marks the decoded tokens; for
    a row without any, the bytes at its end are returned. Only entries are counted. Allocated bytes also include spare
    slots, positions, accumulated attention, and entries that a prefill evicts at once, so compare live bytes with live
    bytes only.
    """
    tokens = evicted_at.shape[2]
    arrived = torch.arange(tokens)  # [T], an entry is there from its own token on
    change = torch.zeros(tokens + 1, dtype=torch.float64)  # bytes that come or go at each token; the last is never
    for layer, sizes in zip(evicted_at, entries, strict=True):
        evicted = layer.long().clamp(max=tokens)  # [H, T]
        change[:tokens] += len(layer) * sum(sizes.exact)
        if coded_at is None:
            change -= _sum_by_time(evicted, torch.full(evicted.shape, sum(sizes.exact), dtype=torch.float64), tokens)
            continue
        for exact, coded, times in zip(sizes.exact, sizes.coded, coded_at, strict=True):
            became = torch.maximum(times.long(), arrived).clamp(max=tokens).expand_as(evicted)  # [H, T]
            is_coded = became < evicted  # an entry that is evicted first is never stored as codes
            change += _sum_by_time(became, is_coded * float(coded - exact), tokens)
            change -= _sum_by_time(evicted, torch.where(is_coded, float(coded), float(exact)).double(), tokens)
    live = change[:tokens].cumsum(0)  # bytes after each token
    return float(live[sampled].max() if bool(sampled.any()) else live[-1])


def _sum_by_time(times: Tensor, amounts: Tensor, tokens: int) -> Tensor:
    """Return the sum of the ``amounts`` whose time is t, for each t from 0 to ``tokens``: float64 [tokens + 1]."""
    return torch.bincount(times.flatten(), weights=amounts.double().flatten(), minlength=tokens + 1)
