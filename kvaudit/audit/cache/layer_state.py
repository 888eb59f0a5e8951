"""What a layer keeps beside its entries where its policy asks: queries, statistics of them, and sinks that move.

Statistics are of queries before rotation: O(D^2) numbers per head, or O(D), whatever the length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvaudit.audit.cache.tensors import gather_columns
from kvaudit.audit.cache.rotary import Rotary
from kvaudit.audit.cache.store import SHARE, Store
from kvaudit.audit.policies import Centres, Extremes, Moments


class LastQueries:
    """The last ``window`` queries of every row, in a ring: that at position p stands in place p % window."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._queries = torch.empty(0)  # [B, N, W, D]
        self._positions = torch.empty(0, dtype=torch.int32)  # [B, W], -1 = none

    def add(self, query: Tensor, positions: Tensor, places: tuple[Tensor, Tensor] | None, *, real: Tensor) -> None:
        """Take queries [B, N, Q, D] at positions [B, Q] (-1 = padding); ``real`` says on the CPU which are none.

        Of one column, ``places`` has the rows where it is no padding and their places in the ring.
        """
        if not self._queries.numel():
            self._queries = query.new_zeros(*query.shape[:2], self._window, query.shape[3])
            self._positions = positions.new_full((len(positions), self._window), -1)
        if places is None:
            self._take_chunk(query, positions, all_fed=bool(real[:, -self._window :].all()))
            return
        # [R] rows and places: one query of each row that is not padding
        rows, place = places
        all_fed = len(place) == len(positions)
        self._queries[rows, :, place] = query[:, :, 0] if all_fed else query[rows, :, 0]
        self._positions[rows, place] = positions[:, 0] if all_fed else positions[rows, 0]

    def _take_chunk(self, query: Tensor, positions: Tensor, *, all_fed: bool) -> None:
        if all_fed:  # none before the last of these can stay
            query, positions = query[:, :, -self._window :], positions[:, -self._window :]
        before, known = self.of(slice(None))
        queries, at = torch.cat([before, query], 2), torch.cat([known, positions], 1)  # [B, N, W + Q, D], [B, W + Q]
        # a stable sort moves absent queries to the front and keeps the others in order
        order = torch.sort((at >= 0).int(), dim=1, stable=True).indices[:, -self._window :]  # [B, W]
        self._positions = at.gather(1, order)
        # from this order into the ring
        back = (torch.arange(self._window, device=at.device) - self._next()[:, None]) % self._window
        self._positions, order = self._positions.gather(1, back), order.gather(1, back)
        self._queries = gather_columns(queries, order)

    def _next(self) -> Tensor:
        """The position [B] of each row's next query."""
        return self._positions.amax(1) + 1

    def of(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The queries [b, N, W, D] and positions [b, W] of some rows in order, absent ones first."""
        queries, positions = self._queries[rows], self._positions[rows]
        # [b, W], oldest first: it stands where the next query will
        order = (self._next()[rows][:, None] + torch.arange(self._window, device=positions.device)) % self._window
        return gather_columns(queries, order), positions.gather(1, order)

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        self._queries, self._positions = self._queries[rows], self._positions[rows]

    def join(self, other: LastQueries) -> None:
        """Hold the rows of another one too, behind its own."""
        self._queries = torch.cat([self._queries, other._queries])
        self._positions = torch.cat([self._positions, other._positions])

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return self._queries.nbytes + self._positions.nbytes


class QueryMoments:
    """Sums over the queries of one layer; those at positions below ``sink`` are left out (they attend to themselves).

    Sums are float32, or float64 for a float64 model.
    """

    def __init__(self, rotary: Rotary, sink: int) -> None:
        self._rotary, self._sink = rotary, sink
        self._count = self._sum = self._outer = torch.empty(0)  # [B], [B, N, D], [B, N, D, D]

    def add(self, query: Tensor, positions: Tensor) -> None:
        """Take queries [B, N, Q, D] at positions [B, Q] (-1 = padding)."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        if not self._count.numel():
            batch, heads, _, size = query.shape
            self._count = query.new_zeros(batch, dtype=dtype)
            self._sum = query.new_zeros(batch, heads, size, dtype=dtype)
            self._outer = query.new_zeros(batch, heads, size, size, dtype=dtype)
        counted = positions >= self._sink  # [B, Q]
        # zeros for what is not counted, so that sums may run over all columns
        plain = self._rotary.turn(query.to(dtype), -positions) * counted[:, None, :, None]  # [B, N, Q, D]
        self._count += counted.sum(1)
        self._sum += plain.sum(2)
        self._outer += plain.transpose(2, 3) @ plain  # [B, N, D, D]

    def of(self, rows: Tensor | slice) -> Moments:
        """The moments of some rows."""
        count = self._count[rows].clamp(min=1)[:, None, None]  # [b, 1, 1]
        mean = self._sum[rows] / count
        covariance = self._outer[rows] / count[..., None] - mean[..., None] * mean[..., None, :]  # E[q q'] - E[q] E[q]'
        size, dtype = mean.shape[-1], mean.dtype

        def turn(start: Tensor, count: int) -> Tensor:
            return self._rotary.mean_turn(start, torch.arange(count, device=start.device), size, dtype)

        return Moments(mean, covariance, turn)

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        self._count, self._sum, self._outer = (t[rows] for t in (self._count, self._sum, self._outer))

    def join(self, other: QueryMoments) -> None:
        """Hold the rows of another one too, behind its own."""
        self._count = torch.cat([self._count, other._count])
        self._sum, self._outer = torch.cat([self._sum, other._sum]), torch.cat([self._outer, other._outer])

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return sum(t.numel() * t.element_size() for t in (self._count, self._sum, self._outer))


class QueryCentres:
    """Sums over the queries of one layer and of the lengths of their rotating pairs.

    Sums are float32, or float64 for a float64 model.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._count = self._sum = self._lengths = torch.empty(0)  # [B], [B, N, D], [B, N, F]

    def add(self, query: Tensor, positions: Tensor) -> None:
        """Take queries [B, N, Q, D] at positions [B, Q] (-1 = padding)."""
        counted = (positions >= 0)[:, None, :, None]  # [B, 1, Q, 1]
        wide = query.to(torch.promote_types(query.dtype, torch.float32)) * counted
        plain, lengths = self._rotary.turn(wide, -positions).sum(2), self._rotary.moduli(wide).sum(2)
        if not self._count.numel():
            self._count, self._sum, self._lengths = (torch.zeros_like(t) for t in (plain[:, 0, 0], plain, lengths))
        self._count += counted[:, 0, :, 0].sum(1)
        self._sum += plain
        self._lengths += lengths

    def of(self, rows: Tensor | slice) -> Centres:
        """The centres of some rows."""
        count = self._count[rows].clamp(min=1)[:, None, None]
        mean = self._sum[rows] / count
        size, dtype = mean.shape[-1], mean.dtype
        return Centres(
            mean,
            self._lengths[rows] / count,
            lambda start, steps: self._rotary.mean_turn(start, steps, size, dtype),
            self._rotary.moduli,
        )

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        self._count, self._sum, self._lengths = (t[rows] for t in (self._count, self._sum, self._lengths))

    def join(self, other: QueryCentres) -> None:
        """Hold the rows of another one too, behind its own."""
        self._count = torch.cat([self._count, other._count])
        self._sum, self._lengths = torch.cat([self._sum, other._sum]), torch.cat([self._lengths, other._lengths])

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return sum(t.numel() * t.element_size() for t in (self._count, self._sum, self._lengths))


class UnitExtremes:
    """The extremes of every unit of positions, channel by channel, among the keys that were written so far.

    Of layers that nothing leaves, so that none is ever taken back. The first place takes padding, which no row has.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._low = self._high = torch.empty(0)  # [B, H, 1 + U, D]

    def add(self, keys: Tensor, positions: Tensor, longest: int) -> None:
        """Take keys [B, H, Q, D] at positions [B, Q] (-1 = padding), all below ``longest``."""
        if not self._low.numel():
            batch, heads, _, size = keys.shape
            self._low = keys.new_full((batch, heads, 1, size), float("inf"))
            self._high = -self._low
        needed = (longest - 1) // self._unit + 2
        if needed > self._low.shape[2]:
            self._widen(needed + needed // SHARE + 1)
        places = (positions // self._unit + 1).long()[:, None, :, None].expand_as(keys)
        self._low.scatter_reduce_(2, places, keys, "amin")
        self._high.scatter_reduce_(2, places, keys, "amax")

    def _widen(self, width: int) -> None:
        more = (0, 0, 0, width - self._low.shape[2])
        self._low = pad(self._low, more, value=float("inf"))
        self._high = pad(self._high, more, value=-float("inf"))

    @property
    def now(self) -> Extremes:
        """Of all rows, in the keys' own type."""
        return Extremes(self._low[:, :, 1:], self._high[:, :, 1:])

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        if self._low.numel():
            self._low, self._high = self._low.index_select(0, rows), self._high.index_select(0, rows)

    def join(self, other: UnitExtremes) -> None:
        """Hold the rows of another one too, behind its own."""
        if not self._low.numel():
            return
        width = max(self._low.shape[2], other._low.shape[2])
        self._widen(width)
        other._widen(width)
        self._low, self._high = torch.cat([self._low, other._low]), torch.cat([self._high, other._high])

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return self._low.nbytes + self._high.nbytes


class MovingSinks:
    """Positions counted inside the cache, as StreamingLLM's original does, for serving only.

    Turns a layer's sink keys towards the recent ones by as many positions as were evicted between them.

    All recent entries and the queries move alike, so only the sinks have to. They are turned from their first state
    every time, so that rounding does not add up.
    """

    def __init__(self, rotary: Rotary, sink: int) -> None:
        self._rotary, self._sink = rotary, sink
        self._first = torch.empty(0)  # [B, H, sink, D]
        self._known = torch.empty(0, dtype=torch.bool)  # [B] rows whose first state is held

    def move(self, store: Store, rows: Tensor | slice, *, by: Tensor) -> None:
        """Set the sinks of some rows, in their first slots, ``by`` [b] positions further than they were computed at."""
        # protected, so no eviction ever moved them: the sinks are the first slots
        keys = self._begun(store)
        fresh = torch.zeros_like(self._known)
        fresh[rows] = True
        fresh &= ~self._known
        # a row's first eviction: its sinks still stand as they were computed
        self._first[fresh] = keys[fresh]
        self._known |= fresh
        first = self._first[rows]
        store.overwrite_keys(rows, self._sink, self._rotary.turn(first, by[:, None].expand(-1, first.shape[2])))

    def _begun(self, store: Store) -> Tensor:
        """The keys in a store's first slots, once there is room for them as they were computed."""
        keys = store.entries(slice(None))[0][:, :, : self._sink]
        if not self._known.numel():
            self._first = keys.new_zeros(*keys.shape[:2], self._sink, keys.shape[3])
            self._known = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
        return keys

    def join(self, other: MovingSinks, stores: tuple[Store, Store]) -> None:
        """Hold the rows of another one too, behind its own; ``stores`` are both of theirs, before they join."""
        self._begun(stores[0])
        other._begun(stores[1])
        self._first, self._known = torch.cat([self._first, other._first]), torch.cat([self._known, other._known])

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        if self._known.numel():  # nothing is known before the first eviction
            self._first, self._known = self._first[rows], self._known[rows]

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return self._first.numel() * self._first.element_size()
