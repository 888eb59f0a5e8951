"""One layer of the compressing cache: what it holds, what its queries see of it, and how it is evicted from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall, causal_attention, grouped_attention, query_blocks
from kvaudit.audit.cache.evict import attention_mass, victim_slots, keep_mask, visibility_mask
from kvaudit.audit.cache.layer_state import LastQueries, MovingSinks, QueryCentres, QueryMoments, UnitExtremes
from kvaudit.audit.cache.layers import LayerPlan
from kvaudit.audit.cache.layers import States
from kvaudit.audit.cache.codes import Scratch
from kvaudit.audit.cache.rows import Layout
from kvaudit.audit.cache.quantised_store import QuantisedStore
from kvaudit.audit.cache.rotary import Rotary
from kvaudit.audit.cache.rows import Pins, RowKeys, join_parts
from kvaudit.audit.cache.rows import Counts, Eviction, Schedule, Victims
from kvaudit.audit.cache.selection import slot_mask, unit_mask
from kvaudit.audit.cache.store import Entries, Store
from kvaudit.audit.policies import Selector, View


class Forward(NamedTuple):
    """The forward under way, as all layers of B rows meet it.

    ``positions`` int32 [B, Q] are the row positions of its queries, -1 = padding, on the model's device. ``seen`` [B]
    counts tokens there, ``longest`` those of the longest row. ``starts``: nothing is held yet, and padding is on the
    right, where plain causal attention never lets a real token see it. ``coded`` says how many keys and values of each
    row are codes by now, where the policy quantises. ``even`` is the position of the first query, where all rows have
    one there and none has padding. ``columns`` [B, 1, Q] are ``positions``, and ``gone`` int32 [B, 1, 1] is ``seen``,
    as all heads of all layers take them. ``real`` bool [B, Q] says on the CPU which queries are no padding, ``all_fed``
    that none is.
    """

    positions: Tensor
    decoding: bool
    seen: Tensor
    longest: int
    starts: bool
    coded: tuple[Counts, Counts] | None
    even: int | None
    columns: Tensor
    gone: Tensor
    real: Tensor
    all_fed: bool


class CachedLayer:
    """The entries of one layer for some rows, and what its policy keeps beside them.

    ``schedule`` is that of all layers with the same evictor; ``held`` has the entries of each row, in the mean over
    heads; ``bytes`` is what is allocated.
    """

    def __init__(
        self,
        number: int,
        plan: LayerPlan,
        schedule: Schedule,
        rotary: Rotary | None,
        scratch: Scratch,
        layout: Layout | None,
    ) -> None:
        evictor, codec, mass = schedule.evictor, plan.quantiser, schedule.evictor.accumulates
        self.number, self.plan, self.schedule = number, plan, schedule
        self.evictor, self.selector = evictor, plan.selector
        self.store: Store = (
            QuantisedStore(codec, number, scratch, layout, accumulates=mass) if codec else Store(accumulates=mass)
        )
        self._last = LastQueries(evictor.observed_queries) if evictor.observed_queries else None
        self._moments = QueryMoments(rotary, evictor.sink) if rotary and evictor.moments else None
        self._centres = QueryCentres(rotary) if rotary and evictor.centres else None
        self._sinks = MovingSinks(rotary, evictor.sink) if rotary and evictor.repositions else None
        selector = self.selector
        self._extremes = UnitExtremes(selector.unit) if selector and selector.extremes else None
        self.states = States() if plan.has_state else None
        self.held = schedule.left
        self._scaling = 1.0  # of the last call
        self._sink_logits: Tensor | None = None  # of the last call too, [G*H]
        self.bytes = 0

    # --- what a forward brings --------------------------------------------------------------------------------------

    def append(self, call: AttentionCall, now: Forward) -> None:
        """Take the call's keys and values in."""
        self._scaling, self._sink_logits = call.scaling, call.sink_logits
        self.store.append(call.key, call.value, now.columns, now.even, limit=self.schedule.limit)
        if self._extremes:
            self._extremes.add(call.key, now.positions, now.longest)
        self.flush(now, on_write=True)
        self.held = self.schedule.arrived

    def flush(self, now: Forward, *, on_write: bool) -> None:
        """Let entries become codes, where that is due before their own queries attend (``on_write``) or after."""
        if isinstance(self.store, QuantisedStore) and self.store.on_write == on_write:
            assert now.coded is not None
            self.store.flush(*now.coded)

    def remember(self, query: Tensor, now: Forward) -> None:
        """Keep of the new queries what the policy asks for."""
        store = self.store
        if self._last:
            self._last.add(query, now.positions, self.schedule.places, real=now.real)
        if store.mass is not None:
            # what was held comes before all new queries, which stand in order: where slots are empty, or padding is
            # on the left, those that a query sees are not the first ones
            before = store.length - query.shape[2] if now.starts or (now.all_fed and self._is_full) else None
            for rows, keys, _ in store.read():
                at, positions = now.positions[rows], store.positions[rows]
                store.mass[rows] += attention_mass(
                    *(query[rows], at, keys, positions, self._scaling, self._sink_logits),
                    before=before,
                    all_fed=now.all_fed,
                )
        for statistics in (self._moments, self._centres):
            if statistics:
                statistics.add(query, now.positions)

    def weigh(self) -> None:
        """Count the allocated bytes again."""
        own = (self._last, self._moments, self._centres, self._extremes, self._sinks, self.states)
        self.bytes = self.store.bytes + sum(part.bytes for part in own if part)

    # --- what its queries see ---------------------------------------------------------------------------------------

    def attention(self, call: AttentionCall, now: Forward) -> Tensor:
        """Attention output [B, G*H, Q, D] of the newest queries. Masks are bounded, whatever the length."""
        store, window, queries = self.store, self.plan.sliding_window, call.query.shape[2]
        padded = not self._is_full
        # one query reads codes where they lie, and nothing is unpacked
        if isinstance(store, QuantisedStore) and queries == 1 and store.attends_codes:
            visible = visibility_mask(now.positions, store.positions, window) if padded else None
            return store.attend_one(call.query, visible, call.scaling, call.sink_logits)
        # the kernel's own causal mask will do: nothing stands before, and no query is too late for the first key
        whole = now.starts and queries > 1 and (window is None or queries <= window)
        out = []
        for part in store.read():
            query = call.query if part.rows == slice(None) else call.query[part.rows]
            if whole:
                out.append(causal_attention(query, part.keys, part.values, call.scaling, call.sink_logits))
            elif queries == 1 and window is None and not padded:
                out.append(grouped_attention(query, part.keys, part.values, None, call.scaling, call.sink_logits))
            else:
                out.append(self._masked(part, call._replace(query=query), now.positions[part.rows]))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _masked(self, part: Entries, call: AttentionCall, at: Tensor) -> Tensor:
        """Of some rows' queries at positions [b, Q], in blocks whose mask stays small."""
        store, query = self.store, call.query
        # one mask for all heads, until the first eviction lets them differ
        positions = store.positions[part.rows, :1] if store.uniform else store.positions[part.rows]
        groups = query.shape[1] // part.keys.shape[1]  # query heads of a KV head
        elements = len(query) * positions.shape[1] * groups * store.length  # of the mask of one query column, all heads
        parts = []
        for some in query_blocks(query.shape[2], elements):
            visible = visibility_mask(at[:, some], positions, self.plan.sliding_window)
            asked = query[:, :, some]
            parts.append(grouped_attention(asked, part.keys, part.values, visible, call.scaling, call.sink_logits))
        return torch.cat(parts, 2)

    def chosen_attention(
        self, call: AttentionCall, now: Forward, selector: Selector, view: View
    ) -> tuple[Tensor, Tensor]:
        """Attention output [B, G*H, 1, D] of one query per row over the units [B, A, k] that it chooses, and those.

        For a store that nothing leaves, so that every head holds the same positions.
        """
        store, at = self.store, now.positions
        assert call.query.shape[2] == 1, call.query.shape
        extremes = self._extremes.now if self._extremes else None
        units = selector.choose(view._replace(queries=call.query, query_positions=at, extremes=extremes))
        most = now.longest // selector.unit + 1  # units there are by now
        if store.ordered and now.even is not None and store.length == now.even + 1:
            # every slot holds the position of its number, and all of them come before the query
            visible = slot_mask(units[:, :, None], store.length, selector.unit, most)
        else:
            chosen = unit_mask(units[:, :, None], store.positions[:, 0], selector.unit, most)  # [B, A, 1, K]
            # a row that is fed nothing sees everything: its output is never used, but must stay finite
            visible = (visibility_mask(at, store.positions[:, :1], None) & chosen) | (at < 0)[:, None, None]
        out = grouped_attention(call.query, store.keys, store.values, visible, call.scaling, call.sink_logits)
        return out, units

    # --- how it is evicted from ---------------------------------------------------------------------------------------

    def replaces(self, eviction: Eviction) -> bool:
        """Whether one entry per head leaves, so that the newest can take its slot."""
        # the newest entry would stand out of order, which neighbours and runs of codes do not bear; of heads that
        # share a budget, one may lose two
        if self.evictor.ordered or self.evictor.shares_heads or isinstance(self.store, QuantisedStore):
            return False
        return eviction.every and self._is_full and eviction.budgets.all_are(self.store.length - 1)

    @property
    def _is_full(self) -> bool:
        """Whether no head of any row has an empty slot."""
        return self.held.all_are(self.store.length)

    def view(self, rows: Tensor | slice, now: Forward, keys_of: RowKeys, *, packed: bool) -> View:
        """What the policy is shown of some rows."""
        store, moments, centres = self.store, self._moments, self._centres
        if packed and not (self._is_full and store.ordered):
            # neighbours in the cache must be neighbours in the view: padding of other rows leaves no gaps
            self._keep(store.positions >= 0, now)
        keys, values = store.entries(rows)
        positions = store.positions[rows]
        # queries [b, H, 0, D] at positions [b, 0], for a policy that asks for none
        nothing = (keys.new_zeros(len(keys), keys.shape[1], 0, keys.shape[3]), positions.new_zeros(len(keys), 0))
        queries, query_positions = self._last.of(rows) if self._last else nothing
        return View(
            layer=self.number,
            keys=keys,
            values=values,
            positions=positions,
            seen=now.seen[rows],
            queries=queries,
            query_positions=query_positions,
            mass=keys.new_zeros(keys.shape[:3]) if store.mass is None else store.mass[rows],
            scaling=self._scaling,
            entry_keys=keys_of.entries(positions, rows),
            moments=moments.of(rows) if moments else None,
            centres=centres.of(rows) if centres else None,
            sink_logits=self._sink_logits,
            longest=now.longest,
        )

    def evict(self, eviction: Eviction, now: Forward, view: View, importance: Tensor, pins: Pins | None) -> None:
        """Drop what ``importance`` [b, H, K] of the entries in ``view`` ranks last."""
        pinned, store = self._pinned(eviction, view, pins), self.store
        self.held = self.schedule.left
        kept = store.positions >= 0  # [B, H, length]; rows that are not due keep all
        kept[eviction.rows] = keep_mask(importance, view.positions, view.seen, self.evictor, pinned)
        self._keep(kept, now)
        if self._sinks:
            # all that is gone stood between the sinks and the rest: tokens seen less those held
            self._sinks.move(store, eviction.rows, by=view.seen - eviction.budgets.on(view.seen.device)[eviction.rows])

    def victims(self, eviction: Eviction, view: View, importance: Tensor, pins: Pins | None) -> Victims:
        """The one entry of every head that ``importance`` [B, H, K] ranks last."""
        slots = victim_slots(importance, view.positions, view.seen, self.evictor, self._pinned(eviction, view, pins))
        return Victims(slots, view.positions.gather(2, slots[:, :, None]))

    def known_victims(self, now: Forward, pins: Pins | None) -> Victims | None:
        """What ``victims`` would find, without asking the device: where all hold alike, and positions alone rank.

        None where the host does not know what is held, as the schedule says.
        """
        order, at = self.schedule.order, now.even
        if order is None or at is None or pins is not None or len(order) + 1 != self.store.length:
            return None
        order.append(at)
        positions, seen = torch.tensor([[order]], dtype=torch.int32), torch.tensor([at + 1])
        # one row and one head stand for all, in [1, 1, K]
        nothing = torch.zeros(1, 1, len(order))
        no_vectors = nothing[..., None]
        view = View(
            layer=self.number,
            keys=no_vectors,
            values=no_vectors,
            positions=positions,
            seen=seen,
            queries=no_vectors,
            query_positions=positions[0],
            mass=nothing,
            scaling=self._scaling,
            entry_keys=positions,
        )
        slot = victim_slots(self.evictor.importance(view), positions, seen, self.evictor).tolist()[0][0]
        # the newest takes the place of what leaves, as the store will have it
        gone, newest = order[slot], order.pop()
        if slot < len(order):
            order[slot] = newest
        return Victims(slot, gone)

    def learn_order(self, now: Forward, pins: Pins | None) -> None:
        """Let the schedule know what the slots held before this forward, where all rows and heads hold alike.

        Two reads, once a cache.
        """
        order, positions = self.schedule.order, self.store.positions
        known = order is not None and len(order) + 1 == self.store.length
        if not known and now.even is not None and pins is None and bool((positions == positions[:1, :1]).all()):
            self.schedule.order = positions[0, 0, :-1].tolist()

    def replace(self, victims: Victims, eviction: Eviction, now: Forward) -> None:
        """Let the newest entry take the place of the one that leaves."""
        self.held = self.schedule.left
        self.store.replace(victims, now.gone, now.longest)
        if self._sinks:
            self._sinks.move(self.store, eviction.rows, by=now.seen - eviction.budgets.on(now.seen.device))

    def _pinned(self, eviction: Eviction, view: View, pins: Pins | None) -> Tensor | None:
        """Which entries of the view a role pins, None for no such roles; no pin may narrow the model's own window."""
        return None if pins is None or self.plan.sliding_window is not None else pins.at(view.positions, eviction.rows)

    def _keep(self, kept: Tensor, now: Forward) -> None:
        """Drop the slots where ``kept`` [B, H, length] is False; the fullest head sets the width."""
        # the host cannot know how heads share: to ask waits for the device
        width = int(kept.sum(-1).max()) if self.evictor.shares_heads else self.held.largest
        self.store.keep(kept, width, now.gone, now.longest)

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows [n] instead, in this order, each as often as it is named, as ``schedule`` does by now."""
        for part in (self.store, self._last, self._moments, self._centres, self._extremes, self._sinks):
            if part is not None:
                part.reindex(rows)
        if self.states is not None:
            self.states = self.states.of(rows)
        self.held = self.schedule.left
        self.weigh()

    def join(self, other: CachedLayer) -> None:
        """Hold the rows of another cache's layer too, behind its own, as ``schedule`` does by now."""
        self.store.close_gaps()
        other.store.close_gaps()
        if self._sinks and other._sinks:
            self._sinks.join(other._sinks, (self.store, other.store))
        self.store.join(other.store)
        join_parts([(self._last, other._last), (self._moments, other._moments)])
        join_parts([(self._centres, other._centres), (self._extremes, other._extremes)])
        if self.states is not None and other.states is not None:
            self.states = self.states.with_rows(other.states)
        self.held = self.schedule.left
        self.weigh()
