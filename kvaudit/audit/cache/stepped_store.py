"""The quantised store in a form for decode steps of fixed shapes: exact entries in ring buffers, codes in place.

``enter_steps`` and ``leave_steps`` convert between this form and that of ``QuantisedStore``, which every other
operation needs. Nothing is evicted from such a store, so every row and head holds an entry for each of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache import decode_kernels
from kvaudit.audit.cache.codes import encode_runs, encode_tokens, pack
from kvaudit.audit.cache.decode_kernels import CodedPart
from kvaudit.audit.cache.hints import HINT_BATCH, HINTED_DTYPES, KEYS, VALUES
from kvaudit.audit.cache.quantised_store import MAX_INT16_GROUPS, PARTS, QuantisedStore
from kvaudit.audit.cache.rows import Counts
from kvaudit.audit.cache.tensors import fusable, gather_columns
from kvaudit.audit.policies import Quantiser


class StepCoding(NamedTuple):
    """Which entries a decode step reads as codes, and which one it quantises.

    ``done`` and ``due_positions`` are each a pair of int64 [B], for keys and for values. Entries at positions below
    ``done`` are codes when the step's queries attend. ``due_positions`` is the position of the entry that this step
    quantises in each row (-1 = none). ``hint`` [1]: the index of this step in ``PendingHints``.
    """

    done: tuple[Tensor, Tensor]
    due_positions: tuple[Tensor, Tensor]
    hint: Tensor


class ExactRing:
    """A ring buffer of unquantised keys or values [B, H, R + 1, D]: position p is in column p % R.

    The last column is never read: it takes what is written for rows without an entry.
    """

    def __init__(self, like: Tensor, size: int) -> None:
        batch, heads, _, width = like.shape
        self.size = size
        self.columns = like.new_zeros(batch, heads, size + 1, width)

    @property
    def entries(self) -> Tensor:
        """All columns of the ring but the last, which is never read: [B, H, R, D]."""
        return self.columns[:, :, : self.size]

    def fill(self, tail: Tensor, positions: Tensor, done: Tensor) -> None:
        """Copy the exact entries of ``tail`` [B, H, T, D] into the ring.

        They are those whose ``positions`` [B, T] are at least ``done`` [B], which counts a row's quantised entries.
        """
        places = torch.where(positions >= done[:, None], positions % self.size, self.size)
        self.columns.scatter_(2, _spread(places, self.columns), tail)

    def write(self, entry: Tensor, positions: Tensor) -> None:
        """Write one entry per row [B, H, 1, D] at ``positions`` [B, 1], -1 = no entry."""
        places = torch.where(positions >= 0, positions % self.size, self.size)
        self.columns.scatter_(2, _spread(places, self.columns), entry)

    def at(self, positions: Tensor) -> Tensor:
        """Return the entries [B, H, n, D] at ``positions`` [B, n]; arbitrary numbers for positions not in the ring."""
        return gather_columns(self.columns, positions.clamp(min=0).long() % self.size)


def _spread(places: Tensor, columns: Tensor) -> Tensor:
    """Expand ring places [B, n] to the index that ``scatter_`` needs to write into ``columns`` [B, H, R + 1, D]."""
    return places.long()[:, None, :, None].expand(-1, columns.shape[1], -1, columns.shape[3])


@fusable
def code_entries(
    codec: Quantiser,
    part: int,
    ring: ExactRing,
    due_positions: Tensor,
    slots: Tensor,
    codes: Tensor,
    parameters: Tensor | None,
    fixed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise one entry per row, that at ``due_positions`` [B] (-1 = none), into slot ``slots`` [B].

    The entries are keys (``part`` 0) or values (1), and are read from ``ring``. Their codes are written into ``codes``
    [B, H, C, W] and their parameters into ``parameters`` [B, H, C, n * P], which is None with ``fixed`` scales [H].
    Returns the exact entries [B, H, 1, D], their codes, and their parameters [B, H, 1, n, P].
    """
    rows = torch.arange(len(slots), device=slots.device)
    exact = codec.turned(ring.columns[rows, :, due_positions.clamp(min=0) % ring.size], part)[:, :, None]
    new, fitted = encode_tokens(exact, codec, fixed)
    is_due = (due_positions >= 0)[:, None, None]
    codes[rows, :, slots] = torch.where(is_due, pack(new, codec.bits)[:, :, 0], codes[rows, :, slots])
    if parameters is not None:
        flat = fitted.flatten(-2)[:, :, 0]
        parameters[rows, :, slots] = torch.where(is_due, flat, parameters[rows, :, slots])
    return exact, new, fitted


