"""State that a layer keeps besides its cache entries, if its policy needs it, such as statistics of past queries.

The statistics are of queries before rotary embedding, and take O(D^2) or O(D) numbers per head at any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvaudit.audit.cache.rotary import Rotary
from kvaudit.audit.cache.store import SHARE, Store
from kvaudit.audit.cache.tensors import fusable, gather_columns
from kvaudit.audit.policies import Centres, Extremes, Moments


class LayerState:
    """The base class of state that a layer keeps besides entries: tensors [B, ...], empty before the first ``add``."""

    _tensors: ClassVar[tuple[str, ...]]  # the names of the attributes that hold them

    def reindex(self, rows: Tensor) -> None:
        for name in self._tensors:
            tensor = getattr(self, name)
            if len(tensor):
                setattr(self, name, tensor.index_select(0, rows))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors, which a step that is replayed as a CUDA graph reads or writes at fixed addresses."""
        return (getattr(self, name) for name in self._tensors)

    def join(self, other: LayerState) -> None:
        for name in self._tensors:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    @property
    def bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self._tensors)


class LastQueries(LayerState):
    """A ring buffer of the last ``window`` queries of every row: the query at position p has index p % window."""

    _tensors = ("_queries", "_positions")

    def __init__(self, window: int) -> None:
        self._window = window
        self._queries = torch.empty(0)  # [B, N, W, D]
        self._positions = torch.empty(0, dtype=torch.int32)  # [B, W], -1 = none

    def add(self, query: Tensor, positions: Tensor, places: tuple[Tensor, Tensor] | None, *, real: Tensor) -> None:
        """Add queries [B, N, Q, D] of N heads at positions [B, Q] (-1 = padding).

        ``real`` [B, Q], on the CPU, is False at padding. ``places`` is given only if Q = 1: the rows that have a query,
        and the index of each such query in the ring.
        """
        if not self._queries.numel():
            self._queries = query.new_zeros(*query.shape[:2], self._window, query.shape[3])
            self._positions = positions.new_full((len(positions), self._window), -1)
        if places is None:
            self._add_chunk(query, positions, no_padding=bool(real[:, -self._window :].all()))
            return
        rows, place = places  # [R] each
        every_row = len(place) == len(positions)
        self._queries[rows, :, place] = query[:, :, 0] if every_row else query[rows, :, 0]
        self._positions[rows, place] = positions[:, 0] if every_row else positions[rows, 0]

    def add_step(self, query: Tensor, positions: Tensor) -> None:
        """Add one query per row, [B, N, 1, D] of N heads, by operators of fixed shapes.

        ``positions`` [B, 1] are those of the queries, -1 for none.
        """
        _write_queries(self._queries, self._positions, query, positions)

    def _add_chunk(self, query: Tensor, positions: Tensor, *, no_padding: bool) -> None:
        if no_padding:  # only the last of these can stay
            query, positions = query[:, :, -self._window :], positions[:, -self._window :]
        old, old_positions = self.of(slice(None))
        queries = torch.cat([old, query], 2)  # [B, N, W + Q, D]
        positions = torch.cat([old_positions, positions], 1)  # [B, W + Q]
        # a stable sort moves absent queries to the front and keeps the order of the others
        order = torch.sort((positions >= 0).int(), dim=1, stable=True).indices[:, -self._window :]  # [B, W]
        self._positions = positions.gather(1, order)
        # from this order into the ring
        ring = (torch.arange(self._window, device=order.device) - self._next_positions()[:, None]) % self._window
        self._positions, order = self._positions.gather(1, ring), order.gather(1, ring)
        self._queries = gather_columns(queries, order)

    def _next_positions(self) -> Tensor:
        return self._positions.amax(1) + 1

    def of(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the last W queries [b, N, W, D] of N heads of some rows and their positions [b, W], oldest first.

        Missing queries have position -1 and come first.
        """
        queries, positions = self._queries[rows], self._positions[rows]
        # the oldest is at the place of the next query
        steps = torch.arange(self._window, device=positions.device)
        order = (self._next_positions()[rows][:, None] + steps) % self._window
        return gather_columns(queries, order), positions.gather(1, order)


@fusable
def _write_queries(ring: Tensor, ring_positions: Tensor, query: Tensor, positions: Tensor) -> None:
    """Write queries [B, N, 1, D] at positions [B, 1] (-1 = none) into a ring [B, N, W, D] and positions [B, W]."""
    rows = torch.arange(len(positions), device=positions.device)
    position, is_fed = positions[:, 0], positions[:, 0] >= 0  # [B] each
    place = (position % ring.shape[2]).long()
    ring[rows, :, place] = torch.where(is_fed[:, None, None], query[:, :, 0], ring[rows, :, place])
    ring_positions[rows, place] = torch.where(is_fed, position, ring_positions[rows, place])


class QueryMoments(LayerState):
    """The sums from which the mean and covariance of the queries at position ``sink`` and later are computed.

    They are in float32, or in float64 if the model is.
    """

    _tensors = ("_count", "_sum", "_outer")

    def __init__(self, rotary: Rotary, sink: int) -> None:
        self._rotary, self._sink = rotary, sink
        self._count = self._sum = self._outer = torch.empty(0)  # [B], [B, N, D], [B, N, D, D]

    def add(self, query: Tensor, positions: Tensor) -> None:
        """Add queries [B, N, Q, D] of N heads at positions [B, Q] (-1 = padding)."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        if not self._count.numel():
            batch, heads, _, size = query.shape
            self._count = query.new_zeros(batch, dtype=dtype)
            self._sum = query.new_zeros(batch, heads, size, dtype=dtype)
            self._outer = query.new_zeros(batch, heads, size, size, dtype=dtype)
        counted = positions >= self._sink  # [B, Q]
        # 0 where not counted, so that sums may run over all columns
        plain = self._rotary.turn(query.to(dtype), -positions) * counted[:, None, :, None]  # [B, N, Q, D]
        self._count += counted.sum(1)
        self._sum += plain.sum(2)
        self._outer += plain.transpose(2, 3) @ plain  # [B, N, D, D]

    def of(self, rows: Tensor | slice) -> Moments:
        """Return the mean and covariance of the queries of some rows."""
        count = self._count[rows].clamp(min=1)[:, None, None]  # [b, 1, 1]
        mean = self._sum[rows] / count
        covariance = self._outer[rows] / count[..., None] - mean[..., None] * mean[..., None, :]  # E[q q'] - E[q] E[q]'
        size, dtype = mean.shape[-1], mean.dtype

        def turn(start: Tensor, count: int) -> Tensor:
            return self._rotary.mean_turn(start, torch.arange(count, device=start.device), size, dtype)

        return Moments(mean, covariance, turn)


class QueryCentres(LayerState):
    """The sums from which the mean query, and the mean lengths of its rotary channel pairs, are computed.

    They are in float32, or in float64 if the model is.
    """

    _tensors = ("_count", "_sum", "_lengths")

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._count = self._sum = self._lengths = torch.empty(0)  # [B], [B, N, D], [B, N, F]

    def add(self, query: Tensor, positions: Tensor) -> None:
        """Add queries [B, N, Q, D] of N heads at positions [B, Q] (-1 = padding)."""
        counted = (positions >= 0)[:, None, :, None]  # [B, 1, Q, 1]
        wide = query.to(torch.promote_types(query.dtype, torch.float32)) * counted
        plain, lengths = self._rotary.turn(wide, -positions).sum(2), self._rotary.pair_lengths(wide).sum(2)
        if not self._count.numel():
            self._count, self._sum, self._lengths = (torch.zeros_like(t) for t in (plain[:, 0, 0], plain, lengths))
        self._count += counted[:, 0, :, 0].sum(1)
        self._sum += plain
        self._lengths += lengths

    def of(self, rows: Tensor | slice) -> Centres:
        """Return the mean of the queries of some rows, and the mean lengths of their rotary channel pairs."""
        count = self._count[rows].clamp(min=1)[:, None, None]
        mean = self._sum[rows] / count
        size, dtype = mean.shape[-1], mean.dtype
        return Centres(
            mean,
            self._lengths[rows] / count,
            lambda start, steps: self._rotary.mean_turn(start, steps, size, dtype),
            self._rotary.pair_lengths,
        )


class UnitExtremes(LayerState):
    """The minimum and maximum of each channel over the keys of every run of ``unit`` positions.

    This is only for layers without eviction, since a minimum cannot forget a key. The first run of the tensors is for
    padding.
    """

    _tensors = ("_low", "_high")

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._low = self._high = torch.empty(0)  # [B, H, 1 + U, D]

    def add(self, keys: Tensor, positions: Tensor, longest: int) -> None:
        """Add keys [B, H, Q, D] at positions [B, Q] (-1 = padding); all positions are below ``longest``."""
        if not self._low.numel():
            batch, heads, _, size = keys.shape
            self._low = keys.new_full((batch, heads, 1, size), float("inf"))
            self._high = -self._low
        needed = (longest - 1) // self._unit + 2
        if needed > self._low.shape[2]:
            self._widen(needed + needed // SHARE + 1)
        units = (positions // self._unit + 1).long()[:, None, :, None].expand_as(keys)
        self._low.scatter_reduce_(2, units, keys, "amin")
        self._high.scatter_reduce_(2, units, keys, "amax")

    def _widen(self, width: int) -> None:
        padding = (0, 0, 0, width - self._low.shape[2])
        self._low = pad(self._low, padding, value=float("inf"))
        self._high = pad(self._high, padding, value=-float("inf"))

    @property
    def extremes(self) -> Extremes:
        """The minima and maxima of all rows, in the dtype of the keys, without those kept for padding."""
        return Extremes(self._low[:, :, 1:], self._high[:, :, 1:])

    def join(self, other: LayerState) -> None:
        assert isinstance(other, UnitExtremes)
        if self._low.numel():
            width = max(self._low.shape[2], other._low.shape[2])
            self._widen(width)
            other._widen(width)
        super().join(other)


class MovingSinks(LayerState):
    """The keys of StreamingLLM's sinks (first tokens), rotated anew after every eviction.

    This has the effect of counting positions inside the cache. Recent entries and queries would all move by the same
    amount, so only the sinks have to move: towards the recent entries, by the number of entries evicted in between.
    They are always rotated from the keys as the model computed them, so that rounding does not add up. A replay cannot
    do the same, so this is for serving only.
    """

    _tensors = ("_first", "_has_first")

    def __init__(self, rotary: Rotary, sink: int) -> None:
        self._rotary, self._sink = rotary, sink
        self._first = torch.empty(0)  # [B, H, sink, D] keys as they were computed
        self._has_first = torch.empty(0, dtype=torch.bool)  # [B]

    def move(self, store: Store, rows: Tensor | slice, *, by: Tensor) -> None:
        """Rotate the sinks of some rows so that each lies ``by`` [b] positions after its original one."""
        # sinks are protected, so they stay in the first slots
        keys = self._allocate(store)
        new = torch.zeros_like(self._has_first)
        new[rows] = True
        new &= ~self._has_first
        # at a row's first eviction the sinks are still as they were computed
        self._first[new] = keys[new]
        self._has_first |= new
        first = self._first[rows]
        store.overwrite_keys(rows, self._sink, self._rotary.turn(first, by[:, None].expand(-1, first.shape[2])))

    def _allocate(self, store: Store) -> Tensor:
        """Return the keys in a store's sink slots (those of the first tokens).

        The first call also allocates memory for a copy of them as the model computed them, before any rotation.
        """
        keys = store.entries(slice(None))[0][:, :, : self._sink]
        if not self._has_first.numel():
            self._first = keys.new_zeros(*keys.shape[:2], self._sink, keys.shape[3])
            self._has_first = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
        return keys

    def join_sinks(self, other: MovingSinks, stores: tuple[Store, Store]) -> None:
        """Append the sinks of the rows of ``other``, as two batches become one.

        ``stores`` are the store of this layer and that of ``other``, before they are joined.
        """
        self._allocate(stores[0])
        other._allocate(stores[1])
        self.join(other)

    @property
    def bytes(self) -> int:
        """Allocated bytes of the sinks' keys as the model computed them."""
        return self._first.nbytes
