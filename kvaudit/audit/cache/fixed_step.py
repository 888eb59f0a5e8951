"""A decode step on tensors of fixed addresses and shapes, which a GPU can capture and replay.

One tensor of numbers holds what differs from step to step: tokens, positions, and the slots to write. A step changes a
layer in one of two ways. Either the layer grows into slots that were allocated beforehand, of which the empty ones are
masked. Or it holds exactly its budget, and the newest entry takes the slot of the entry that the step evicts.
Everything else that a policy does (other evictions, rows that join or leave) happens between two steps, by the
operators of ``EvictingCache``.
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
    """Return the feature of a cache that a decode step of fixed shapes cannot compute; None if there is none.

    It is a noun phrase for a message, such as "models with experts".
    """
    if cache.routes is not None:
        return "models with experts"
    if cache.rotary_limit is not None:
        return "rotary positions that depend on the longest row"
    return next((reason for layer in cache.layers if (reason := layer.blocks_fixed_step)), None)


class FixedStep:
    """The decode steps of a cache with a fixed number of rows; pass it to the model's forward as ``kv=``.

    In each step, first call ``prepare``. It loads the step's numbers and returns a key that stands for all addresses
    and shapes that the step uses. Then call ``run``, or replay a run that was captured under an equal key. Last call
    ``finish``, which updates the counts and evicts.
    """

    routes = None

    def __init__(self, cache: EvictingCache) -> None:
        self._cache, self._rows = cache, len(cache.seen)
        self._schedules = list(cache.schedules.values())
        self._layers_of = {s: [layer for layer in cache.layers if layer.schedule is s] for s in self._schedules}
        self._coded = [layer.stepped for layer in cache.layers if layer.stepped is not None]
        self._ring_size = 0  # exact entries per row that fit into the rings of stores with codes
        self._is_aligned = True  # whether the current key assumes that slots are positions in stores with codes
        counts = [self._rows] * 7 + [len(cache.layers), len(self._schedules), len(self._schedules), 1]
        self._numbers = torch.zeros(sum(counts), dtype=torch.int64, device=cache.device)
        self._ids, self._positions, self._seen, *coding, self._slots, victims, evicted, hint = torch.split(
            self._numbers, counts
        )
        keys_done, values_done, keys_due, values_due = coding
        self._coding = StepCoding((keys_done, values_done), (keys_due, values_due), hint)
        self._until: tuple[Counts, Counts] | None = None  # how many keys and values are codes after the step
        self._victims = {
            schedule: Victims(victims[n : n + 1], evicted[n : n + 1]) for n, schedule in enumerate(self._schedules)
        }
        self._replacing = set[Schedule]()  # those whose newest entry takes an evicted entry's slot within the step
        self._by_position = set[Schedule]()  # those of ``_replacing`` whose evicted slot is known on the host
        self._attended = set[int]()
        self._due_slots: tuple[Tensor, Tensor] | None = None
        self._key: Hashable = None
        self._changes = -1  # the cache's count of changes when the key was made
        self._representatives: list[CachedLayer] = []  # one layer of each set with equal schedule, length and slots
        self._is_new = True  # whether the key differs from that of the last step

    # --- on the host --------------------------------------------------------------------------------------------------

    def prepare(self, tokens: Sequence[int], room: int, pinned: Tensor | None = None) -> Hashable:
        """Count one token per row (-1 = none), load the numbers of the step, and return a key of what the step uses.

        A CUDA graph captured under an equal key can be replayed for this step. ``room`` is the expected number of
        further steps. ``pinned`` bool [B, 1] marks tokens that are never evicted.
        """
        cache, before = self._cache, self._cache.seen.tolist()
        first = tuple(seen if token >= 0 else -1 for token, seen in zip(tokens, before, strict=True))
        new = NewTokens(1, tuple(int(position >= 0) for position in first), first)
        longest = cache.begin_step(new, pinned)
        newest = first[0] if new.is_aligned else None
        # layers of one set stay alike until tensors move, so it is enough to look at one of each set
        has_moved = cache.changes != self._changes
        examined = cache.layers if has_moved else self._representatives
        previous = (self._replacing, self._by_position)
        self._replacing, self._by_position, host_victims = set(), set(), {}
        for schedule in self._schedules:
            if self._can_replace(schedule, examined):
                self._replacing.add(schedule)
                victims = self._victims_on_host(schedule, newest)
                if victims is not None:
                    self._by_position.add(schedule)
                    host_victims[schedule] = victims
        coding, has_changed = self._count_codes(before, has_moved=has_moved)
        lacks_room = any(self._lacks_room(layer, longest) for layer in examined)
        if lacks_room:
            for layer in cache.layers:
                self._reserve(layer, longest, room)
        numbers = [max(token, 0) for token in tokens]
        numbers += first
        numbers += cache.seen.tolist()
        numbers += coding
        numbers += [layer.store.length for layer in cache.layers]
        numbers += [host_victims[schedule][0] if schedule in host_victims else 0 for schedule in self._schedules]
        numbers += [host_victims[schedule][1] if schedule in host_victims else 0 for schedule in self._schedules]
        numbers.append(len(cache.coded_steps))
        # CUDA has read ordinary memory before the call returns
        self._numbers.copy_(torch.tensor(numbers), non_blocking=self._numbers.device.type == "cuda")
        self._newest, self._longest = newest, longest
        self._is_new = False
        if has_moved or has_changed or lacks_room or previous != (self._replacing, self._by_position):
            key = self._describe()
            self._key, self._is_new, self._changes = key, key != self._key, cache.changes
            representatives = {
                (layer.schedule, layer.store.length, layer.store.slots): layer for layer in reversed(cache.layers)
            }
            self._representatives = [*representatives.values()]
        return self._key

    def _count_codes(self, before: list[int], *, has_moved: bool) -> tuple[list[int], bool]:
        """Prepare the stores of layers that quantise for a step of rows that had seen ``before`` tokens.

        Returns the numbers for ``StepCoding`` (which entries the step reads as codes and which it quantises), and
        whether the layout of some store has changed. ``has_moved``: other operations have changed the cache since the
        step before.
        """
        self._until = until = self._cache.coded_counts()
        if until is None:
            return [0] * (4 * self._rows), False
        first = self._coded[0]  # all stores have quantised the same entries
        size = first.most_exact(before)
        enters = has_moved or size > self._ring_size
        # slots stop being positions once a step feeds nothing to some row
        changed, self._is_aligned = first.is_aligned != self._is_aligned, first.is_aligned
        if enters:
            self._ring_size = max(size, self._ring_size)
            for store in self._coded:
                store.enter_steps(self._ring_size)
                store.begin_step(self._coding)
        done, on_write = first.done, first.on_write
        due_positions = [
            [end - 1 if end > start else -1 for start, end in zip(old.numbers, new.numbers, strict=True)]
            for old, new in zip(done, until, strict=True)
        ]
        self._due_positions = (due_positions[0], due_positions[1])
        read = until if on_write else done
        return [*read[0].numbers, *read[1].numbers, *due_positions[0], *due_positions[1]], enters or changed

    def _can_replace(self, schedule: Schedule, examined: Sequence[CachedLayer]) -> bool:
        eviction = schedule.eviction
        if eviction is None or self._cache.pins is not None:
            return False
        layers = [layer for layer in examined if layer.schedule is schedule]
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
        """Return whether a layer's slots (places for entries) or its ledger must grow before the step.

        If the step itself evicts, the layer needs a free slot, and a ledger wide enough to hold the time of the
        eviction. Otherwise the layer needs a free slot, and slots reserved for later steps.
        """
        store = layer.store
        if layer.schedule in self._replacing:
            return store.length >= store.slots or not store.ledger_holds(longest)
        return store.length >= store.slots or not store.is_reserved

    def _reserve(self, layer: CachedLayer, longest: int, room: int) -> None:
        """Reserve slots (places in a layer's tensors) for the new entry and for about ``room`` later ones.

        If each step evicts one entry, later entries take the evicted ones' slots, and only the ledger needs to grow.
        """
        store = layer.store
        if layer.schedule in self._replacing:
            store.reserve_for_steps(store.length + 1, 0, max_slots=None)
            store.reserve_ledger(longest)
        else:
            room = max(min(room, MAX_ROOM), store.length // SHARE, MIN_ROOM)
            store.reserve_for_steps(store.length + 1, room, max_slots=layer.schedule.max_slots)

    def _describe(self) -> Hashable:
        """Return a key of everything that a captured CUDA graph fixes: addresses, shapes, and decisions of the host."""
        parts: list[Hashable] = [self._rows]
        for layer in self._cache.layers:
            store = layer.store
            parts += [store.slots, store.uniform, layer.schedule in self._by_position]
            parts.append(layer.stepped is not None and layer.stepped.is_aligned)
            if layer.schedule in self._replacing:  # no other key has two numbers here, so this tells it too
                parts += [store.length, *_identity(store.evicted_at)]
            for tensor in layer.tensors():
                parts += _identity(tensor)
        for tensor in self._cache.row_keys.tensors():
            parts += _identity(tensor)
        return tuple(parts)

    def finish(self) -> None:
        """Update counts after a step, and evict from layers in which the step has not replaced an entry."""
        cache = self._cache
        for layer in cache.layers:
            if layer.schedule in self._replacing:
                layer.counts = layer.schedule.remaining
                layer.store.ordered = False  # a replay calls no ``Store.replace``; evictions between may have sorted
                continue
            layer.counts = layer.schedule.arrived
            if layer.stepped is None:
                layer.store.length += 1
            elif self._until is not None:
                layer.stepped.end_step(self._newest, *self._until)
        if self._coded and self._coded[0].records_hints:
            cache.coded_steps.append(self._due_positions)
            if len(cache.coded_steps) == HINT_BATCH:
                cache.record_hints()
        if self._is_new:
            cache.update_bytes()
        if self._evict_between():
            cache.update_bytes()
        cache.end_step()

    def _evict_between(self) -> bool:
        """Evict from the layers that are due and whose step replaced no entry; return whether there were any."""
        cache = self._cache
        due = [schedule for schedule in self._schedules if schedule.eviction and schedule not in self._replacing]
        if due:
            # a run does not need this forward, only the evictions here do
            next_query = self._seen.to(torch.int32)[:, None, None]
            cache.forward = self._forward_of(self._positions[:, None].to(torch.int32), next_query, self._longest)
        for schedule in due:
            assert schedule.eviction is not None
            for layer in self._layers_of[schedule]:
                layers = cache.layers_to_compress(layer)
                if layers:
                    cache.evict(layers, schedule.eviction)
        return bool(due)

    # --- on the device ------------------------------------------------------------------------------------------------

    def run(self, forward: ModelForward) -> Tensor:
        """Return the logits [B, V] of the step that ``prepare`` has loaded."""
        layers = self._cache.layers
        lengths = [layer.store.length for layer in layers]
        self._attended.clear()
        self._due_slots = None
        positions = self._positions[:, None].to(torch.int32)  # [B, 1]
        self._forward = self._forward_of(positions, self._seen.to(torch.int32)[:, None, None], 0)
        for schedule in self._by_position:
            schedule.victims = self._victims[schedule]
        for layer in layers:
            # a layer that replaces has one more slot for the newest entry; in others all slots count as in use, and
            # empty ones are masked
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
        """Return the ``Forward`` (what all layers need to know) of a step.

        ``longest`` is the number of tokens of the longest row; it may be 0 if the ledger is long enough already.
        """
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
        """Write the new entries, attend, and replace evicted entries; return the output [B, G*H, 1, D]."""
        cache, forward = self._cache, self._forward
        require_single_call(call.layer, self._attended, len(cache.layers))
        self._attended.add(call.layer)
        layer = cache.layers[call.layer]
        layer.write_at(self._slots[call.layer : call.layer + 1], call, forward)
        store = layer.stepped
        if store is not None and self._due_slots is None:  # the same in all layers with codes
            self._due_slots = store.due_slots()
        if store is not None and self._due_slots is not None and store.on_write:
            store.code_step(self._due_slots)
        out = layer.step_attention(call, forward)
        layer.add_step_queries(call.query, forward)
        if store is not None and self._due_slots is not None and not store.on_write:
            store.code_step(self._due_slots)
        layers, eviction = cache.layers_to_compress(layer), layer.schedule.eviction
        if layers and eviction is not None and layer.schedule in self._replacing:
            cache.replace(layers, eviction, forward, on_device=True)
        return out

    @skip_compile
    def settle(self) -> None:
        """Check a finished forward: raise RunError if some layer did not use this step for its attention."""
        if len(self._attended) < len(self._cache.layers):
            raise RunError(f"{len(self._attended)} of the model's {len(self._cache.layers)} layers attended")


def _identity(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return a tensor's address, shape and dtype; its address alone may be reused by a tensor of another shape."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype
