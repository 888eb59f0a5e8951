"""The compressing cache: every query attends, then the policy evicts or quantises, and the ledger is written.

Entries keep their rotary positions; the position of the next token is the number of tokens seen. Rows never mix:
padding is never an entry, and when a row is compressed depends on its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from audit.cache.attending import (
    chosen_attention,
    columns,
    new_centres,
    new_moments,
    new_sinks,
    new_store,
    store_attention,
)
from audit.cache.attention import AttentionCall, require_once
from audit.cache.evict import attention_mass, only_victim, retained
from audit.cache.layers import LayerPlan, layer_plans
from audit.cache.ledger import NEVER
from audit.cache.linear import Run, States, advance
from audit.cache.quantised.hints import pack_hints
from audit.cache.quantised.store import QuantisedStore
from audit.cache.rotary import Rotary, require_steady, steady_positions
from audit.cache.routing import RecordedRoutes
from audit.cache.schedule import Pins, Times
from audit.cache.selection import RecordedChoices, Selection
from audit.core.errors import RunError, SpecError
from audit.policies import Policy, Selector, View


class EvictingCache:
    """A cache for one batch that compresses by ``policy``; pass it to a model's forward as ``kv=``.

    Usage: ``begin(positions, decoding=...)`` with the row positions [B, Q] of the next forward (-1 = padding),
    then the forward itself with ``position_ids=positions.clamp(min=0)``. ``rotary`` is the model's (``rotary_for``),
    where the policy asks for it; ``blocks`` counts its mixture-of-experts blocks (``watched_blocks``). Raises SpecError
    for a mixture of policies: one is drawn per request.
    """

    def __init__(
        self, config: Any, policy: Policy, row_keys: Tensor, *, rotary: Rotary | None = None, blocks: int = 0
    ) -> None:
        if policy.drawn(0) is not policy:
            raise SpecError(f"policy {policy.canonical!r} is a mixture: draw one per request, policy.drawn(key)")
        assert rotary or not policy.evictor.needs_rotary, policy.canonical
        self.policy, self.row_keys, self._config = policy, row_keys, config
        self._steady = steady_positions(config)  # asked once: a config takes longer to read than a step should wait
        self.routes = RecordedRoutes(blocks, len(row_keys)) if blocks else None
        self._shared: tuple[Tensor, Tensor] | None = None  # key and length of the prompt that a group shares
        self.plans: list[LayerPlan] = layer_plans(config, policy)
        self.stores = [new_store(layer, plan) for layer, plan in enumerate(self.plans)]
        self._moments = [new_moments(plan, rotary) for plan in self.plans]
        self._centres = [new_centres(plan, rotary) for plan in self.plans]
        self._sinks = [new_sinks(plan, rotary) for plan in self.plans]
        self._agreeing = [n for n, plan in enumerate(self.plans) if plan.policy.evictor.across_layers]
        self.seen = torch.zeros(len(row_keys), dtype=torch.int64)  # [B] on CPU: schedules never wait for the device
        self._since = [torch.zeros_like(self.seen) for _ in self.plans]  # decoded tokens since the last eviction
        self._counts = [torch.zeros_like(self.seen) for _ in self.plans]  # entries per row, in the mean over heads
        self._states = {layer: States() for layer, plan in enumerate(self.plans) if plan.carries}
        governed = [plan.policy.evictor for plan in self.plans if plan.governed]
        self._pins = Pins(governed, len(row_keys), row_keys.device) if policy.pinned_roles else None
        self._times = Times(policy.quantiser, len(row_keys)) if policy.quantiser else None
        self._choices = RecordedChoices(policy.selector.unit) if policy.selector else None
        self.bytes_peak = 0
        self._bytes = [0] * len(self.plans)  # allocated by each layer

    def begin(self, positions: Tensor, *, decoding: bool, pinned: Tensor | None = None) -> None:
        """Announce the next forward: CPU row positions [B, Q], -1 for padding, and which tokens a role pins."""
        assert positions.shape[0] == len(self.seen), (positions.shape, len(self.seen))
        new = (positions >= 0).sum(1)
        first = torch.where(positions >= 0, positions, NEVER).amin(1)
        assert bool(((new == 0) | (first == self.seen)).all()), "rows continue at the number of tokens seen"
        if self._steady is not None and int((self.seen + new).max()) > self._steady:
            require_steady(self._config, int((self.seen + new).max()))
        self._decoding, self._new, self.seen = decoding, new, self.seen + new
        self._attended: set[int] = set()
        self._carried: set[int] = set()
        self._real = positions >= 0
        self._sink_logits: list[Tensor | None] = [None] * len(self.plans)
        self._scaling = [1.0] * len(self.plans)
        device = self.row_keys.device
        self._announced = positions.to(device, torch.int32)
        if self.routes:
            self.routes.begin(self._announced, int(self.seen.max()))
        self._seen_device = self.seen.to(device)
        # right-padded and first: plain causal attention never lets a real token see padding
        self._causal = bool((self.seen == new).all()) and not any(store.length for store in self.stores)
        self._order: Tensor | None = None
        if self._causal and bool(((positions[:, :-1] < 0) & (positions[:, 1:] >= 0)).any()):
            order = torch.sort((positions < 0).int(), dim=1, stable=True).indices
            positions, self._order, self._back = (
                positions.gather(1, order),
                order.to(device),
                order.argsort(1).to(device),
            )
            pinned = None if pinned is None else pinned.cpu().gather(1, order)
        self._positions = positions.to(device, torch.int32)
        if self._choices and decoding:
            self._choices.begin(self._positions[:, 0])
        if self._pins and pinned is not None:
            self._pins.add(self._positions, pinned.to(device))
        if self._times:
            self._times.advance(self.seen, new)
            self._until = tuple(t.to(device) for t in self._times.until())

    @property
    def announced(self) -> Tensor:
        """Row positions int32 [B, Q] of the forward under way, on the model's device."""
        return self._announced

    def attend(self, call: AttentionCall) -> Tensor:
        """Append, attend, evict, quantise; attention output [B, G*H, Q, D]."""
        layer, query, key, value, scaling, sink_logits = call
        require_once(layer, self._attended, len(self.plans))
        self._sink_logits[layer], self._scaling[layer] = sink_logits, scaling
        if self._order is None:
            return self._attend(layer, query, key, value, scaling)
        query, key, value = (columns(tensor, self._order) for tensor in (query, key, value))
        return columns(self._attend(layer, query, key, value, scaling), self._back)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        store, evictor = self.stores[layer], self.plans[layer].policy.evictor
        bounded = evictor.evicts and not evictor.shares_heads and not (self._decoding and evictor.phase == "prefill")
        budgets = evictor.budget_at(self.seen)
        limit = int(budgets.max()) + max(key.shape[2], evictor.interval) if bounded else None
        store.append(key, value, self._positions, limit=limit)
        if isinstance(store, QuantisedStore) and store.on_write:
            store.flush(*self._until)
        self._counts[layer] += self._new
        window = self.plans[layer].sliding_window
        whole = self._causal and query.shape[2] > 1 and (window is None or query.shape[2] <= window)
        padded = bool((self._counts[layer] != store.length).any())
        selector = self.plans[layer].policy.selector if self._decoding else None
        if selector is not None:
            out = self._attend_some(layer, selector, query)
        else:
            at, beside = self._positions, self._sink_logits[layer]
            out = store_attention(store, query, at, scaling, beside, window=window, whole=whole, padded=padded)
        self._remember(layer, query)
        self._weigh(layer)
        self.bytes_peak = max(self.bytes_peak, self.bytes)
        due, layers = self._due(layer, budgets), self._compressing(layer)
        if layers and bool(due.any()):
            self._evict(layers, due, budgets)
        for own in layers:
            done = self.stores[own]
            if isinstance(done, QuantisedStore) and not done.on_write:
                done.flush(*self._until)
            self._weigh(own)
        self._attended.add(layer)
        return out

    def _compressing(self, layer: int) -> list[int]:
        """The layers that compress once this one has attended: itself, or after the last all that agree."""
        if layer not in self._agreeing:
            return [layer]
        return self._agreeing if layer == self._agreeing[-1] else []

    def carry(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        """Output of a layer that carries a state, moved on by the real tokens: ``run`` over hidden states [B, Q, E]."""
        out = advance(run, hidden, self._real, self._states[layer])
        self._weigh(layer)
        self._carried.add(layer)
        return out

    def _attend_some(self, layer: int, selector: Selector, query: Tensor) -> Tensor:
        """One query per row attends to what it chooses, and the choice is noted."""
        at, scaling, beside = self._positions, self._scaling[layer], self._sink_logits[layer]
        view = self._view(layer, slice(None), packed=False)._replace(queries=query, query_positions=at)
        units = selector.choose(view)
        assert self._choices is not None
        self._choices.add(layer, units)
        unit, most = selector.unit, int(self.seen.max()) // selector.unit + 1
        return chosen_attention(self.stores[layer], query, at, scaling, beside, units=units, unit=unit, most=most)

    @property
    def is_settled(self) -> bool:
        """Whether every layer has attended, or carried its state on, since the last announcement."""
        attending = sum(plan.attends for plan in self.plans)
        return len(self._attended) == attending and len(self._carried) == len(self._states)

    def settle(self) -> None:
        """After a forward: raise RunError where some layer did not attend through this cache."""
        if not self.is_settled:
            done, every = len(self._attended | self._carried), len(self.plans)
            raise RunError(
                f"{done} of the model's {every} layers attended through the compressed cache; "
                "such a model cannot be served with it"
            )
        if self.routes:
            self.routes.settle()

    def _weigh(self, layer: int) -> None:
        beside = (self._moments[layer], self._centres[layer], self._sinks[layer])
        self._bytes[layer] = self.stores[layer].bytes + sum(part.bytes for part in beside if part)
        if layer in self._states:
            self._bytes[layer] += self._states[layer].bytes

    @property
    def bytes(self) -> int:
        """Bytes allocated now for serving; the ledger, which records it, is not among them."""
        return sum(self._bytes)

    def _remember(self, layer: int, query: Tensor) -> None:
        """Keep of the new queries what the policy asks for."""
        store, scaling, beside = self.stores[layer], self._scaling[layer], self._sink_logits[layer]
        store.observe(query, self._positions)
        if store.mass is not None:
            for rows, keys, _ in store.read():
                at, positions = self._positions[rows], store.positions[rows]
                store.mass[rows] += attention_mass(query[rows], at, keys, positions, scaling, beside)
        for statistics in (self._moments[layer], self._centres[layer]):
            if statistics:
                statistics.add(query, self._positions)

    def _due(self, layer: int, budgets: Tensor) -> Tensor:
        """Rows [B] that compress now; a function of each row's own token count, as their ``budgets`` [B] are."""
        evictor = self.plans[layer].policy.evictor
        if not evictor.evicts:
            return torch.zeros_like(self.seen, dtype=torch.bool)
        # a row that was given nothing is left as it is, whatever the others of its batch do
        over = (self._counts[layer] > budgets) & (self._new > 0)
        if not self._decoding:
            return over & (evictor.phase != "decode")
        self._since[layer] += self._new
        return over & (self._since[layer] >= evictor.interval) & (evictor.phase != "prefill")

    def _evict(self, layers: Sequence[int], due: Tensor, budgets: Tensor) -> None:
        """Cut the due rows to their ``budgets`` in one layer, or in several that agree on what stays."""
        evictor, every = self.plans[layers[0]].policy.evictor, bool(due.all())
        rows = slice(None) if every else due.nonzero()[:, 0].to(self.row_keys.device)
        replaces = every and self._replaces(layers[0], budgets)
        views = [self._view(layer, rows, packed=not replaces) for layer in layers]
        importances = evictor.agreed([evictor.importance(view).float() for view in views])
        for layer, view, importance in zip(layers, views, importances, strict=True):
            assert importance.shape == view.positions.shape, (evictor.name, importance.shape)
            self._counts[layer][due], self._since[layer][due] = budgets[due], 0
            if replaces:
                self._replace(layer, view, importance)
            else:
                self._cut(layer, rows, view, importance)
            sinks = self._sinks[layer]
            if sinks:
                sinks.move(self.stores[layer], rows, by=view.seen - budgets[due].to(view.seen.device))

    def _replaces(self, layer: int, budgets: Tensor) -> bool:
        """Whether one entry per head leaves, so that the newest can take its slot."""
        evictor, store = self.plans[layer].policy.evictor, self.stores[layer]
        if evictor.ordered or evictor.shares_heads or isinstance(store, QuantisedStore):
            return False
        return self._full(layer) and bool((budgets + 1 == store.length).all())

    def _full(self, layer: int) -> bool:
        """Whether no head of any row has an empty slot."""
        return bool((self._counts[layer] == self.stores[layer].length).all())

    def _replace(self, layer: int, view: View, importance: Tensor) -> None:
        evictor, pinned = self.plans[layer].policy.evictor, self._pinned(layer, view, slice(None))
        self.stores[layer].replace(only_victim(importance, view.positions, view.seen, evictor, pinned), view.seen)

    def _cut(self, layer: int, rows: Tensor | slice, view: View, importance: Tensor) -> None:
        evictor, pinned = self.plans[layer].policy.evictor, self._pinned(layer, view, rows)
        kept = self.stores[layer].positions >= 0
        kept[rows] = retained(importance, view.positions, view.seen, evictor, pinned)
        self._keep(layer, kept)

    def _keep(self, layer: int, kept: Tensor) -> None:
        """Drop the slots of a layer where ``kept`` [B, H, length] is False; the fullest head sets the width."""
        shared = self.plans[layer].policy.evictor.shares_heads
        width = kept.sum(-1).max() if shared else self._counts[layer].max()
        self.stores[layer].keep(kept, int(width), self._seen_device)

    def _pinned(self, layer: int, view: View, rows: Tensor | slice) -> Tensor | None:
        """Which slots a role pins; none where the model's own window slides, which no pin may narrow."""
        if self._pins is None or self.plans[layer].sliding_window is not None:
            return None
        return self._pins.at(view.positions, rows)

    def _view(self, layer: int, rows: Tensor | slice, *, packed: bool) -> View:
        store, moments, centres = self.stores[layer], self._moments[layer], self._centres[layer]
        if packed and not (self._full(layer) and store.ordered):
            # neighbours in the cache must be neighbours in the view: padding of other rows leaves no gaps
            self._keep(layer, store.positions >= 0)
        keys, values = store.entries(rows)
        nothing = keys.new_zeros(len(keys), keys.shape[1], 0, keys.shape[3])
        absent = self._positions.new_zeros(len(keys), 0)
        return View(
            layer=layer,
            keys=keys,
            values=values,
            positions=store.positions[rows],
            seen=self._seen_device[rows],
            queries=nothing if store.queries is None else store.queries[rows],
            query_positions=absent if store.query_positions is None else store.query_positions[rows],
            mass=keys.new_zeros(keys.shape[:3]) if store.mass is None else store.mass[rows],
            scaling=self._scaling[layer],
            entry_keys=self._entry_keys(store.positions[rows], rows),
            moments=moments.of(rows) if moments else None,
            centres=centres.of(rows) if centres else None,
            sink_logits=self._sink_logits[layer],
        )

    def _entry_keys(self, positions: Tensor, rows: Tensor | slice) -> Tensor:
        """The key of the row that each entry was made for: group members share their prompt's entries."""
        own = self.row_keys[rows][:, None, None]
        if self._shared is None:
            return own
        keys, lengths = (part[rows][:, None, None] for part in self._shared)
        return torch.where(positions < lengths, keys, own)

    def expand(self, group: int, row_keys: Tensor) -> None:
        """Repeat every row ``group`` times, members with keys of their own: they share one prefill."""
        if group == 1:
            return
        shared = (self.row_keys, self.seen.to(self.row_keys.device))
        self._shared = (shared[0].repeat_interleave(group), shared[1].repeat_interleave(group))
        beside = (*self._moments, *self._centres, *self._sinks, self._pins, self._times, self._choices, self.routes)
        for part in (*self.stores, *beside):
            if part is not None:
                part.expand(group)
        self._states = {layer: states.repeated(group) for layer, states in self._states.items()}
        self.row_keys, self.seen = row_keys, self.seen.repeat_interleave(group)
        self._since = [s.repeat_interleave(group) for s in self._since]
        self._counts = [c.repeat_interleave(group) for c in self._counts]
        self.bytes_peak *= group  # per row, what the shared prefill cost stays comparable
        for layer in range(len(self.plans)):
            self._weigh(layer)

    def retention(self) -> Tensor:
        """Kept / seen entries per row, mean over the layers the policy governs: [B] float64."""
        counts = [c for c, p in zip(self._counts, self.plans, strict=True) if p.governed]
        return torch.stack(counts).double().mean(0) / self.seen.clamp(min=1)

    def dense_bytes(self, tokens: int) -> int:
        """Bytes of keys, values and states that one row of ``tokens`` tokens takes in an uncompressed cache."""
        states = sum(states.bytes for states in self._states.values()) // len(self.seen)
        return sum(store.dense_bytes_per_token for store in self.stores) * tokens + states

    def ledger(self, tokens: int) -> Tensor:
        """``evicted_at`` of every row for its first ``tokens`` tokens: int32 [B, L, H, tokens] on CPU."""
        attending = [store for store, plan in zip(self.stores, self.plans, strict=True) if plan.attends]
        heads = sorted({store.evicted_at.shape[1] for store in attending})
        if len(heads) > 1:
            raise RunError(f"the model's layers hold {heads} KV heads, a ledger has one number of them for all")
        rows = []
        for store, plan in zip(self.stores, self.plans, strict=True):
            if not plan.attends:
                rows.append(torch.full((len(self.seen), heads[0], tokens), NEVER, dtype=torch.int32))
                continue
            table = store.evicted_at[:, :, :-1][:, :, :tokens].cpu()
            missing = tokens - table.shape[2]
            rows.append(torch.nn.functional.pad(table, (0, missing), value=NEVER))
        return torch.stack(rows, 1)

    def hints(self) -> list[Tensor]:
        """Per row the codes at a border, packed by ``quantised.hints``; none where nothing is quantised."""
        stores = [(n, store) for n, store in enumerate(self.stores) if isinstance(store, QuantisedStore)]
        rows = []
        for row in range(len(self.seen)):
            found = [store.hints_of(row, layer, len(self.plans)) for layer, store in stores]
            rows.append(pack_hints(*(torch.cat(parts) for parts in zip(*found, strict=True))))
        return rows if stores else []

    def quantised_at(self, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Times of keys and values [B, tokens] int32, where the policy quantises."""
        return self._times.tables(tokens) if self._times else None

    def selections(self) -> list[Selection | None] | None:
        """What every row's queries attended to, where the policy lets them choose."""
        return self._choices.rows(len(self.seen)) if self._choices else None

    def experts(self, tokens: int) -> Tensor | None:
        """Which experts each token was sent to [B, tokens, M, k] int16, where the model has any."""
        return self.routes.table(tokens) if self.routes else None
