"""One layer of the compressing cache: its entries, what its queries see of them, and how they are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache import decode_kernels
from kvaudit.audit.cache.attention import AttentionCall, causal_attention, grouped_attention, query_blocks
from kvaudit.audit.cache.codes import Scratch
from kvaudit.audit.cache.evict import add_step_mass, attention_mass, keep_mask, victim_slots, visibility_mask
from kvaudit.audit.cache.layer_state import (
    LastQueries,
    LayerState,
    MovingSinks,
    QueryCentres,
    QueryMoments,
    UnitExtremes,
)
from kvaudit.audit.cache.layers import LayerPlan, States
from kvaudit.audit.cache.quantised_store import QuantisedStore
from kvaudit.audit.cache.rotary import Rotary
from kvaudit.audit.cache.rows import Counts, Eviction, Pins, RowKeys, Schedule, TailLayout, Victims
from kvaudit.audit.cache.selection import slot_mask, unit_mask
from kvaudit.audit.cache.stepped_store import SteppedStore
from kvaudit.audit.cache.store import Entries, Store
from kvaudit.audit.policies import Selector, View


class Forward(NamedTuple):
    """The current forward of B rows, as every layer needs it.

    ``positions`` int32 [B, Q], on the model's device: the row positions of the queries, -1 = padding. ``decoding``: it
    is a decode step. ``seen`` [B], on the same device: the tokens of each row; ``longest``: those of the longest row.
    ``is_first``: the cache is empty, and padding is on the right, where causal attention never lets a real token see
    it. ``coded``: how many keys and values of each row are quantised once the forward has ended, None without a
    quantiser and in a ``FixedStep``. ``first_position``: the position of the first query, if it is the same in all rows
    and none has padding. ``positions_by_head`` [B, 1, Q] is ``positions`` and ``next_query`` int32 [B, 1, 1] is
    ``seen``, in the shapes that layers need. ``real`` bool [B, Q], on the CPU, is False at padding; ``no_padding``: it
    is True everywhere.
    """

    positions: Tensor
    decoding: bool
    seen: Tensor
    longest: int
    is_first: bool
    coded: tuple[Counts, Counts] | None
    first_position: int | None
    positions_by_head: Tensor
    next_query: Tensor
    real: Tensor
    no_padding: bool


class CachedLayer:
    """The entries of one layer for B rows, and the further state that the policy needs.

    ``schedule`` says which rows evict now; layers with the same eviction policy share it. ``counts`` are the numbers of
    entries in each row, averaged over heads. ``bytes`` are the bytes allocated at the last call of ``update_bytes``.
    """

    def __init__(
        self,
        number: int,
        plan: LayerPlan,
        schedule: Schedule,
        rotary: Rotary | None,
        scratch: Scratch,
        layout: TailLayout | None,
    ) -> None:
        evictor, selector, codec = schedule.evictor, plan.selector, plan.quantiser
        mass = evictor.accumulates
        self.number, self.plan, self.schedule = number, plan, schedule
        self.evictor, self.selector = evictor, selector
        self.store: Store = (
            SteppedStore(codec, number, scratch, layout, accumulates=mass) if codec else Store(accumulates=mass)
        )
        self._last = LastQueries(evictor.observed_queries) if evictor.observed_queries else None
        self._moments = QueryMoments(rotary, evictor.sink) if rotary and evictor.moments else None
        self._centres = QueryCentres(rotary) if rotary and evictor.centres else None
        self._extremes = UnitExtremes(selector.unit) if selector and selector.extremes else None
        self._sinks = MovingSinks(rotary, evictor.sink) if rotary and evictor.repositions else None
        # all but the sinks, which need the stores to join
        optional = (self._last, self._moments, self._centres, self._extremes)
        self._independent: list[LayerState] = [state for state in optional if state]
        self.states = States() if plan.has_state else None
        self.counts = schedule.remaining
        self._scaling = 1.0  # of the last call
        self._sink_logits: Tensor | None = None  # of the last call, [G*H]
        self.bytes = 0

    # --- what a forward brings ----------------------------------------------------------------------------------------

    def append(self, call: AttentionCall, forward: Forward) -> None:
        self._scaling, self._sink_logits = call.scaling, call.sink_logits
        max_slots = self.schedule.max_slots
        self.store.append(call.key, call.value, forward.positions_by_head, forward.first_position, max_slots=max_slots)
        if self._extremes:
            self._extremes.add(call.key, forward.positions, forward.longest)
        self.flush(forward, on_write=True)
        self.counts = self.schedule.arrived

    def flush(self, forward: Forward, *, on_write: bool) -> None:
        """Quantise the entries that are due, if this is the moment at which the quantiser does so.

        There are two moments in a forward: before the new queries attend (``on_write`` is True), and after (False).
        """
        if isinstance(self.store, QuantisedStore) and self.store.on_write == on_write:
            assert forward.coded is not None
            self.store.flush(*forward.coded)

    def add_queries(self, query: Tensor, forward: Forward) -> None:
        """Update what the policy needs of past queries: the last ones, their attention mass and their statistics."""
        if self._last:
            places = self.schedule.ring_places(query.device)
            self._last.add(query, forward.positions, places, real=forward.real)
        store = self.store
        if store.mass is not None:
            # earlier entries come before all new queries, which are in order; but with empty slots, or with padding on
            # the left, the slots that a query sees are not the first ones
            are_first = forward.is_first or (forward.no_padding and self._is_full)
            before = store.length - query.shape[2] if are_first else None
            for rows, keys, _ in store.read():
                query_positions, positions = forward.positions[rows], store.positions[rows]
                store.mass[rows] += attention_mass(
                    *(query[rows], query_positions, keys, positions, self._scaling, self._sink_logits),
                    before=before,
                    no_padding=forward.no_padding,
                )
        self._add_statistics(query, forward)

    def _add_statistics(self, query: Tensor, forward: Forward) -> None:
        for statistics in (self._moments, self._centres):
            if statistics:
                statistics.add(query, forward.positions)

    def update_bytes(self) -> None:
        self.bytes = self.store.bytes
        for state in (*self._independent, self._sinks, self.states):
            if state is not None:
                self.bytes += state.bytes

    # --- attention ----------------------------------------------------------------------------------------------------

    def attention(self, call: AttentionCall, forward: Forward) -> Tensor:
        """Return the attention output [B, G*H, Q, D] of the newest queries, with masks of bounded size."""
        store, window, queries = self.store, self.plan.sliding_window, call.query.shape[2]
        has_empty = not self._is_full
        # for one query codes are used directly, without decoding all of them
        if isinstance(store, QuantisedStore) and queries == 1 and store.attends_codes:
            visible = visibility_mask(forward.positions, store.positions, window) if has_empty else None
            return store.attend_one(call.query, visible, call.scaling, call.sink_logits)
        # the kernel's own causal mask is enough: the cache was empty, and all queries are within the window
        is_causal = forward.is_first and queries > 1 and (window is None or queries <= window)
        outputs = []
        for entries in store.read():
            query = call.query if entries.rows == slice(None) else call.query[entries.rows]
            if is_causal:
                out = causal_attention(query, entries.keys, entries.values, call.scaling, call.sink_logits)
            elif queries == 1 and window is None and not has_empty:
                out = grouped_attention(query, entries.keys, entries.values, None, call.scaling, call.sink_logits)
            else:
                out = self._masked_attention(entries, call._replace(query=query), forward.positions[entries.rows])
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _masked_attention(self, entries: Entries, call: AttentionCall, query_positions: Tensor) -> Tensor:
        """Return the attention output [b, G*H, Q, D] of some rows' queries at positions [b, Q].

        It is computed in blocks of queries, so that masks are small.
        """
        store, query = self.store, call.query
        # one mask for all heads, until evictions let them differ
        positions = store.positions[entries.rows, :1] if store.uniform else store.positions[entries.rows]
        groups = query.shape[1] // entries.keys.shape[1]  # query heads of a KV head
        elements = len(query) * positions.shape[1] * groups * store.length  # of the mask of one query column
        outputs = []
        for block in query_blocks(query.shape[2], elements):
            visible = visibility_mask(query_positions[:, block], positions, self.plan.sliding_window)
            queries = query[:, :, block]
            out = grouped_attention(queries, entries.keys, entries.values, visible, call.scaling, call.sink_logits)
            outputs.append(out)
        return torch.cat(outputs, 2)

    def selected_attention(
        self, call: AttentionCall, forward: Forward, selector: Selector, view: View
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output [B, G*H, 1, D] of one query per row, and the numbers of the units that it reads.

        A unit is a run of ``selector.unit`` positions; the policy selects which ones to read. A policy that selects
        never evicts, so every head holds the same positions.
        """
        store, positions = self.store, forward.positions
        assert call.query.shape[2] == 1, call.query.shape
        extremes = self._extremes.extremes if self._extremes else None
        units = selector.choose(view._replace(queries=call.query, query_positions=positions, extremes=extremes))
        max_units = forward.longest // selector.unit + 1  # number of units so far
        if store.ordered and forward.first_position is not None and store.length == forward.first_position + 1:
            # every slot holds the position of its number, and all of them come before the query
            visible = slot_mask(units[:, :, None], store.length, selector.unit, max_units)
        else:
            selected = unit_mask(units[:, :, None], store.positions[:, 0], selector.unit, max_units)  # [B, A, 1, K]
            # a row that is fed nothing sees everything: its output is never used, but must stay finite
            is_padding = (positions < 0)[:, None, None]
            visible = (visibility_mask(positions, store.positions[:, :1], None) & selected) | is_padding
        keys, values = store.entries(slice(None))
        return grouped_attention(call.query, keys, values, visible, call.scaling, call.sink_logits), units

    # --- a step of fixed shapes (``fixed_step``) ----------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a decode step of fixed shapes (a CUDA graph) reads or writes, besides the ledger."""
        yield from self.store.tensors()
        for state in self._independent:
            yield from state.tensors()

    @property
    def blocks_fixed_step(self) -> str | None:
        """The feature of this layer that a decode step of fixed shapes cannot compute; None if there is none.

        It is a noun phrase for a message, such as "layers with a state".
        """
        if self.states is not None or not self.plan.has_entries:
            return "layers with a state"
        if self.selector is not None:
            return "queries that select what they attend to"
        codec = self.plan.quantiser
        if codec is not None and self.evictor.evicts:
            return "codes of a cache that evicts too"
        if codec is not None and not codec.codes_singly:
            return f"codes of {codec.name}, which may code several entries in a step"
        return None

    @property
    def stepped(self) -> SteppedStore | None:
        """The layer's store if the layer quantises, in the class that supports steps of fixed shapes; else None."""
        return self.store if isinstance(self.store, SteppedStore) else None

    def write_at(self, slot: Tensor, call: AttentionCall, forward: Forward) -> None:
        """Write the new entries of a step into slot (place in the layer's tensors) number ``slot`` [1]."""
        self._scaling, self._sink_logits = call.scaling, call.sink_logits
        self.store.write_at(slot, call.key, call.value, forward.positions)

    def step_attention(self, call: AttentionCall, forward: Forward) -> Tensor:
        """Return the attention output [B, G*H, 1, D] of one query per row over all slots, with empty slots masked."""
        if decode_kernels.is_used(call.query):
            try:
                return self._attend_by_kernel(call, forward)
            except torch.OutOfMemoryError:  # says nothing about the kernels
                raise
            except Exception as error:  # triton raises many types if it cannot compile; nothing was computed yet
                decode_kernels.disable_for(call.query, error)
        entries = Entries(slice(None), *self.store.entries(slice(None)))
        return self._masked_attention(entries, call, forward.positions)

    def _attend_by_kernel(self, call: AttentionCall, forward: Forward) -> Tensor:
        query, newest = call.query[:, :, 0], forward.positions[:, 0]
        positions, window = self.store.positions, self.plan.sliding_window
        coded = self.stepped.coded_parts() if self.stepped else None
        if coded is None:
            attend, (keys, values) = decode_kernels.attend_slots, self.store.entries(slice(None))
            out = attend(query, keys, values, positions, newest, call.scaling, call.sink_logits, window)
        else:
            attend_codes, (key, value) = decode_kernels.attend_codes, coded
            out = attend_codes(query, key, value, positions, newest, call.scaling, call.sink_logits, window)
        return out[:, :, None]

    def add_step_queries(self, query: Tensor, forward: Forward) -> None:
        """Update the policy's statistics of past queries with one query per row, by operators of fixed shapes."""
        if self._last:
            self._last.add_step(query, forward.positions)
        mass = self.store.mass
        if mass is not None:
            keys, _ = self.store.entries(slice(None))
            states = (self._scaling, self._sink_logits)
            add_step_mass(mass, query, forward.positions, keys, self.store.positions, *states)
        self._add_statistics(query, forward)

    # --- eviction -----------------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        """Whether no head of any row has an empty slot (place for an entry)."""
        return self.counts.all_equal(self.store.length)

    def can_replace(self, eviction: Eviction, length: int) -> bool:
        """Return whether an eviction removes one of each head's ``length`` entries, and the newest may take its slot.

        It may not if the policy needs entries in order of position, if heads share a budget, or if entries are
        quantised.
        """
        # the newest entry would be out of order, which policies over neighbours and runs of codes cannot use; and heads
        # that share a budget may each lose more than one entry
        if self.evictor.ordered or self.evictor.shares_heads or isinstance(self.store, QuantisedStore):
            return False
        every_row = isinstance(eviction.rows, slice)
        return every_row and self.schedule.arrived.all_equal(length) and eviction.budgets.all_equal(length - 1)

    def view(self, rows: Tensor | slice, forward: Forward, row_keys: RowKeys, *, packed: bool) -> View:
        """Return the ``View`` of some rows: what the policy needs to rank their entries.

        ``row_keys`` seed the policy's random draws. ``packed``: the view must hold entries in order of position, with
        no empty slots between them.
        """
        store, moments, centres = self.store, self._moments, self._centres
        if packed and not (self._is_full and store.ordered):
            # neighbours in the cache must be neighbours in the view, without gaps from the padding of other rows
            self._keep(store.positions >= 0, forward)
        keys, values = store.entries(rows)
        positions = store.positions[rows]
        # queries [b, H, 0, D] at positions [b, 0], for a policy that needs none
        no_queries = (keys.new_zeros(len(keys), keys.shape[1], 0, keys.shape[3]), positions.new_zeros(len(keys), 0))
        queries, query_positions = self._last.of(rows) if self._last else no_queries
        return View(
            layer=self.number,
            keys=keys,
            values=values,
            positions=positions,
            seen=forward.seen[rows],
            queries=queries,
            query_positions=query_positions,
            mass=keys.new_zeros(keys.shape[:3]) if store.mass is None else store.mass[rows],
            scaling=self._scaling,
            entry_keys=row_keys.entries(positions, rows),
            moments=moments.of(rows) if moments else None,
            centres=centres.of(rows) if centres else None,
            sink_logits=self._sink_logits,
            longest=forward.longest or None,
        )

    def evict(self, eviction: Eviction, forward: Forward, view: View, importance: Tensor, pins: Pins | None) -> None:
        """Drop the entries of the lowest ``importance`` [b, H, K], until each row is down to its budget.

        ``view`` holds the entries to choose from. Pinned entries are dropped last.
        """
        pinned, store = self._pins_of(eviction, view, pins), self.store
        self.counts = self.schedule.remaining
        kept = store.positions >= 0  # [B, H, length]; rows that are not due keep all entries
        kept[eviction.rows] = keep_mask(importance, view.positions, view.seen, self.evictor, pinned)
        self._keep(kept, forward)
        if self._sinks:
            # all evicted entries were between the sinks and the recent ones: tokens seen minus entries kept
            budgets = eviction.budgets.to(view.seen.device)[eviction.rows]
            self._sinks.move(store, eviction.rows, by=view.seen - budgets)

    def victims(self, eviction: Eviction, view: View, importance: Tensor, pins: Pins | None) -> Victims:
        """Return slot and position of the entry to evict in every head: that of the lowest ``importance`` [B, H, K].

        Pinned entries and those that the policy protects are evicted only if there are no others.
        """
        slots = victim_slots(importance, view.positions, view.seen, self.evictor, self._pins_of(eviction, view, pins))
        return Victims(slots, view.positions.gather(2, slots[:, :, None]))

    def victims_on_host(self, newest: int | None, before: int, pins: Pins | None) -> Victims | None:
        """Return slot and position of the entry to evict in every head, computed on the CPU.

        This is possible only for policies that rank by position alone. None if the entry may differ between rows or
        heads. ``before`` is the number of slots in use before the new entry, and ``newest`` the new entry's position
        (None if it differs between rows). The position of each slot is read from the device once and then kept in the
        schedule.
        """
        schedule = self.schedule
        if newest is None or pins is not None:
            return None
        if schedule.slot_positions is None or len(schedule.slot_positions) != before:
            positions = self.store.positions[:, :, :before]
            if not bool((positions == positions[:1, :1]).all()):
                return None
            schedule.slot_positions = positions[0, 0].tolist()
        order = schedule.slot_positions
        order.append(newest)
        positions, seen = torch.tensor([[order]], dtype=torch.int32), torch.tensor([newest + 1])
        # one row and one head represent all: [1, 1, K]
        zeros = torch.zeros(1, 1, len(order))
        vectors = zeros[..., None]
        view = View(
            layer=self.number,
            keys=vectors,
            values=vectors,
            positions=positions,
            seen=seen,
            queries=vectors,
            query_positions=positions[0],
            mass=zeros,
            scaling=self._scaling,
            entry_keys=positions,
        )
        slot = victim_slots(self.evictor.importance(view), positions, seen, self.evictor).tolist()[0][0]
        # the newest takes the place of the victim, as it will in the store
        victim, newest = order[slot], order.pop()
        if slot < len(order):
            order[slot] = newest
        return Victims(slot, victim)

    @property
    def moves_sinks(self) -> bool:
        """Whether every eviction rotates the keys of the attention sinks (the first tokens) to new positions."""
        return self._sinks is not None

    def replace(self, victims: Victims, eviction: Eviction, forward: Forward) -> None:
        """Evict the ``victims``, one entry per head, and move the newest entry into the slot of each."""
        self.counts = self.schedule.remaining
        self.store.replace(victims, forward.next_query, forward.longest)
        if self._sinks:
            self._sinks.move(self.store, eviction.rows, by=forward.seen - eviction.budgets.to(forward.seen.device))

    def _pins_of(self, eviction: Eviction, view: View, pins: Pins | None) -> Tensor | None:
        """Return which entries of ``view`` (those to be ranked) are pinned, bool [b, H, K].

        None without pins, and in the model's sliding-window layers.
        """
        return None if pins is None or self.plan.sliding_window is not None else pins.at(view.positions, eviction.rows)

    def _keep(self, kept: Tensor, forward: Forward) -> None:
        """Drop the slots where ``kept`` [B, H, length] is False; as many slots remain as the fullest head needs."""
        # how heads share a budget is known on the device only, so this waits for it
        width = int(kept.sum(-1).max()) if self.evictor.shares_heads else self.counts.largest
        self.store.keep(kept, width, forward.next_query, forward.longest)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def reindex(self, rows: Tensor) -> None:
        self.store.reindex(rows)
        for state in self._independent:
            state.reindex(rows)
        if self._sinks is not None:
            self._sinks.reindex(rows)
        if self.states is not None:
            self.states = self.states.select(rows)
        self.counts = self.schedule.remaining
        self.update_bytes()

    def join(self, other: CachedLayer) -> None:
        self.store.close_gaps()
        other.store.close_gaps()
        if self._sinks and other._sinks:
            self._sinks.join_sinks(other._sinks, (self.store, other.store))
        self.store.join(other.store)
        for state, other_state in zip(self._independent, other._independent, strict=True):
            state.join(other_state)
        if self.states is not None and other.states is not None:
            self.states = self.states.concat(other.states)
        self.counts = self.schedule.remaining
        self.update_bytes()
