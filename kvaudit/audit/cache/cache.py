"""The compressing cache: in each forward every query attends, and then the policy evicts or quantises entries.

The ledger records when each entry was evicted. Keys keep the rotary position of their token. The position of the next
token is the number of all tokens seen, including those whose entries were evicted. Rows never mix: padding is never an
entry, and a row's own tokens alone decide when it is compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall, require_single_call, skip_compile
from kvaudit.audit.cache.cached_layer import CachedLayer, Forward
from kvaudit.audit.cache.codes import Scratch
from kvaudit.audit.cache.hints import KEYS, VALUES, pack_hints
from kvaudit.audit.cache.layers import LayerRun, States, layer_plans, run_state_layer
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.quantised_store import QuantisedStore
from kvaudit.audit.cache.rotary import Rotary, require_rotary_length, rotary_length_limit
from kvaudit.audit.cache.routing import RecordedRoutes
from kvaudit.audit.cache.rows import (
    Counts,
    Eviction,
    NewTokens,
    Pins,
    QuantisationClock,
    RowKeys,
    Schedule,
    TailLayout,
    read_new_tokens,
)
from kvaudit.audit.cache.selection import RecordedChoices, Selection
from kvaudit.audit.cache.store import peak_live_bytes
from kvaudit.audit.cache.tensors import gather_columns, upload
from kvaudit.audit.policies import Policy, Selector, View, evictor_of, quantiser_of, selector_of
from kvaudit.core.errors import RunError


class EvictingCache:
    """A cache for one batch that compresses by ``policy``; pass it to a model's forward as ``kv=``.

    Usage: call ``begin(positions, decoding=...)`` with the row positions [B, Q] of the next forward (the number of real
    tokens before each token in its row, -1 = padding), then run the forward with
    ``position_ids=positions.clamp(min=0)``. ``decoding`` is True in a decode step (one token per row). ``row_keys``
    seed the policy's random draws in each row. ``rotary`` is the model's rotary embedding (``find_rotary``), if the
    policy needs it; ``blocks`` is the model's number of mixture-of-experts blocks (``hook_expert_blocks``). Raises
    SpecError for a ``Mixture`` (several policies, one of them drawn for each request): the caller must draw first.
    """

    def __init__(
        self, config: Any, policy: Policy, row_keys: Tensor, *, rotary: Rotary | None = None, blocks: int = 0
    ) -> None:
        evictor, codec, selector, rows = evictor_of(policy), quantiser_of(policy), selector_of(policy), len(row_keys)
        assert rotary or not evictor.needs_rotary, policy.canonical
        self.policy, self._config, self.device = policy, config, row_keys.device
        self.rotary_limit = rotary_length_limit(config)  # read once: reading a config takes longer than a step should
        plans = layer_plans(config, policy)
        self.schedules = {plan.evictor: Schedule(plan.evictor, rows) for plan in plans}
        scratch, self._layout = Scratch(), TailLayout(rows) if codec and not evictor.evicts else None
        self.layers = [
            CachedLayer(n, plan, self.schedules[plan.evictor], rotary, scratch, self._layout)
            for n, plan in enumerate(plans)
        ]
        # these evict together, after the last of them has attended
        self._agreeing = [layer for layer in self.layers if layer.evictor.across_layers]
        self.seen = torch.zeros(rows, dtype=torch.int64)  # [B] tokens, on the CPU: schedules never wait for the device
        self.row_keys = RowKeys(row_keys)
        governed = [plan.evictor for plan in plans if plan.is_governed]
        self.pins = Pins(governed, rows) if policy.pinned_roles else None
        self._times = QuantisationClock(codec, rows) if codec else None
        self.changes = 0  # counts what may have moved or replaced tensors: all but steps of fixed shapes
        # of the steps of fixed shapes whose hints are to be examined: the positions [B] of keys and values that left
        self.coded_steps: list[tuple[list[int], list[int]]] = []
        self._choices = RecordedChoices(selector.unit, rows) if selector else None
        self.routes = RecordedRoutes(blocks, rows) if blocks else None
        self._attended, self._carried = set[int](), set[int]()  # layers that have called in this forward
        self.bytes = self._peak = 0  # allocated, without the ledger
        self._peaks = [0] * rows  # each row's share of the peaks of batches that it was in before

    # --- one forward --------------------------------------------------------------------------------------------------

    def begin(self, positions: Tensor, *, decoding: bool, pinned: Tensor | None = None) -> None:
        """Begin a forward with CPU row positions [B, Q], -1 = padding; ``pinned`` marks tokens never to be evicted."""
        assert positions.shape[0] == len(self.seen), (positions.shape, len(self.seen))
        self._leave_steps()
        tokens = read_new_tokens(positions)
        # a cache that has seen only padding holds empty slots, which plain causal attention would not mask
        is_first = not any(layer.store.length for layer in self.layers) and not bool(self.seen.any())
        longest = self._count(tokens, decoding=decoding)
        self._real = positions >= 0  # [B, Q], in the order of the model's columns
        self.positions = upload(positions.to(torch.int32), self.device)  # [B, Q] of the forward, on the device
        if self.routes:
            self.routes.begin(self.positions, longest)
        # columns are sorted inside this cache only; hidden states and routes keep the model's order
        positions, pinned = self._right_pad(positions, pinned, is_first=is_first)
        on_device = self.positions if self._order is None else upload(positions.to(torch.int32), self.device)
        if self._choices and decoding:
            self._choices.begin(on_device[:, 0])  # one query per row
        if self.pins and pinned is not None:
            self.pins.add(positions, pinned.cpu())
        if self._layout:
            self._layout.add(positions)
        seen_on_device = upload(self.seen, self.device)
        self.forward = Forward(
            on_device,
            decoding,
            seen_on_device,
            longest,
            is_first,
            coded=self._times.counts() if self._times else None,
            first_position=tokens.first[0] if tokens.is_aligned else None,
            positions_by_head=on_device[:, None],
            next_query=seen_on_device.to(torch.int32)[:, None, None],
            real=self._real if self._order is None else positions >= 0,
            no_padding=min(tokens.counts) == tokens.width,
        )

    def _count(self, tokens: NewTokens, *, decoding: bool) -> int:
        """Add the new tokens to each row's count, on the host only; return the token count of the longest row."""
        before = self.seen.tolist()
        pairs = zip(tokens.first, before, strict=True)
        assert all(first in (-1, seen) for first, seen in pairs), "rows continue at the number of tokens seen"
        seen = [count + new for count, new in zip(before, tokens.counts, strict=True)]
        self.seen = torch.tensor(seen)
        longest: int = max(seen)
        if self.rotary_limit is not None and longest > self.rotary_limit:
            require_rotary_length(self._config, longest)
        self._attended, self._carried = set(), set()
        for schedule in self.schedules.values():
            schedule.begin(tokens, self.seen, self.device, decoding=decoding)
        if self._times:
            self._times.advance(seen, tokens.counts)
        return longest

    def _right_pad(self, positions: Tensor, pinned: Tensor | None, *, is_first: bool) -> tuple[Tensor, Tensor | None]:
        """Return positions and pins, after moving padding to the right if the forward ``is_first``.

        Causal attention then needs no other mask. Real tokens keep their order.
        """
        self._order: tuple[Tensor, Tensor] | None = None  # to the sorted columns and back, [B, Q] each
        if not is_first or not bool(((positions[:, :-1] < 0) & (positions[:, 1:] >= 0)).any()):
            return positions, pinned
        order = torch.sort((positions < 0).int(), dim=1, stable=True).indices  # stable: real tokens keep their order
        self._order = (upload(order, self.device), upload(order.argsort(1), self.device))
        return positions.gather(1, order), None if pinned is None else pinned.cpu().gather(1, order)

    @skip_compile
    def attend(self, call: AttentionCall) -> Tensor:
        """Append the new entries, attend, evict and quantise; return the attention output [B, G*H, Q, D]."""
        require_single_call(call.layer, self._attended, len(self.layers))
        if self._order is None:
            return self._attend(call)
        order, inverse = self._order
        query, key, value = (gather_columns(tensor, order) for tensor in (call.query, call.key, call.value))
        return gather_columns(self._attend(call._replace(query=query, key=key, value=value)), inverse)

    def take(self, call: AttentionCall) -> None:
        """Update the cache as ``attend`` does, but do not compute attention: another cache has computed it already."""
        require_single_call(call.layer, self._attended, len(self.layers))
        assert self.forward.is_first, "the output is known only if both caches held the same"
        assert self._order is None  # shared prompts are right-padded
        self.layers[call.layer].append(call, self.forward)
        self._compress(call)

    def _attend(self, call: AttentionCall) -> Tensor:
        layer, forward = self.layers[call.layer], self.forward
        layer.append(call, forward)
        selector = layer.selector if forward.decoding else None
        out = layer.attention(call, forward) if selector is None else self._attend_selected(layer, selector, call)
        self._compress(call)
        return out

    def _attend_selected(self, layer: CachedLayer, selector: Selector, call: AttentionCall) -> Tensor:
        """Return the attention of one query per row over the runs of positions (units) that the policy selects.

        The numbers of the selected units are recorded.
        """
        view = layer.view(slice(None), self.forward, self.row_keys, packed=False)
        out, units = layer.selected_attention(call, self.forward, selector, view)
        assert self._choices is not None
        self._choices.add(call.layer, units)
        return out

    def _compress(self, call: AttentionCall) -> None:
        """Update the policy's statistics of past queries with those of the call, then evict and quantise."""
        layer, forward = self.layers[call.layer], self.forward
        layer.add_queries(call.query, forward)
        self._update_bytes(layer)
        self._peak = max(self._peak, self.bytes)  # the new entries have arrived and none has been evicted
        eviction, layers = layer.schedule.eviction, self.layers_to_compress(layer)
        if layers and eviction is not None:
            self.evict(layers, eviction)
        if eviction is not None or forward.coded is not None:
            # quantise after evicting: evicted entries are in no group of codes, as in the replay (``decoded_keys``)
            for compressed in layers:
                compressed.flush(forward, on_write=False)
                self._update_bytes(compressed)
        self._attended.add(call.layer)

    def begin_step(self, tokens: NewTokens, pinned: Tensor | None) -> int:
        """Count the tokens of a decode step of one token per row; return the token count of the longest row.

        This is done on the host only; ``FixedStep`` computes the step on the device. ``pinned`` bool [B, 1] marks
        tokens that are never evicted.
        """
        longest = self._count(tokens, decoding=True)
        if self.pins and pinned is not None:
            self.pins.add(torch.tensor(tokens.first)[:, None], pinned)
        return longest

    def end_step(self) -> None:
        """Record that every layer has attended, after a ``FixedStep`` computed a decode step instead of ``attend``."""
        self._attended = {n for n, layer in enumerate(self.layers) if layer.plan.has_entries}

    def coded_counts(self) -> tuple[Counts, Counts] | None:
        """Return how many keys and how many values of each row are quantised after this forward.

        These are two ``Counts`` (a number per row); None without a quantiser.
        """
        return self._times.counts() if self._times else None

    def record_hints(self) -> None:
        """Record the rounding hints of the entries that a ``FixedStep`` has quantised.

        Hints are codes of values near the border of two codes.
        """
        if not self.coded_steps:
            return
        steps = torch.tensor(self.coded_steps, dtype=torch.int32)  # [n, 2, B]
        by_part = [upload(steps[:, part].T.contiguous(), self.device) for part in (KEYS, VALUES)]
        for layer in self.layers:
            if layer.stepped is not None:
                for part, positions in enumerate(by_part):
                    layer.stepped.record_hints(part, positions)
        self.coded_steps.clear()

    def _leave_steps(self) -> None:
        """Convert every layer's store back from the form of fixed shapes to its usual form.

        Decode steps that are captured as a CUDA graph and replayed need fixed shapes; all other calls need the usual
        form.
        """
        self.changes += 1
        self.record_hints()
        for layer in self.layers:
            if layer.stepped is not None and layer.stepped.leave_steps() and self._layout:
                self._layout.forget()

    def update_bytes(self) -> None:
        """Recount the allocated bytes of all layers.

        A decode step on tensors of fixed shapes (``FixedStep``) does not count them itself, so this is called after it.
        """
        for layer in self.layers:
            self._update_bytes(layer)
        self._peak = max(self._peak, self.bytes)

    def _update_bytes(self, layer: CachedLayer) -> None:
        self.bytes -= layer.bytes
        layer.update_bytes()
        self.bytes += layer.bytes

    def layers_to_compress(self, layer: CachedLayer) -> list[CachedLayer]:
        """Return the layers to compress after ``layer`` has attended: by default that layer alone.

        If the policy ranks layers together, all of them are returned after the last of them has attended; after each of
        the others the list is empty.
        """
        if not layer.evictor.across_layers:
            return [layer]
        return self._agreeing if layer is self._agreeing[-1] else []

    def evict(self, layers: Sequence[CachedLayer], eviction: Eviction) -> None:
        """Evict entries of the rows that are due, down to their budgets, in one layer or in several ranked together."""
        self.changes += 1
        if layers[0].can_replace(eviction, layers[0].store.length):
            self.replace(layers, eviction, self.forward)
            return
        layers[0].schedule.slot_positions = None  # packing changes the order of slots
        views = [layer.view(eviction.rows, self.forward, self.row_keys, packed=True) for layer in layers]
        for layer, view, importance in zip(layers, views, _rank_together(layers, views), strict=True):
            layer.evict(eviction, self.forward, view, importance, self.pins)

    def replace(
        self, layers: Sequence[CachedLayer], eviction: Eviction, forward: Forward, *, on_device: bool = False
    ) -> None:
        """Evict one entry per head of these layers, and move the newest entry into its slot.

        ``on_device``: choose the entry on the device, so that a GPU can capture and replay the operators; otherwise it
        is chosen on the host if the policy ranks by position alone.
        """
        schedule, by_position = layers[0].schedule, layers[0].evictor.by_position
        # a policy that ranks by position alone can be computed on the host, without waiting for the device
        if schedule.victims is None and by_position and not on_device:
            # a prompt or message of several tokens may exceed the budget by one entry too
            newest = None if forward.first_position is None else forward.longest - 1
            schedule.victims = layers[0].victims_on_host(newest, layers[0].store.length - 1, self.pins)
        if schedule.victims is not None:  # just now, or by an earlier layer of this forward
            layers[0].replace(schedule.victims, eviction, forward)
            return
        views = [layer.view(eviction.rows, forward, self.row_keys, packed=False) for layer in layers]
        for layer, view, importance in zip(layers, views, _rank_together(layers, views), strict=True):
            victims = layer.victims(eviction, view, importance, self.pins)
            if by_position:  # every layer evicts the same entries
                schedule.victims = victims = victims if on_device else victims.simplify()
            layer.replace(victims, eviction, forward)

    @skip_compile
    def carry(self, layer: int, hidden: Tensor, run: LayerRun) -> Tensor:
        """Run a layer of linear attention (``run``) on hidden states [B, Q, E], and return its output.

        The layer's state is kept in the cache for the next call.
        """
        states = self.layers[layer].states
        assert states is not None, layer
        out = run_state_layer(run, hidden, self._real, states)
        self._finish_carry(layer)
        return out

    def take_states(self, layer: int, states: States) -> None:
        """Copy the new recurrent states of a layer from another cache, instead of running the layer (``carry``)."""
        self.layers[layer].states = states.repeat(1)  # a copy: the other cache changes its own
        self._finish_carry(layer)

    def _finish_carry(self, layer: int) -> None:
        self._update_bytes(self.layers[layer])
        self._carried.add(layer)

    @property
    def is_settled(self) -> bool:
        """Whether every layer has attended, or updated its state, since ``begin``."""
        plans = [layer.plan for layer in self.layers]
        with_entries, with_state = sum(plan.has_entries for plan in plans), sum(plan.has_state for plan in plans)
        return len(self._attended) == with_entries and len(self._carried) == with_state

    @skip_compile
    def settle(self) -> None:
        """Check a finished forward: raise RunError if some layer did not use this cache."""
        if not self.is_settled:
            done, layers = len(self._attended | self._carried), len(self.layers)
            raise RunError(
                f"{done} of the model's {layers} layers attended through the compressed cache; "
                "such a model cannot be served with it"
            )
        if self.routes:
            self.routes.settle()

    # --- rows, between two forwards -----------------------------------------------------------------------------------

    def expand(self, group: int, row_keys: Tensor) -> None:
        """Repeat every prefilled row ``group`` times; ``row_keys`` seeds the policy's random draws in each copy."""
        if group > 1:
            self.reindex(torch.arange(len(self.seen)).repeat_interleave(group))
            self.row_keys.set_member_keys(row_keys, self.seen)

    def reindex(self, rows: Tensor) -> None:
        """Keep these rows (an index [n] on the CPU), in this order; a row may occur several times, others are freed."""
        self._leave_steps()
        peaks = self.bytes_peaks
        # before rows change: a row's share is of the batch that made the peak
        self._peaks = [peaks[row] for row in rows.tolist()]
        self.seen = self.seen[rows]
        for schedule in self.schedules.values():
            schedule.reindex(rows)
        rows_on_device = upload(rows, self.device)
        for part in (*self.layers, self.row_keys, self._choices, self.routes):
            if part is not None:
                part.reindex(rows_on_device)
        for host_part in (self.pins, self._times, self._layout):
            if host_part is not None:
                host_part.reindex(rows)
        # a new peak begins with the bytes of these rows; their share of the last one is in ``_peaks``
        self.bytes = self._peak = sum(layer.bytes for layer in self.layers)

    def join(self, other: EvictingCache) -> None:
        """Append the rows of another cache of the same model and policy, which cannot be used afterwards."""
        assert other.policy == self.policy, (other.policy.canonical, self.policy.canonical)
        assert self.is_settled
        assert other.is_settled
        self._leave_steps()
        other._leave_steps()
        self._peaks = self.bytes_peaks + other.bytes_peaks
        self.seen = torch.cat([self.seen, other.seen])
        for evictor, schedule in self.schedules.items():
            schedule.join(other.schedules[evictor])
        # these references would keep layers in memory that are to be freed one by one
        other._agreeing.clear()
        for layer in self.layers:
            layer.join(other.layers.pop(0))  # each is freed before the next is copied
        self.row_keys.join(other.row_keys)
        for name in ("pins", "_times", "_choices", "routes", "_layout"):
            part = getattr(self, name)
            if part is not None:
                part.join(getattr(other, name))
        self.bytes = self._peak = sum(layer.bytes for layer in self.layers)

    # --- the record ---------------------------------------------------------------------------------------------------

    @property
    def bytes_peaks(self) -> list[int]:
        """The peak bytes of each row: the largest (allocated bytes / rows) of any batch that the row was part of."""
        return [max(before, self._peak // len(self._peaks)) for before in self._peaks]

    def retention(self) -> Tensor:
        """Return the share of each row's entries still cached, mean over the layers under the policy: [B] float64."""
        # [B] each, mean over heads
        counts = [layer.counts.to(self.seen.device) for layer in self.layers if layer.plan.is_governed]
        return torch.stack(counts).double().mean(0) / self.seen.clamp(min=1)

    def _state_bytes(self) -> int:
        """Return the bytes of one row's recurrent states (of linear attention), equal in every row and constant."""
        return sum(layer.states.bytes for layer in self.layers if layer.states) // len(self.seen)

    def dense_bytes(self, tokens: int) -> int:
        """Return the bytes of keys, values and states of one row of ``tokens`` tokens in an uncompressed cache."""
        return sum(layer.store.dense_bytes_per_token for layer in self.layers) * tokens + self._state_bytes()

    def live_bytes(self, evicted_at: Tensor, coded_at: tuple[Tensor, Tensor] | None, sampled: Tensor) -> int:
        """Return the peak bytes of one row's entries and recurrent states while decoding.

        ``evicted_at`` [L, H, T] and ``coded_at`` (keys [T], values [T]) say when the entries were evicted and
        quantised; ``sampled`` bool [T] marks the decoded tokens.
        """
        entries = [layer.store.entry_bytes for layer in self.layers]
        return round(peak_live_bytes(evicted_at, entries, coded_at, sampled)) + self._state_bytes()

    def ledger(self, tokens: int) -> Tensor:
        """Return when the entries of each row's first ``tokens`` tokens were evicted: int32 [B, L, H, tokens].

        The tensor is on the CPU. Each number is the position of the first query that no longer saw the entry, NEVER for
        an entry that is still there (see ``Ledger.evicted_at``).
        """
        heads = sorted({layer.store.evicted_at.shape[1] for layer in self.layers if layer.plan.has_entries})
        if len(heads) > 1:
            raise RunError(
                f"the model's layers hold {heads} KV heads, but a ledger needs the same number in all of them"
            )
        tables = []
        for layer in self.layers:
            if not layer.plan.has_entries:
                tables.append(torch.full((len(self.seen), heads[0], tokens), NEVER, dtype=torch.int32))
                continue
            table = layer.store.evicted_at[:, :, :-1][:, :, :tokens].cpu()  # without the column of empty slots
            missing = tokens - table.shape[2]  # the last sampled token may have been fed to no layer
            tables.append(torch.nn.functional.pad(table, (0, missing), value=NEVER))
        return torch.stack(tables, 1)  # [B, L, H, tokens]

    def hints(self) -> list[Tensor]:
        """Return the packed rounding hints of every row (uint16 words); an empty list if nothing is quantised.

        Hints are the recorded codes of values near the border between two codes (see the module ``hints``).
        """
        self.record_hints()
        stores = [(n, layer.store) for n, layer in enumerate(self.layers) if isinstance(layer.store, QuantisedStore)]
        if not stores:
            return []
        rows = []
        for row in range(len(self.seen)):
            hints = [store.hints_of(row, layer, len(self.layers)) for layer, store in stores]
            rows.append(pack_hints(*(torch.cat(tensors) for tensors in zip(*hints, strict=True))))
        return rows

    def quantised_at(self, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Return when each key, and each value, was quantised: int32 [B, tokens] each.

        The time is the position of the first query that reads the entry as a code. None if the policy does not
        quantise.
        """
        return self._times.tables(tokens) if self._times else None

    def selections(self) -> list[Selection | None] | None:
        """Return the keys that each row's queries selected, one record per row; None if the policy does not select."""
        return self._choices.rows() if self._choices else None

    def pinned(self) -> list[tuple[tuple[int, int], ...]] | None:
        """Return each row's pinned (never evicted) positions as runs [start, end).

        None if there are no pins, or if no heads share a budget: then no check of the rollout needs the pins.
        """
        shares = any(schedule.evictor.shares_heads for schedule in self.schedules.values())
        return self.pins.runs() if self.pins and shares else None

    def experts(self, tokens: int) -> Tensor | None:
        """Return the k experts of each token in each of M mixture-of-experts blocks, int16 [B, tokens, M, k].

        None for a model without experts.
        """
        return self.routes.table(tokens) if self.routes else None


def _rank_together(layers: Sequence[CachedLayer], views: Sequence[View]) -> Sequence[Tensor]:
    """Return the importance [b, H, K] by which each layer evicts, as adjusted across layers by ``Evictor.agreed``.

    ``views`` holds, for each layer, what the policy needs to rank that layer's entries.
    """
    evictor = layers[0].evictor
    ranks = [evictor.importance(view).float() for view in views]
    for rank, view in zip(ranks, views, strict=True):
        assert rank.shape == view.positions.shape, (evictor.name, rank.shape)
    return evictor.agreed(ranks)