class PendingHints:
    """The keys, or the values, of one store that decode steps have quantised and whose rounding hints are not made yet.

    Each entry is kept as it was before quantising, with its code and parameters. For dtypes without hints nothing is
    kept.
    """

    def __init__(self, entry: Tensor, parameters: Sequence[int]) -> None:
        batch, heads, _, width = entry.shape
        self._tensors: tuple[Tensor, ...] = ()
        if entry.dtype in HINTED_DTYPES:
            x = entry.new_zeros(batch, heads, HINT_BATCH, width)
            self._tensors = (x, x.to(torch.uint8), entry.new_zeros(batch, heads, HINT_BATCH, *parameters))

    def write(self, place: Tensor, x: Tensor, codes: Tensor, parameters: Tensor) -> None:
        """Write one entry per row, ``x`` [B, H, 1, D], with its codes and parameters, at index ``place`` [1]."""
        for tensor, new in zip(self._tensors, (x, codes, parameters), strict=False):
            tensor.index_copy_(2, place, new)

    def first(self, count: int) -> tuple[Tensor, ...]:
        """Return copies of the first ``count`` entries, of their codes and parameters; () for dtypes without hints."""
        return tuple(tensor[:, :, :count].clone() for tensor in self._tensors)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors, which a step that is replayed as a CUDA graph writes at fixed addresses."""
        yield from self._tensors


class SteppedStore(QuantisedStore):
    """A ``QuantisedStore`` that can change into a form for decode steps of fixed shapes, and back."""

    _rings: tuple[ExactRing, ExactRing] | None = None
    _pending: tuple[PendingHints, PendingHints] | None = None
    _coding: StepCoding | None = None  # of the current step

    # --- between the two forms ----------------------------------------------------------------------------------------

    @property
    def done(self) -> tuple[Counts, ...]:
        """The number of quantised keys and of quantised values of each row."""
        return self._done

    @property
    def is_aligned(self) -> bool:
        """Whether slot s holds position s, in every row."""
        return self._aligned

    def most_exact(self, seen: list[int]) -> int:
        """Return the largest number of exact (not quantised) entries that a row can have in the next step.

        ``seen`` are the tokens of each row before that step.
        """
        done = zip(*(counts.numbers for counts in self._done), strict=True)
        exact: int = max(count - min(pair) for count, pair in zip(seen, done, strict=True))
        return max(exact, self._codec.residual) + 1

    def enter_steps(self, size: int) -> None:
        """Move exact entries into ring buffers of ``size`` entries, unless they are in large enough ones already."""
        if self._rings is not None and self._rings[0].size >= size:
            return
        self.leave_steps()
        positions = self.positions[:, 0, self._start :]
        self._rings = ExactRing(self._tail[KEYS], size), ExactRing(self._tail[VALUES], size)
        for ring, tail, done in zip(self._rings, self._tail, self._done, strict=True):
            ring.fill(tail, positions, done.to(positions.device))
        groups = [(1, 1) if fixed is not None else (-1, self._numbers) for fixed in self._fixed]
        widths = [tail.shape[3] for tail in self._tail]
        shapes = [
            (width // self._codec.channels(width) if n < 0 else n, numbers)
            for width, (n, numbers) in zip(widths, groups, strict=True)
        ]
        self._pending = PendingHints(self._tail[KEYS], shapes[KEYS]), PendingHints(self._tail[VALUES], shapes[VALUES])
        self._tail, self._start = self._empty_tail, self.length
        self._reserve_table()

    def leave_steps(self) -> bool:
        """Move exact entries from their ring buffers back into the tail; return whether they were in ring buffers."""
        if self._rings is None:
            return False
        positions = self.positions[:, 0]  # [B, length]
        smallest = [min(pair) for pair in zip(*(done.numbers for done in self._done), strict=True)]
        if self._aligned:
            start = min(smallest)
        else:
            first_exact = torch.tensor(smallest, device=positions.device)
            is_exact = (positions >= first_exact[:, None]).any(0)
            start = int(is_exact.int().argmax()) if bool(is_exact.any()) else self.length
        tail = positions[:, start:]
        self._tail, self._start = (self._rings[KEYS].at(tail), self._rings[VALUES].at(tail)), start
        if self._table is not None:
            self._table = self._table[:, :, : self._done[KEYS].largest // self._codec.key_group].clone()
        self._rings = self._pending = self._coding = None
        return True

    def reserve_for_steps(self, slots: int, room: int, *, max_slots: int | None) -> None:
        super().reserve_for_steps(slots, room, max_slots=max_slots)
        self._reserve_table()

    def _reserve_table(self) -> None:
        """Widen the table of the groups' scales, if it is too narrow for the groups of all slots."""
        if self._table is None:
            return
        groups = self.slots // self._codec.key_group + 1
        if groups > MAX_INT16_GROUPS:
            self._slots["key_group"] = self._slots["key_group"].int()
        missing = groups - self._table.shape[2]
        if missing > 0:
            batch, heads, _, width = self._table.shape
            self._table = torch.cat([self._table, self._table.new_zeros(batch, heads, missing, width)], 2)

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, coding: StepCoding) -> None:
        """Set which entries the decode step that begins reads as codes, and which one it quantises."""
        self._coding = coding

    def _write_entries_at(self, slot: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> None:  # noqa: ARG002
        assert self._rings is not None
        self._rings[KEYS].write(key, positions)
        self._rings[VALUES].write(value, positions)

    def _write_by_kernel(self, slot: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> None:
        assert self._rings is not None
        rings, mass = (self._rings[KEYS].entries, self._rings[VALUES].entries), self._slots.get("mass")
        slots = self._slots["positions"]
        decode_kernels.write_entry(rings, slots, (key, value), positions, slot, mass, in_rings=True)

    def coded_parts(self) -> tuple[CodedPart, CodedPart] | None:
        """Return keys and values as the kernels read them; None for codes that they cannot decode."""
        kind = self._codec.code_kind
        if kind is None or not decode_kernels.decodes(kind, self._empty_tail[0].device):
            return None
        assert self._rings is not None
        assert self._coding is not None
        parts = []
        for part, name in enumerate(PARTS):
            codes, parameters = self._slots[f"{name}_codes"], self._slots.get(f"{name}_parameters")
            groups = None
            if part == KEYS and self._table is not None:
                parameters, groups = self._table, self._slots["key_group"]
            elif parameters is None:
                parameters = self._fixed[part]
            assert parameters is not None
            ring, done = self._rings[part].entries, self._coding.done[part]
            run = self._codec.key_group if groups is not None and self._aligned else 0
            parts.append(CodedPart(codes, parameters, ring, done, kind, self._codec.bits, groups, run))
        return parts[KEYS], parts[VALUES]

    @property
    def _groups_are_runs(self) -> bool:
        return self._rings is None and super()._groups_are_runs

    def _with_tail(self, decoded: Tensor, part: int, rows: Tensor | slice) -> Tensor:
        if self._rings is None:
            return super()._with_tail(decoded, part, rows)
        assert self._coding is not None
        positions = self.positions[:, 0]
        is_exact = positions >= self._coding.done[part][:, None]
        return torch.where(is_exact[:, None, :, None], self._rings[part].at(positions), decoded)

    def due_slots(self) -> tuple[Tensor, Tensor]:
        """Return where the entries stand that this step quantises: the slots [B] of the keys and of the values.

        A row in which no entry is due has an arbitrary slot.
        """
        assert self._coding is not None
        positions = self.positions[:, 0]
        keys, values = ((positions == due[:, None]).int().argmax(1) for due in self._coding.due_positions)
        return keys, values

    def code_step(self, slots: tuple[Tensor, Tensor]) -> None:
        """Quantise the entries that are due in this step into ``slots``: those of the keys and those of the values.

        Keys that are quantised in groups of several positions wait for ``end_step``, since a group must be full first.
        """
        assert self._rings is not None
        assert self._coding is not None
        assert self._pending is not None
        for part in (KEYS, VALUES) if self._table is None else (VALUES,):
            codes, parameters = (self._slots.get(f"{PARTS[part]}_{name}") for name in ("codes", "parameters"))
            assert codes is not None
            coded = code_entries(
                self._codec,
                part,
                self._rings[part],
                self._coding.due_positions[part],
                slots[part],
                codes,
                parameters,
                self._fixed[part],
            )
            self._pending[part].write(self._coding.hint, *coded)

    # --- after a step -------------------------------------------------------------------------------------------------

    def end_step(self, newest: int | None, keys_until: Counts, values_until: Counts) -> None:
        """Count the step's new entry, and quantise the groups of keys that are full now.

        ``newest`` is the position of the entry, None if rows differ. Afterwards keys at positions below ``keys_until``
        and values at positions below ``values_until`` are codes.
        """
        self._aligned = self._aligned and newest == self.length
        self.length += 1
        if self._table is not None and keys_until.numbers != self._done[KEYS].numbers:
            self._code_group_keys(self._table, self._done[KEYS], keys_until)
        self._done = (keys_until, values_until)

    def _code_group_keys(self, table: Tensor, done: Counts, until: Counts) -> None:
        """Quantise the keys at positions from ``done`` up to ``until``, which are whole groups of ``key_group`` keys.

        The scales of the group with position p go into row p // ``key_group`` of ``table``.
        """
        assert self._rings is not None
        size, device = self._codec.key_group, table.device
        width = max(end - first for first, end in zip(done.numbers, until.numbers, strict=True))
        positions = done.to(device)[:, None] + torch.arange(width, device=device)  # [B, width]
        exact = self._rings[KEYS].at(positions)
        codes, _, parameters = encode_runs(exact, self._codec)
        packed, rows = pack(codes, self._codec.bits), parameters.detach().transpose(-1, -2).flatten(-2)
        groups = (positions // size)[:, None].expand(-1, exact.shape[1], -1)
        leaves = positions < until.to(device)[:, None]
        if self.records_hints:
            assert self._hints is not None
            is_due, at = (t[:, None].expand(-1, exact.shape[1], -1) for t in (leaves, positions.int()))
            self._hints.add(KEYS, exact, codes, parameters.repeat_interleave(size, 2), is_due, at)
        if self._aligned:  # slots are positions, and all rows code the same ones
            first, end = done.smallest, until.smallest
            self._slots["key_codes"][:, :, first:end] = packed
            self._slots["key_group"][:, :, first:end] = groups
            table[:, :, first // size : end // size] = rows
            return
        slots = (self.positions[:, 0, :, None] == positions[:, None]).int().argmax(1)  # [B, width]
        _write_slots(self._slots["key_codes"], slots, leaves, packed)
        _write_slots(self._slots["key_group"], slots, leaves, groups)
        # for a row that codes nothing, any index into the table will do
        _write_slots(table, groups[:, 0, ::size].clamp(max=table.shape[2] - 1), leaves[:, ::size], rows)

    @property
    def records_hints(self) -> bool:
        """Whether rounding hints (codes of values near the border of two codes) are recorded for this store's dtype."""
        return self._empty_tail[0].dtype in HINTED_DTYPES

    def record_hints(self, part: int, positions: Tensor) -> None:
        """Record the rounding hints of the keys (``part`` 0) or values (1) that the last n steps have quantised.

        Hints are codes of values near the border of two codes. ``positions`` int32 [B, n] are the positions of the
        quantised entries, -1 = none.
        """
        if self._pending is None or (part == KEYS and self._table is not None):
            return
        assert self._hints is not None
        x, codes, parameters = self._pending[part].first(positions.shape[1])
        at_heads = positions[:, None].expand(-1, x.shape[1], -1)
        self._hints.add(part, x, codes, parameters, at_heads >= 0, at_heads, is_copy=True)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        for pending in self._pending or ():
            yield from pending.tensors()

    def _tensors(self) -> Iterator[Tensor]:
        if self._rings is None:
            yield from super()._tensors()
            return
        yield from self._slots.values()
        yield from (ring.columns for ring in self._rings)
        if self._table is not None:
            yield self._table


def _write_slots(tensor: Tensor, slots: Tensor, leaves: Tensor, new: Tensor) -> None:
    """Write ``new`` [B, H, n, ...] into the slots [B, n] of ``tensor`` [B, H, C, ...] where ``leaves`` [B, n] is True.

    ``leaves`` marks the entries that stop being exact because they are quantised now.
    """
    rows = torch.arange(len(slots), device=slots.device)[:, None]
    mask = leaves[:, :, None] if tensor.dim() == 3 else leaves[:, :, None, None]
    old = tensor[rows, :, slots]  # [B, n, H, ...]
    tensor[rows, :, slots] = torch.where(mask, new.transpose(1, 2).to(tensor.dtype), old)
