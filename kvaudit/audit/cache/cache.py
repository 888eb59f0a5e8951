"""The compressing cache: every query attends, then the policy evicts or quantises, and the ledger is written.

Entries keep their rotary positions; the position of the next token is the number of tokens seen. Rows never mix:
padding is never an entry, and when a row is compressed depends on its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall, require_single_call, skip_compile
from kvaudit.audit.cache.cached_layer import CachedLayer, Forward
from kvaudit.audit.cache.tensors import gather_columns
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.layers import LayerRun, States, run_state_layer
from kvaudit.audit.cache.store import peak_live_bytes
from kvaudit.audit.cache.codes import Scratch
from kvaudit.audit.cache.hints import pack_hints
from kvaudit.audit.cache.rows import Layout
from kvaudit.audit.cache.quantised_store import QuantisedStore
from kvaudit.audit.cache.rotary import Rotary, require_rotary_length, rotary_length_limit
from kvaudit.audit.cache.routing import RecordedRoutes
from kvaudit.audit.cache.rows import Pins, RowKeys, QuantisationTimes, join_parts
from kvaudit.audit.cache.rows import Eviction, Schedule, read_new_tokens
from kvaudit.audit.cache.selection import RecordedChoices, Selection
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Policy, Selector, View, evictor_of, quantiser_of, selector_of
from kvaudit.core.errors import RunError


class EvictingCache:
    """A cache for one batch that compresses by ``policy``; pass it to a model's forward as ``kv=``.

    Usage: ``begin(positions, decoding=...)`` with the row positions [B, Q] of the next forward (-1 = padding),
    then the forward itself with ``position_ids=positions.clamp(min=0)``. ``rotary`` is the model's (``rotary_for``),
    where the policy asks for it; ``blocks`` counts its mixture-of-experts blocks (``hooked_blocks``). Raises SpecError
    for a mixture of policies: one is drawn per request.
    """

    def __init__(
        self, config: Any, policy: Policy, row_keys: Tensor, *, rotary: Rotary | None = None, blocks: int = 0
    ) -> None:
        evictor, codec, selector = evictor_of(policy), quantiser_of(policy), selector_of(policy)
        assert rotary or not evictor.needs_rotary, policy.canonical
        self.policy, self._config, self._device = policy, config, row_keys.device
        self._steady = rotary_length_limit(config)  # asked once: a config takes longer to read than a step should wait
        plans = layer_plans(config, policy)
        self._schedules = {plan.evictor: Schedule(plan.evictor, len(row_keys)) for plan in plans}
        scratch, self._layout = Scratch(), Layout(len(row_keys)) if codec and not evictor.evicts else None
        self.layers = [
            CachedLayer(n, plan, self._schedules[plan.evictor], rotary, scratch, self._layout)
            for n, plan in enumerate(plans)
        ]
        # these evict together, after the last of them has attended
        self._agreeing = [layer for layer in self.layers if layer.evictor.across_layers]
        self.seen = torch.zeros(len(row_keys), dtype=torch.int64)  # [B] on CPU: schedules never wait for the device
        self._row_keys = RowKeys(row_keys)
        governed = [plan.evictor for plan in plans if plan.is_governed]
        self._pins = Pins(governed, len(row_keys)) if policy.pinned_roles else None
        self._times = QuantisationTimes(codec, len(row_keys)) if codec else None
        self._choices = RecordedChoices(selector.unit, len(row_keys)) if selector else None
        self.routes = RecordedRoutes(blocks, len(row_keys)) if blocks else None
        self.bytes = self._peak = 0  # allocated for serving; the ledger, which records it, is not among them
        self._peaks = [0] * len(row_keys)  # a row's share of the peak in batches that it was part of before this one

    # --- one forward ------------------------------------------------------------------------------------------------

    def begin(self, positions: Tensor, *, decoding: bool, pinned: Tensor | None = None) -> None:
        """Announce the next forward: CPU row positions [B, Q], -1 for padding, and which tokens a role pins."""
        assert positions.shape[0] == len(self.seen), (positions.shape, len(self.seen))
        arriving, before = read_new_tokens(positions), self.seen.tolist()
        pairs = zip(arriving.first, before, strict=True)
        assert all(first in (-1, seen) for first, seen in pairs), "rows continue at the number of tokens seen"
        seen = [held + new for held, new in zip(before, arriving.new, strict=True)]
        self.seen = torch.tensor(seen)
        longest = max(seen)
        if self._steady is not None and longest > self._steady:
            require_rotary_length(self._config, longest)
        self._attended: set[int] = set()  # layers, so that one that never called is found
        self._carried: set[int] = set()
        self._real = positions >= 0  # [B, Q], in the order of the model's columns
        self._announced = upload(positions.to(torch.int32), self._device)
        if self.routes:
            self.routes.begin(self._announced, longest)
        # no empty slots either, as padding alone leaves them: plain causal attention goes by columns
        starts = not any(before) and not any(layer.store.length for layer in self.layers)
        # only this cache sorts columns: hidden states and routes stay in the model's order
        positions, pinned = self._right_padded(positions, pinned, starts=starts)
        on_device = self._announced if self._order is None else upload(positions.to(torch.int32), self._device)
        coded = None
        for schedule in self._schedules.values():
            schedule.begin(arriving, self.seen, self._device, decoding=decoding)
        if self._choices and decoding:
            self._choices.begin(on_device[:, 0])  # one query per row
        if self._pins and pinned is not None:
            self._pins.add(positions, pinned.cpu())
        if self._layout:
            self._layout.add(positions)
        if self._times:
            self._times.advance(seen, arriving.new)
            coded = self._times.until()  # how many of each row's keys and values are codes from now on
        even = arriving.first[0] if arriving.even else None
        there = upload(self.seen, self._device)
        self._now = Forward(
            on_device,
            decoding,
            there,
            longest,
            starts,
            coded,
            even,
            columns=on_device[:, None],
            # what leaves now was last seen by query ``seen`` - 1
            gone=there.to(torch.int32)[:, None, None],
            real=self._real if self._order is None else positions >= 0,
            all_fed=min(arriving.new) == arriving.width,
        )

    def _right_padded(self, positions: Tensor, pinned: Tensor | None, *, starts: bool) -> tuple[Tensor, Tensor | None]:
        """The same columns with padding last, where that lets the whole be attended to causally; notes their order."""
        self._order: tuple[Tensor, Tensor] | None = None  # there and back [B, Q]
        if not starts or not bool(((positions[:, :-1] < 0) & (positions[:, 1:] >= 0)).any()):
            return positions, pinned
        order = torch.sort((positions < 0).int(), dim=1, stable=True).indices  # stable: real tokens keep their order
        self._order = (upload(order, self._device), upload(order.argsort(1), self._device))
        return positions.gather(1, order), None if pinned is None else pinned.cpu().gather(1, order)

    @property
    def announced(self) -> Tensor:
        """Row positions int32 [B, Q] of the forward under way, on the model's device."""
        return self._announced

    @skip_compile
    def attend(self, call: AttentionCall) -> Tensor:
        """Append, attend, evict, quantise; attention output [B, G*H, Q, D]."""
        require_single_call(call.layer, self._attended, len(self.layers))
        if self._order is None:
            return self._attend(call)
        there, back = self._order
        query, key, value = (gather_columns(part, there) for part in (call.query, call.key, call.value))
        # sorted as the columns were announced, and the output back into the model's order
        return gather_columns(self._attend(call._replace(query=query, key=key, value=value)), back)

    def take(self, call: AttentionCall) -> None:
        """What ``attend`` does to the cache, for a call whose output is known from another one."""
        require_single_call(call.layer, self._attended, len(self.layers))
        assert self._now.starts, "only what is held alike attends alike"
        assert self._order is None  # prompts that are shared are right-padded
        self.layers[call.layer].append(call, self._now)
        self._compress(call)

    def _attend(self, call: AttentionCall) -> Tensor:
        layer, now = self.layers[call.layer], self._now
        layer.append(call, now)
        selector = layer.selector if now.decoding else None
        out = layer.attention(call, now) if selector is None else self._attend_some(layer, selector, call)
        self._compress(call)
        return out

    def _compress(self, call: AttentionCall) -> None:
        """After the queries have attended: remember them, evict and quantise."""
        layer, now = self.layers[call.layer], self._now
        layer.remember(call.query, now)
        self._weigh(layer)
        self._peak = max(self._peak, self.bytes)  # the new entries are in and nothing has left yet
        eviction, layers = layer.schedule.eviction, self._compressing(layer)
        if layers and eviction is not None:
            self._evict(layers, eviction)
        if eviction is not None or now.coded is not None:
            # after the eviction: what leaves now is in no group of codes, as ``coded_keys`` of the replay has it
            for done in layers:
                done.flush(now, on_write=False)
                self._weigh(done)
        self._attended.add(call.layer)

    def _weigh(self, layer: CachedLayer) -> None:
        self.bytes -= layer.bytes
        layer.weigh()
        self.bytes += layer.bytes

    def _attend_some(self, layer: CachedLayer, selector: Selector, call: AttentionCall) -> Tensor:
        """One query per row attends to what it chooses, and the choice is noted."""
        view = layer.view(slice(None), self._now, self._row_keys, packed=False)
        out, units = layer.chosen_attention(call, self._now, selector, view)
        assert self._choices is not None
        self._choices.add(call.layer, units)
        return out

    def _compressing(self, layer: CachedLayer) -> list[CachedLayer]:
        """The layers that compress once this one has attended: itself, or after the last all that agree."""
        if not layer.evictor.across_layers:
            return [layer]
        return self._agreeing if layer is self._agreeing[-1] else []

    def _evict(self, layers: Sequence[CachedLayer], eviction: Eviction) -> None:
        """Cut the due rows to their budgets in one layer, or in several that agree on what stays."""
        if layers[0].replaces(eviction):
            self._replace(layers, eviction)
            return
        # slots are packed anew, so that what the host knew of their order no longer holds
        layers[0].schedule.order = None
        views = [layer.view(eviction.rows, self._now, self._row_keys, packed=True) for layer in layers]
        for layer, view, importance in zip(layers, views, _agreed(layers, views), strict=True):
            layer.evict(eviction, self._now, view, importance, self._pins)

    def _replace(self, layers: Sequence[CachedLayer], eviction: Eviction) -> None:
        """Let the newest entry take the place of the one that leaves, in every head of these layers."""
        schedule, by_position = layers[0].schedule, layers[0].evictor.by_position
        # the host can tell what leaves by positions alone, and need not wait for the device
        if schedule.victims is None and by_position:
            layers[0].learn_order(self._now, self._pins)
            schedule.victims = layers[0].known_victims(self._now, self._pins)
        # found by an earlier layer of this forward, or just now
        if schedule.victims is not None:
            layers[0].replace(schedule.victims, eviction, self._now)
            return
        views = [layer.view(eviction.rows, self._now, self._row_keys, packed=False) for layer in layers]
        for layer, view, importance in zip(layers, views, _agreed(layers, views), strict=True):
            victims = layer.victims(eviction, view, importance, self._pins)
            # then what leaves is the same in every layer: the others take it from here
            if by_position:
                schedule.victims = victims = victims.joined()
            layer.replace(victims, eviction, self._now)

    @skip_compile
    def carry(self, layer: int, hidden: Tensor, run: LayerRun) -> Tensor:
        """Output of a layer that carries a state, moved on by the real tokens: ``run`` over hidden states [B, Q, E]."""
        states = self.layers[layer].states
        assert states is not None, layer
        out = run_state_layer(run, hidden, self._real, states)
        self._note_carried(layer)
        return out

    def take_states(self, layer: int, states: States) -> None:
        """What ``carry`` does to the cache, for a layer whose new states are known from another one."""
        self.layers[layer].states = states.repeated(1)  # a copy: the other cache goes on with its own
        self._note_carried(layer)

    def _note_carried(self, layer: int) -> None:
        self._weigh(self.layers[layer])
        self._carried.add(layer)

    @property
    def is_settled(self) -> bool:
        """Whether every layer has attended, or carried its state on, since the last announcement."""
        plans = [layer.plan for layer in self.layers]
        attending, carrying = sum(plan.has_entries for plan in plans), sum(plan.has_state for plan in plans)
        return len(self._attended) == attending and len(self._carried) == carrying

    @skip_compile
    def settle(self) -> None:
        """After a forward: raise RunError where some layer did not attend through this cache."""
        if not self.is_settled:
            done, every = len(self._attended | self._carried), len(self.layers)
            raise RunError(
                f"{done} of the model's {every} layers attended through the compressed cache; "
                "such a model cannot be served with it"
            )
        if self.routes:
            self.routes.settle()

    def expand(self, group: int, row_keys: Tensor) -> None:
        """Repeat every row ``group`` times, members with keys of their own: they share one prefill."""
        if group > 1:
            self.reindex(torch.arange(len(self.seen)).repeat_interleave(group))
            self._row_keys.part(row_keys, self.seen)

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, by an index [n] on the CPU, in this order, each as often as it is named.

        What the others held is freed. Between two forwards.
        """
        peaks = self.bytes_peaks
        # before rows change: a share is of the batch that made the peak
        self._peaks = [peaks[row] for row in rows.tolist()]
        self.seen = self.seen[rows]
        for schedule in self._schedules.values():
            schedule.reindex(rows)
        there = upload(rows, self._device)
        on_device = (*self.layers, self._row_keys, self._choices, self.routes)
        for part, own in (
            *((part, there) for part in on_device),
            *((part, rows) for part in (self._pins, self._times, self._layout)),
        ):
            if part is not None:
                part.reindex(own)
        # a new peak begins with what these rows take; their share of the last one is in ``_peaks``
        self.bytes = self._peak = sum(layer.bytes for layer in self.layers)

    def join(self, other: EvictingCache) -> None:
        """Hold the rows of another cache too, behind its own: one of the same model and policy, which is used up.

        Between two forwards of both.
        """
        assert other.policy == self.policy, (other.policy.canonical, self.policy.canonical)
        assert self.is_settled
        assert other.is_settled
        self._peaks = self.bytes_peaks + other.bytes_peaks
        self.seen = torch.cat([self.seen, other.seen])
        for evictor, schedule in self._schedules.items():
            schedule.join(other._schedules[evictor])
        # it refers to layers too, which below are to be freed one by one
        other._agreeing.clear()
        for layer in self.layers:
            layer.join(other.layers.pop(0))  # what is joined is freed before the next layer is copied
        self._row_keys.join(other._row_keys)
        pairs = (self._pins, other._pins), (self._times, other._times), (self._choices, other._choices)
        join_parts((*pairs, (self.routes, other.routes), (self._layout, other._layout)))
        self.bytes = self._peak = sum(layer.bytes for layer in self.layers)

    # --- the record -------------------------------------------------------------------------------------------------

    @property
    def bytes_peaks(self) -> list[int]:
        """The most bytes that were each row's share of what its batch had allocated."""
        return [max(before, self._peak // len(self._peaks)) for before in self._peaks]

    def retention(self) -> Tensor:
        """Kept / seen entries per row, mean over the layers the policy governs: [B] float64."""
        # [B] each, mean over heads
        counts = [layer.held.on(self.seen.device) for layer in self.layers if layer.plan.is_governed]
        return torch.stack(counts).double().mean(0) / self.seen.clamp(min=1)

    def dense_bytes(self, tokens: int) -> int:
        """Bytes of keys, values and states that one row of ``tokens`` tokens takes in an uncompressed cache."""
        # of one row: states are as large in every row, and do not grow with it
        states = sum(layer.states.bytes for layer in self.layers if layer.states) // len(self.seen)
        return sum(layer.store.dense_bytes_per_token for layer in self.layers) * tokens + states

    def live_bytes(self, evicted_at: Tensor, coded_at: tuple[Tensor, Tensor] | None, sampled: Tensor) -> int:
        """The most bytes of entries that one decoded row held at once, by its ledger [L, H, T], and its states."""
        states = sum(layer.states.bytes for layer in self.layers if layer.states) // len(self.seen)
        entries = [layer.store.entry_bytes for layer in self.layers]
        return round(peak_live_bytes(evicted_at, entries, coded_at, sampled)) + states

    def ledger(self, tokens: int) -> Tensor:
        """``evicted_at`` of every row for its first ``tokens`` tokens: int32 [B, L, H, tokens] on CPU."""
        heads = sorted({layer.store.evicted_at.shape[1] for layer in self.layers if layer.plan.has_entries})
        if len(heads) > 1:
            raise RunError(f"the model's layers hold {heads} KV heads, a ledger has one number of them for all")
        rows = []
        for layer in self.layers:
            if not layer.plan.has_entries:
                # linear attention holds no entries, so that none leaves
                rows.append(torch.full((len(self.seen), heads[0], tokens), NEVER, dtype=torch.int32))
                continue
            table = layer.store.evicted_at[:, :, :-1][:, :, :tokens].cpu()  # without the column of empty slots
            missing = tokens - table.shape[2]  # the last token drawn, perhaps, which no layer has seen
            rows.append(torch.nn.functional.pad(table, (0, missing), value=NEVER))
        return torch.stack(rows, 1)  # [B, L, H, tokens]

    def hints(self) -> list[Tensor]:
        """Per row the codes at a border, packed by ``quantised.hints``; none where nothing is quantised."""
        stores = [(n, layer.store) for n, layer in enumerate(self.layers) if isinstance(layer.store, QuantisedStore)]
        rows = []
        for row in range(len(self.seen)):
            found = [store.hints_of(row, layer, len(self.layers)) for layer, store in stores]
            rows.append(pack_hints(*(torch.cat(parts) for parts in zip(*found, strict=True))))
        return rows if stores else []

    def quantised_at(self, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Times of keys and values [B, tokens] int32, where the policy quantises."""
        return self._times.tables(tokens) if self._times else None

    def selections(self) -> list[Selection | None] | None:
        """What every row's queries attended to, where the policy lets them choose."""
        return self._choices.rows() if self._choices else None

    def pinned(self) -> list[tuple[tuple[int, int], ...]] | None:
        """Every row's pinned positions as runs, where what heads share depends on them."""
        shares = any(schedule.evictor.shares_heads for schedule in self._schedules.values())
        return self._pins.runs() if self._pins and shares else None

    def experts(self, tokens: int) -> Tensor | None:
        """Which experts each token was sent to [B, tokens, M, k] int16, where the model has any."""
        return self.routes.table(tokens) if self.routes else None


def _agreed(layers: Sequence[CachedLayer], views: Sequence[View]) -> Sequence[Tensor]:
    """The ranks [b, H, K] that layers go by."""
    evictor = layers[0].evictor
    ranks = [evictor.importance(view).float() for view in views]
    for rank, view in zip(ranks, views, strict=True):
        assert rank.shape == view.positions.shape, (evictor.name, rank.shape)
    return evictor.agreed(ranks)
