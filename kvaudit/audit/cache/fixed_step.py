"""A decode step as a function of tensors that keep their addresses and shapes, so that a GPU can capture and replay it.

What differs from step to step stands in one tensor of numbers: tokens, positions, and the slots that are written. A
layer either grows, within slots allocated beforehand, of which empty ones are masked; or it holds exactly its budget,
and the newest entry takes the slot of the one that leaves, in the step itself. Everything else that a policy does
(other evictions, rows that join or leave) happens between two steps, by the operators of ``EvictingCache``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall, require_single_call, skip_compile
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.cached_layer import CachedLayer, Forward
from kvaudit.audit.cache.hints import HINT_BATCH
from kvaudit.audit.cache.rows import Counts, NewTokens, Schedule, Victims
from kvaudit.audit.cache.stepped_store import StepCoding
from kvaudit.core.errors import RunError

# a growing layer gets room for the steps that are expected, up to MAX_ROOM; at least an eighth of its slots or MIN_ROOM
MAX_ROOM, SHARE, MIN_ROOM = 256, 8, 64
# (input ids [B, 1], position ids [B, 1], the step) -> logits [B, V]
ModelForward = Callable[[Tensor, Tensor, "FixedStep"], Tensor]


def why_not_fixed(cache: EvictingCache) -> str | None:
    """Return what of a cache no step of fixed shapes can compute, as the end of a sentence; None if one can."""
    if cache.routes is not None:
        return "models with experts"
    if cache.rotary_limit is not None:
        return "rotary positions that depend on the longest row"
    return next((reason for layer in cache.layers if (reason := layer.blocks_fixed_step)), None)


class FixedStep:
    """The steps of a cache with a fixed number of rows; pass it to the model's forward as ``kv=``.

    Usage: ``prepare`` counts a step on the host and returns a key; ``run``, or the replay of a run that was captured
    under an equal key, computes it; ``finish`` does what remains. A key names every address and shape that a run uses.
    """

    routes = None

    def __init__(self, cache: EvictingCache) -> None:
        self._cache, self._rows = cache, len(cache.seen)
        self._schedules = list(cache.schedules.values())
        self._layers_of = {s: [layer for layer in cache.layers if layer.schedule is s] for s in self._schedules}
        self._coded = [layer.stepped for layer in cache.layers if layer.stepped is not None]
        self._ring_size = 0  # exact entries of a row for which they have room
        self._is_aligned = True  # slots are positions in stores with codes, as far as the key says
        counts = [self._rows] * 7 + [len(cache.layers), len(self._schedules), len(self._schedules), 1]
        self._numbers = torch.zeros(sum(counts), dtype=torch.int64, device=cache.device)
        self._ids, self._positions, self._seen, *coding, self._slots, victims, left, hint = torch.split(
            self._numbers, counts
        )
        keys_done, values_done, keys_leaving, values_leaving = coding
        self._coding = StepCoding((keys_done, values_done), (keys_leaving, values_leaving), hint)
        self._until: tuple[Counts, Counts] | None = None  # how many keys and values are codes after the step
        self._victims = {
            schedule: Victims(victims[n : n + 1], left[n : n + 1]) for n, schedule in enumerate(self._schedules)
        }
        self._replacing = set[Schedule]()  # the newest entry takes a slot within the step
        self._by_position = set[Schedule]()  # of these, where the host knows which one
        self._attended = set[int]()
        self._leaving_slots: tuple[Tensor, Tensor] | None = None
        self._key: Hashable = None
        self._changes = -1  # of the cache, when the key was made
        self._first_alike: list[CachedLayer] = []  # of each set of layers with one schedule and as many slots
        self._is_new = True  # the key of this step is not that of the one before

    # --- on the host --------------------------------------------------------------------------------------------------

    def prepare(self, tokens: Sequence[int], room: int, pinned: Tensor | None = None) -> Hashable:
        """Count one token per row (-1 = none), and load the numbers of the step; return the key of its run.

        About ``room`` more steps are expected. ``pinned`` bool [B, 1] marks tokens that never leave.
        """
        cache, before = self._cache, self._cache.seen.tolist()
        first = tuple(seen if token >= 0 else -1 for token, seen in zip(tokens, before, strict=True))
        new = NewTokens(1, tuple(int(position >= 0) for position in first), first)
        longest = cache.begin_step(new, pinned)
        newest = first[0] if new.is_aligned else None
        # layers that have been alike stay so while nothing has moved, and one of them tells of all
        has_moved = cache.changes != self._changes
        looked_at = cache.layers if has_moved else self._first_alike
        did = (self._replacing, self._by_position)
        self._replacing, self._by_position, left = set(), set(), {}
        for schedule in self._schedules:
            if self._can_replace(schedule, looked_at):
                self._replacing.add(schedule)
                victims = self._victims_on_host(schedule, newest)
                if victims is not None:
                    self._by_position.add(schedule)
                    left[schedule] = victims
        coding, has_changed = self._count_codes(before, has_moved=has_moved)
        lacks_room = any(self._lacks_room(layer, longest) for layer in looked_at)
        if lacks_room:
            for layer in cache.layers:
                self._reserve(layer, longest, room)
        numbers = [max(token, 0) for token in tokens]
        numbers += first
        numbers += cache.seen.tolist()
        numbers += coding
        numbers += [layer.store.length for layer in cache.layers]
        numbers += [left[schedule][0] if schedule in left else 0 for schedule in self._schedules]
        numbers += [left[schedule][1] if schedule in left else 0 for schedule in self._schedules]
        numbers.append(len(cache.coded_steps))
        # CUDA has read ordinary memory before the call returns
        self._numbers.copy_(torch.tensor(numbers), non_blocking=self._numbers.device.type == "cuda")
        self._newest, self._longest = newest, longest
        self._is_new = False
        if has_moved or has_changed or lacks_room or did != (self._replacing, self._by_position):
            key = self._describe()
            self._key, self._is_new, self._changes = key, key != self._key, cache.changes
            alike = {(layer.schedule, layer.store.length, layer.store.slots): layer for layer in reversed(cache.layers)}
            self._first_alike = [*alike.values()]
        return self._key

    def _count_codes(self, before: list[int], *, has_moved: bool) -> tuple[list[int], bool]:
        """Bring stores with codes into form, for rows that had seen ``before`` tokens.

        Returns the numbers of ``StepCoding``, and whether the form of some store has changed.
        """
        self._until = until = self._cache.coded_counts()
        if until is None:
            return [0] * (4 * self._rows), False
        first = self._coded[0]  # all have coded as much
        size = first.most_exact(before)
        enters = has_moved or size > self._ring_size
        # a row that was fed nothing has lost step with its slots
        changed, self._is_aligned = first.is_aligned != self._is_aligned, first.is_aligned
        if enters:
            self._ring_size = max(size, self._ring_size)
            for store in self._coded:
                store.enter_steps(self._ring_size)
                store.begin_step(self._coding)
        done, on_write = first.done, first.on_write
        leaving = [
            [end - 1 if end > start else -1 for start, end in zip(old.numbers, new.numbers, strict=True)]
            for old, new in zip(done, until, strict=True)
        ]
        self._leaving = (leaving[0], leaving[1])
        read = until if on_write else done
        return [*read[0].numbers, *read[1].numbers, *leaving[0], *leaving[1]], enters or changed

    def _can_replace(self, schedule: Schedule, looked_at: Sequence[CachedLayer]) -> bool:
        eviction = schedule.eviction
        if eviction is None or self._cache.pins is not None:
            return False
        layers = [layer for layer in looked_at if layer.schedule is schedule]
        return all(not layer.moves_sinks and layer.can_replace(eviction, layer.store.length + 1) for layer in layers)

    def _victims_on_host(self, schedule: Schedule, newest: int | None) -> tuple[int, int] | None:
        if not schedule.evictor.by_position:
            return None
        layer = self._layers_of[schedule][0]
        victims = layer.victims_on_host(newest, layer.store.length, self._cache.pins)
        if victims is None:
            return None
        assert isinstance(victims.slots, int)
        assert isinstance(victims.positions, int)
        return victims.slots, victims.positions

    def _lacks_room(self, layer: CachedLayer, longest: int) -> bool:
        """Whether a layer has no slot for the new entry, or no place in its ledger for one that leaves."""
        store = layer.store
        if layer.schedule in self._replacing:
            return store.length >= store.slots or not store.ledger_holds(longest)
        return store.length >= store.slots or not store.is_reserved

    def _reserve(self, layer: CachedLayer, longest: int, room: int) -> None:
        """Make room for the new entry, and for more of them."""
        store = layer.store
        if layer.schedule in self._replacing:
            store.reserve_for_steps(store.length + 1, 0, max_slots=None)
            store.reserve_ledger(longest)
        else:
            room = max(min(room, MAX_ROOM), store.length // SHARE, MIN_ROOM)
            store.reserve_for_steps(store.length + 1, room, max_slots=layer.schedule.max_slots)

    def _describe(self) -> Hashable:
        """Return a key of everything that a run bakes in: addresses, shapes, and what it does on the host."""
        parts: list[Hashable] = [self._rows]
        for layer in self._cache.layers:
            store, replaces = layer.store, layer.schedule in self._replacing
            parts += [store.slots, store.uniform, replaces, layer.schedule in self._by_position]
            parts.append(layer.stepped is not None and layer.stepped.is_aligned)
            if replaces:
                parts += [store.length, *_place(store.evicted_at)]
            for tensor in layer.tensors():
                parts += _place(tensor)
        for tensor in self._cache.row_keys.tensors():
            parts += _place(tensor)
        return tuple(parts)

    def finish(self) -> None:
        """Count what the step did, and evict where that was not part of it."""
        cache = self._cache
        for layer in cache.layers:
            if layer.schedule in self._replacing:
                layer.counts = layer.schedule.remaining
                layer.store.ordered = layer.store.uniform = False
                continue
            layer.counts = layer.schedule.arrived
            if layer.stepped is None:
                layer.store.length += 1
            elif self._until is not None:
                layer.stepped.end_step(self._newest, *self._until)
        if self._coded and self._coded[0].records_hints:
            cache.coded_steps.append(self._leaving)
            if len(cache.coded_steps) == HINT_BATCH:
                cache.record_hints()
        if self._is_new:
            cache.update_bytes()
        if self._evict_between():
            cache.update_bytes()
        cache.end_step()

    def _evict_between(self) -> bool:
        """Evict from layers whose newest entry did not take the slot of another; return whether any did."""
        cache = self._cache
        due = [schedule for schedule in self._schedules if schedule.eviction and schedule not in self._replacing]
        if due:
            # made for this alone: the run has no need of it
            next_query = self._seen.to(torch.int32)[:, None, None]
            cache.forward = self._forward_of(self._positions[:, None].to(torch.int32), next_query, self._longest)
        for schedule in due:
            assert schedule.eviction is not None
            for layer in self._layers_of[schedule]:
                layers = cache.compressing(layer)
                if layers:
                    cache.evict(layers, schedule.eviction)
        return bool(due)

    # --- on the device ------------------------------------------------------------------------------------------------

    def run(self, forward: ModelForward) -> Tensor:
        """Return the logits [B, V] of the step, whose numbers are read from one tensor."""
        layers = self._cache.layers
        lengths = [layer.store.length for layer in layers]
        self._attended.clear()
        self._leaving_slots = None
        positions = self._positions[:, None].to(torch.int32)  # [B, 1]
        self._forward = self._forward_of(positions, self._seen.to(torch.int32)[:, None, None], 0)
        for schedule in self._by_position:
            schedule.victims = self._victims[schedule]
        for layer in layers:
            # a layer that holds its budget has just room for the newest; else all slots count as in use, and empty
            # ones are masked
            replaces = layer.schedule in self._replacing
            layer.store.length = layer.store.length + 1 if replaces else layer.store.slots
        try:
            return forward(self._ids[:, None], self._positions.clamp(min=0)[:, None], self)
        finally:
            for layer, length in zip(layers, lengths, strict=True):
                layer.store.length = length
            for schedule in self._schedules:
                schedule.victims = None

    def _forward_of(self, positions: Tensor, next_query: Tensor, longest: int) -> Forward:
        """Return the forward as layers need it; ``longest`` 0: the ledger is wide enough."""
        return Forward(
            positions,
            True,
            self._seen,
            longest,
            False,
            coded=None,
            first_position=self._newest if longest else None,
            positions_by_head=positions[:, None],
            next_query=next_query,
            real=torch.empty(0),
            no_padding=False,
        )

    @skip_compile
    def attend(self, call: AttentionCall) -> Tensor:
        """Write the new entries, attend, and let them take the slots of those that leave: [B, G*H, 1, D]."""
        cache, forward = self._cache, self._forward
        require_single_call(call.layer, self._attended, len(cache.layers))
        self._attended.add(call.layer)
        layer = cache.layers[call.layer]
        layer.write_at(self._slots[call.layer : call.layer + 1], call, forward)
        store = layer.stepped
        if store is not None and self._leaving_slots is None:  # the same in all layers with codes
            self._leaving_slots = store.leaving_slots()
        if store is not None and self._leaving_slots is not None and store.on_write:
            store.code_step(self._leaving_slots)
        out = layer.step_attention(call, forward)
        layer.add_step_queries(call.query, forward)
        if store is not None and self._leaving_slots is not None and not store.on_write:
            store.code_step(self._leaving_slots)
        layers, eviction = cache.compressing(layer), layer.schedule.eviction
        if layers and eviction is not None and layer.schedule in self._replacing:
            cache.replace(layers, eviction, forward, on_device=True)
        return out

    @skip_compile
    def settle(self) -> None:
        """Raise RunError if some layer did not attend through this step."""
        if len(self._attended) < len(self._cache.layers):
            raise RunError(f"{len(self._attended)} of the model's {len(self._cache.layers)} layers attended")


def _place(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return address, shape and dtype: memory that was freed may hold a tensor of another shape."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype
