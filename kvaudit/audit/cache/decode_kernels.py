"""Triton kernels of one decode step: attention over exact and quantised entries, and writing the new entry.

The host reads nothing from the device, so all of this can be captured in a CUDA graph. The slots of a KV head are split
among several programs, since a step has too few heads to fill a GPU ("flash decoding"); a second kernel merges their
sums. Logits are in base 2, whose powers a GPU computes directly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.core.text import note_once

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:  # the kernels are then never called: see ``is_available``
    triton = tl = None  # type: ignore[assignment, unused-ignore]

# the fastest values of a sweep on an H200 (_CODED_STAGES was not part of it)
_PROGRAMS = 4  # programs per multiprocessor that a step of long contexts is split into
_LEAST_SLOTS = 128  # slots that a program reads at least
_MULTIPROCESSORS = 132  # assumed for the interpreter, which has none
_EXACT_TILE, _CODED_TILE = 64, 32  # slots that a program reads together
_TOKEN_BYTES = 256  # tiles have fewer slots if an entry has more bytes than this
_EXACT_STAGES, _CODED_STAGES = 2, 3  # tiles in flight: read ahead while others are multiplied
_WARPS = 2  # per program, for numbers of two bytes; twice as many for numbers of four
_SCAN = 512  # slots that a program searches together for exact entries
_LEAST_ROWS = 16  # rows, columns and depth of the smallest product of a tensor core
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_refused = set[tuple[torch.dtype, int]]()  # dtypes and head sizes for which the kernels failed
PER_HEAD, BY_TABLE = 0, -1  # values of ``Layout.groups`` that are no number of groups


class CodedPart(NamedTuple):
    """The keys or the values of a layer, of which the entries at positions below ``done`` [B] are read from codes.

    ``codes`` uint8 [B, H, C, D * bits / 8], as ``pack`` makes them. ``parameters``, in the model's dtype, have one of
    three forms: per token [B, H, C, n * P], for n groups of D / n channels; a table [B, H, G, P * D], in which
    ``groups`` [B, H, C] is the row of each slot (-1 = none yet); or one fixed scale per head [H]. P is 2 (scale and
    zero) for codes of kind "unsigned", otherwise 1 (scale). ``ring`` [B, H, R, D] holds the exact (unquantised)
    entries: the entry at position p has index p % R. ``kind`` is "int8", "e4m3" (see ``decodes``), "e5m2", "unsigned"
    or "q4" (code 8 stands for 0). ``run`` > 0 promises that slot s holds position s and uses row s // run of the table,
    which is read faster.
    """

    codes: Tensor
    parameters: Tensor
    ring: Tensor
    done: Tensor
    kind: str
    bits: int
    groups: Tensor | None = None
    run: int = 0


class Layout(NamedTuple):
    """The layout of keys or values, a compile-time constant of the kernels.

    ``size``: channels of a head; ``padded``: the next power of two. ``groups``: groups of channels per token with their
    own parameters; PER_HEAD: one fixed scale per head; BY_TABLE: keys quantised per channel, whose parameters are in a
    table. ``width``: channels of such a group if it is a power of two, otherwise 1. ``ring``: slots of the ring buffer
    of the newest entries, which are still exact. ``run``: consecutive slots that share a row of the table; 0 if neither
    of a run and a kernel's tile is a multiple of the other. ``rows``: rows of the table per tile.
    """

    kind: str
    bits: int
    size: int
    padded: int
    groups: int = 0
    width: int = 1
    ring: int = 1
    run: int = 0
    rows: int = 0


class Shape(NamedTuple):
    """The shape of a step, a compile-time constant of the kernels.

    ``heads``: KV heads; ``group``: query heads of each, padded to ``rows`` for matrix products. ``tile``: slots read
    together; ``stages``: tiles in flight (software pipelining). ``scan``: slots searched together for exact entries.
    ``window``: positions that a query of sliding attention sees, 0 = all.
    """

    heads: int
    group: int
    rows: int
    tile: int
    stages: int
    scan: int
    window: int


class Operand(NamedTuple):
    """The keys or the values as a kernel takes them: their tensors, the strides of these, and the layout.

    The tensors are the entries, or codes with parameters, groups, ring and ``done`` (see ``CodedPart``).
    """

    tensors: tuple[Any, ...]
    strides: tuple[int, ...]
    layout: Layout


def is_available(device: torch.device) -> bool:
    """Return whether the kernels run on ``device``: triton is installed, and works on a GPU or as interpreter."""
    interprets = os.environ.get("TRITON_INTERPRET", "0") == "1"
    return triton is not None and (device.type == "cuda" or interprets)


def is_used(x: Tensor) -> bool:
    """Return whether the kernels are used for heads of the dtype and size of ``x`` [B, H, 1, D]; never in float64."""
    kind = (x.dtype, x.shape[-1])
    return x.dtype in _DTYPES and kind not in _refused and is_available(x.device)


def disable_for(x: Tensor, error: Exception) -> None:
    """Stop using the kernels for heads of the dtype and size of ``x``, because of ``error``, and print a note."""
    _refused.add((x.dtype, x.shape[-1]))
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    note_once(f"heads of {x.shape[-1]} channels in {x.dtype} are attended without triton kernels ({line}); slower")


def decodes(kind: str, device: torch.device) -> bool:
    """Return whether ``attend_codes`` can decode codes of ``kind`` on ``device``.

    On a GPU e4m3 needs compute capability 8.9; every other kind can be decoded anywhere.
    """
    return kind != "e4m3" or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def attend_slots(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    query_positions: Tensor,
    scaling: float,
    sink_logits: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the attention [B, G*H, Dv] of one query per row over the slots that it sees, 0 if it sees none.

    query [B, G*H, D], keys [B, H, C, D], values [B, H, C, Dv], positions int32 [B, H or 1, C] (-1 = empty slot),
    query_positions [B] (-1 = no query), sink_logits [G*H]. A query at position q sees positions 0 .. q, or only the
    last ``window`` of them. What unseen slots hold does not matter, not even NaN. All strides but that of the last
    dimension are free. As with all functions here, the first call compiles the kernel, so call it once before capturing
    a CUDA graph.
    """
    parts = (_exact_operand(keys), _exact_operand(values))
    return _attend(query, parts, positions, query_positions, scaling, sink_logits, window)


def attend_codes(
    query: Tensor,
    keys: CodedPart,
    values: CodedPart,
    positions: Tensor,
    query_positions: Tensor,
    scaling: float,
    sink_logits: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the attention of one query per row over a cache in which some keys and values are quantised codes.

    All other arguments and the result are those of ``attend_slots``. A code is decoded in float32 and rounded to the
    dtype of ``query``, as ``decode_tokens`` and ``decode_keys`` do.
    """
    parts = (_coded_operand(keys), _coded_operand(values))
    return _attend(query, parts, positions, query_positions, scaling, sink_logits, window)


def write_entry(
    parts: tuple[Tensor, Tensor],
    positions: Tensor,
    entry: tuple[Tensor, Tensor],
    query_positions: Tensor,
    slot: Tensor,
    mass: Tensor | None = None,
    *,
    in_rings: bool = False,
) -> None:
    """Write the entry of a step, key [B, H, 1, D] and value [B, H, 1, Dv], into slot ``slot`` int64 [1] of every head.

    The key and the value go into ``parts``: keys [B, H, C, D] and values [B, H, C, Dv]. ``positions`` int32 [B, H, C]
    gets each row's position ``query_positions`` [B] (-1: the slot stays empty in that row), and ``mass`` float32 [B, H,
    C] gets 0. If ``in_rings``, the parts are ring buffers [B, H, R, D], and key and value go to index query position %
    R; then nothing is written into them for a row without a query.
    """
    batch, heads = positions.shape[:2]
    entry = (_with_unit_stride(entry[0]), _with_unit_stride(entry[1]))
    sizes = tuple(part.shape[3] for part in parts)
    with _on(slot.device):
        _write_kernel[batch * heads,](
            parts,
            tuple(part.stride()[:3] for part in parts),
            positions,
            positions.stride()[:2],
            mass,
            (0, 0) if mass is None else mass.stride()[:2],
            entry,
            tuple(part.stride()[:2] for part in entry),
            query_positions.contiguous(),
            slot,
            HEADS=heads,
            SIZES=sizes,
            PADDED=tuple(_power_of_two(size) for size in sizes),
            PLACES=tuple(part.shape[2] if in_rings else 0 for part in parts),
            num_warps=1,
        )


# --- launching --------------------------------------------------------------------------------------------------------


def _attend(
    query: Tensor,
    parts: tuple[Operand, Operand],
    positions: Tensor,
    query_positions: Tensor,
    scaling: float,
    sink_logits: Tensor | None,
    window: int | None,
) -> Tensor:
    keys, values = parts
    batch, query_heads, _ = query.shape
    heads, slots = keys.tensors[0].shape[1:3]
    group, size = query_heads // heads, values.layout.size
    token_bytes = max(keys.layout.padded, values.layout.padded) * query.element_size()
    is_exact = keys.layout.kind == "exact"
    tile, stages = (_EXACT_TILE, _EXACT_STAGES) if is_exact else (_CODED_TILE, _CODED_STAGES)
    tile = max(_LEAST_ROWS, tile * _TOKEN_BYTES // max(_TOKEN_BYTES, token_bytes))
    programs = _split_count(batch * heads, slots, query.device)
    split_slots = triton.cdiv(triton.cdiv(slots, tile), programs) * tile
    splits = triton.cdiv(slots, split_slots)
    query, positions = _with_unit_stride(query), positions.expand(batch, heads, slots)
    out = query.new_empty(batch, query_heads, size)
    merges = splits > 1 or sink_logits is not None
    partials: tuple[Tensor | None, ...] = (out, None, None)
    if merges:
        sums = query.new_empty(batch, query_heads, splits, size, dtype=torch.float32)
        partials = (sums, *query.new_empty(2, batch, query_heads, splits, dtype=torch.float32))
    # the rows that a tensor core takes at least; float32 is multiplied without tensor cores
    rows = max(1 if query.dtype == torch.float32 else _LEAST_ROWS, _power_of_two(group))
    shape = Shape(heads, group, rows, tile, stages, _SCAN, window or 0)
    warps = _WARPS * query.element_size() // 2
    with _on(query.device):
        _attend_kernel[batch * heads, splits](
            (query, positions, query_positions.contiguous()),
            (*query.stride()[:2], *positions.stride()[:2]),
            *keys[:2],
            *values[:2],
            partials,
            scaling / math.log(2),
            slots,
            split_slots,
            SHAPE=shape,
            KEYS=_with_rows(keys.layout, tile),
            VALUES=_with_rows(values.layout, tile),
            num_warps=warps,
        )
        if merges:
            _merge_kernel[batch * query_heads,](
                partials,
                sink_logits,
                out,
                splits,
                query_heads,
                size,
                values.layout.padded,
                _LEAST_ROWS,
                num_warps=warps,
            )
    return out


def _exact_operand(entries: Tensor) -> Operand:
    size = entries.shape[3]
    layout = Layout("exact", 8 * entries.element_size(), size, _padded(size))
    return Operand((entries, None, None, None, None), (*entries.stride()[:3], *(0,) * 8), layout)


def _coded_operand(part: CodedPart) -> Operand:
    codes, parameters, ring, done, kind, bits, groups, run = part
    size, count, width = ring.shape[3], PER_HEAD, 1
    strides: tuple[int, ...] = (0,) * 5  # of parameters and groups
    if groups is not None:
        count, strides = BY_TABLE, (*parameters.stride()[:3], *groups.stride()[:2])
    elif parameters.dim() > 1:
        count, strides = parameters.shape[3] // (2 if kind == "unsigned" else 1), (*parameters.stride()[:3], 0, 0)
        width = _padded(size) if count == 1 else size // count
        width = width if width == _power_of_two(width) else 1
    layout = Layout(kind, bits, size, _padded(size), count, width, ring.shape[2], run)
    strides = (*codes.stride()[:3], *strides, *ring.stride()[:3])
    return Operand((codes, parameters, groups, ring, done.contiguous()), strides, layout)


def _with_rows(layout: Layout, tile: int) -> Layout:
    """Return ``layout`` with ``rows`` set to how many rows of the table of scales one tile of slots uses.

    A tile is ``tile`` slots that are read together, a run is slots that share a row of the table. If there is no table,
    or if neither of tile and run is a multiple of the other, ``run`` is set to 0 instead.
    """
    run = layout.run
    if layout.groups != BY_TABLE or run == 0 or max(run, tile) % min(run, tile):
        return layout._replace(run=0)
    return layout._replace(rows=max(1, tile // run))


def _padded(size: int) -> int:
    return max(_LEAST_ROWS, _power_of_two(size))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _on(device: torch.device) -> torch.cuda.device:
    """Return a context that launches kernels on ``device``; it does nothing for a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _split_count(rows: int, slots: int, device: torch.device) -> int:
    """Return the number of programs that share the slots of one head; ``rows`` is the number of rows times KV heads."""
    return max(1, min(_PROGRAMS * _multiprocessors(device) // rows, slots // _LEAST_SLOTS))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _MULTIPROCESSORS


# --- kernels ----------------------------------------------------------------------------------------------------------


def _jit(*not_specialized: str) -> Callable[[Callable[..., Any]], Any]:
    """Return triton's JIT decorator; new values of the arguments ``not_specialized`` cause no recompilation."""

    def decorate(kernel: Callable[..., Any]) -> Any:
        return kernel if triton is None else triton.jit(kernel, do_not_specialize=not_specialized)

    return decorate


@_jit("slots", "split_slots")
def _attend_kernel(
    step: tl.tuple,
    step_strides: tl.tuple,
    keys: tl.tuple,
    key_strides: tl.tuple,
    values: tl.tuple,
    value_strides: tl.tuple,
    partials: tl.tuple,
    scale: tl.tensor,
    slots: tl.tensor,
    split_slots: tl.tensor,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Compute the sums [G, Dv] over one program's share of the slots, for the G query heads of one row and KV head."""
    query, positions, query_positions = step
    mixed_out, tops, totals = partials
    ROWS: tl.constexpr = SHAPE.rows
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, head = (row // SHAPE.heads).to(tl.int64), (row % SHAPE.heads).to(tl.int64)
    member = tl.arange(0, ROWS)  # of the group of query heads
    query_head = row.to(tl.int64) * SHAPE.group + member  # among those of all rows
    is_member = member < SHAPE.group
    channel, value_channel = tl.arange(0, KEYS.padded), tl.arange(0, VALUES.padded)
    query += batch * step_strides[0] + (head * SHAPE.group + member)[:, None] * step_strides[1]
    queries = tl.load(query + channel[None, :], mask=is_member[:, None] & (channel < KEYS.size)[None, :], other=0.0)
    newest = tl.load(query_positions + batch).to(tl.int32)
    positions += batch * step_strides[2] + head * step_strides[3]
    begin, end = split * split_slots, tl.minimum((split + 1) * split_slots, slots)
    read = (batch, head, positions, newest, begin, end)
    if KEYS.kind == "exact":
        sums = _attend_exact(queries, scale, keys, key_strides, values, value_strides, read, SHAPE, KEYS, VALUES)
    else:
        sums = _attend_coded(queries, scale, keys, key_strides, values, value_strides, read, SHAPE, KEYS, VALUES)
    mixed, top, total = sums
    is_stored = is_member[:, None] & (value_channel < VALUES.size)[None, :]
    at_out = (query_head * splits + split)[:, None] * VALUES.size + value_channel[None, :]
    if tops is None:  # the only split: its sum is the result
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    else:
        tl.store(tops + query_head * splits + split, top, mask=is_member)
        tl.store(totals + query_head * splits + split, total, mask=is_member)
    tl.store(mixed_out + at_out, mixed.to(mixed_out.dtype.element_ty), mask=is_stored)


@_jit()
def _attend_exact(
    queries: tl.tensor,
    scale: tl.tensor,
    keys: tl.tuple,
    key_strides: tl.tuple,
    values: tl.tuple,
    value_strides: tl.tuple,
    read: tl.tuple,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tuple:
    """Return the weighted sums of values [G, Dv], largest logits [G] and total weights [G] over a range of slots.

    All of these slots hold exact (unquantised) keys and values. ``read`` = (row, head, slot positions, query position,
    begin, end).
    """
    batch, head, positions, newest, begin, end = read
    ROWS: tl.constexpr = SHAPE.rows
    PADDED: tl.constexpr = VALUES.padded
    tile = tl.arange(0, SHAPE.tile)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    for start in tl.range(begin, end, SHAPE.tile, num_stages=SHAPE.stages):
        place = start + tile
        at = (batch, head, place, place < end)
        seen = _is_seen(tl.load(positions + place, mask=place < end, other=-1), newest, SHAPE)
        key = _read_entries(keys, key_strides, at, KEYS)
        weights, shrink, top, total = _weigh(queries, key, scale, seen, top, total)
        value = _read_entries(values, value_strides, at, VALUES)
        mixed = _mix(weights, value, seen, mixed, shrink)
    return mixed, top, total


@_jit()
def _attend_coded(
    queries: tl.tensor,
    scale: tl.tensor,
    keys: tl.tuple,
    key_strides: tl.tuple,
    values: tl.tuple,
    value_strides: tl.tuple,
    read: tl.tuple,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tuple:
    """Return the sums, largest logits and total weights over a range of slots, some of which hold codes.

    ``read`` = (row, head, slot positions, query position, begin, end); the result has the form of ``_attend_exact``. A
    first loop covers the tiles before the first exact (unquantised) entry that the query sees. The loop itself loads
    the positions and parameters of tokens one tile ahead, since the compiler does not pipeline loads of so few bytes.
    """
    batch, head, positions, newest, begin, end = read
    ROWS: tl.constexpr = SHAPE.rows
    PADDED: tl.constexpr = VALUES.padded
    tile = tl.arange(0, SHAPE.tile)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    key_done, value_done = tl.load(keys[4] + batch).to(tl.int32), tl.load(values[4] + batch).to(tl.int32)
    at = (batch, head, begin + tile, begin + tile < end)
    ahead = tl.load(positions + begin + tile, mask=begin + tile < end, other=-1)
    key_scales, key_zeros = _read_parameters(keys, key_strides, at, KEYS)
    value_scales, value_zeros = _read_parameters(values, value_strides, at, VALUES)
    middle = _slots_before(tl.minimum(key_done, value_done), positions, begin, end, newest, SHAPE)
    middle = begin + middle // SHAPE.tile * SHAPE.tile
    for start in tl.range(begin, middle, SHAPE.tile, num_stages=SHAPE.stages):
        at, place = (batch, head, start + tile, start + tile < end), start + SHAPE.tile + tile
        position, key_parameters, value_parameters = ahead, (key_scales, key_zeros), (value_scales, value_zeros)
        ahead = tl.load(positions + place, mask=place < end, other=-1)
        key_scales, key_zeros = _read_parameters(keys, key_strides, (batch, head, place, place < end), KEYS)
        value_scales, value_zeros = _read_parameters(values, value_strides, (batch, head, place, place < end), VALUES)
        seen = _is_seen(position, newest, SHAPE)
        packed = _read_packed(keys, key_strides, at, KEYS)
        key = _decode(packed, keys, key_strides, at, start, key_done, key_parameters, queries.dtype, KEYS)
        weights, shrink, top, total = _weigh(queries, key, scale, seen, top, total)
        packed = _read_packed(values, value_strides, at, VALUES)
        value = _decode(packed, values, value_strides, at, start, value_done, value_parameters, queries.dtype, VALUES)
        mixed = _mix(weights, value, seen, mixed, shrink)
    ahead = tl.load(positions + middle + tile, mask=middle + tile < end, other=-1)
    for start in tl.range(middle, end, SHAPE.tile, num_stages=1):
        # all that the tile needs is on its way before the first of it is used
        place, position = start + tile, ahead
        at = (batch, head, place, place < end)
        recent_keys = _read_ring(keys, key_strides, at, position, key_done, KEYS)
        packed_keys = _read_packed(keys, key_strides, at, KEYS)
        key_parameters = _read_parameters(keys, key_strides, at, KEYS)
        recent_values = _read_ring(values, value_strides, at, position, value_done, VALUES)
        packed_values = _read_packed(values, value_strides, at, VALUES)
        value_parameters = _read_parameters(values, value_strides, at, VALUES)
        ahead = tl.load(positions + SHAPE.tile + place, mask=SHAPE.tile + place < end, other=-1)
        seen = _is_seen(position, newest, SHAPE)
        at = (batch, head, place, (place < end) & (position < key_done))
        key = _decode(packed_keys, keys, key_strides, at, start, key_done, key_parameters, queries.dtype, KEYS)
        key = tl.where((position >= key_done)[:, None], recent_keys.to(key.dtype), key)
        weights, shrink, top, total = _weigh(queries, key, scale, seen, top, total)
        at = (batch, head, place, (place < end) & (position < value_done))
        value = _decode(
            packed_values, values, value_strides, at, start, value_done, value_parameters, queries.dtype, VALUES
        )
        value = tl.where((position >= value_done)[:, None], recent_values.to(value.dtype), value)
        mixed = _mix(weights, value, seen, mixed, shrink)
    return mixed, top, total


@_jit("splits")
def _merge_kernel(
    partials: tl.tuple,
    sinks: tl.tensor,
    out: tl.tensor,
    splits: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Merge the sums that several programs computed for one query head, and divide by the total weight."""
    mixed, tops, totals = partials
    query_head = tl.program_id(0).to(tl.int64)
    channel, member = tl.arange(0, PADDED), tl.arange(0, TILE)
    is_channel = channel < SIZE
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    merged = tl.zeros([PADDED], tl.float32)
    for start in tl.range(0, splits, TILE):
        split = start + member
        is_split = split < splits
        at = query_head * splits + split
        split_top = tl.load(tops + at, mask=is_split, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(split_top, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, shrink = tl.exp2(split_top - base), tl.exp2(top - base)
        total = total * shrink + tl.sum(weight * tl.load(totals + at, mask=is_split, other=0.0), 0)
        at_mixed = at[:, None] * SIZE + channel[None, :]
        sums = tl.load(mixed + at_mixed, mask=is_split[:, None] & is_channel[None, :], other=0.0)
        merged = merged * shrink + tl.sum(weight[:, None] * sums, 0)
        top = new_top
    if sinks is not None:
        sink = tl.load(sinks + query_head % QUERY_HEADS).to(tl.float32) * 1.4426950408889634  # to base 2
        base = tl.maximum(top, sink)
        shrink = tl.exp2(top - base)
        merged *= shrink
        total = total * shrink + tl.exp2(sink - base)
    merged /= tl.where(total > 0, total, 1.0)
    tl.store(out + query_head * SIZE + channel, merged.to(out.dtype.element_ty), mask=is_channel)


@_jit()
def _is_seen(position: tl.tensor, newest: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """Return which entries, by ``position``, a query at position ``newest`` may attend to."""
    seen = (position >= 0) & (position <= newest)
    if SHAPE.window > 0:
        seen = seen & (newest - position < SHAPE.window)
    return seen


@_jit()
def _slots_before(
    oldest: tl.tensor, positions: tl.tensor, begin: tl.tensor, end: tl.tensor, newest: tl.tensor, SHAPE: tl.constexpr
) -> tl.tensor:
    """Return how many slots from ``begin`` on come before the first recent entry; if there is none, all up to ``end``.

    A recent entry is one at position ``oldest`` or later that the query at position ``newest`` may attend to.
    """
    SCAN: tl.constexpr = SHAPE.scan
    place = tl.arange(0, SCAN)
    first = tl.zeros([SCAN], tl.int32) + (end - begin)
    for start in tl.range(0, end - begin, SCAN, num_stages=1):
        position = tl.load(positions + begin + start + place, mask=start + place < end - begin, other=-1)
        is_recent = _is_seen(position, newest, SHAPE) & (position >= oldest)
        first = tl.minimum(first, tl.where(is_recent, start + place, end - begin))
    return tl.min(first, 0)


@_jit()
def _weigh(
    queries: tl.tensor, key: tl.tensor, scale: tl.tensor, seen: tl.tensor, top: tl.tensor, total: tl.tensor
) -> tl.tuple:
    """Return the softmax weights [G, TILE] of a tile, the factor that rescales the sums so far, the new top and total.

    The top is the largest logit [G] so far, this tile included, the total the sum of the weights [G] so far.
    """
    logits = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
    logits = tl.where(seen[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights, shrink = tl.exp2(logits - base[:, None]), tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@_jit()
def _mix(weights: tl.tensor, value: tl.tensor, seen: tl.tensor, mixed: tl.tensor, shrink: tl.tensor) -> tl.tensor:
    """Return the sums so far, ``mixed``, scaled by ``shrink``, plus the weighted values of a tile."""
    value = tl.where(seen[:, None], value, tl.zeros_like(value))  # 0 * NaN is not 0
    return tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")


@_jit()
def _read_entries(part: tl.tuple, strides: tl.tuple, at: tl.tuple, LAYOUT: tl.constexpr) -> tl.tensor:
    """Return the unquantised keys or values in some slots of one head, [TILE, head size padded to a power of two].

    ``at`` = (row, head, slots [TILE], mask of the slots to read).
    """
    batch, head, place, inside = at
    channel = tl.arange(0, LAYOUT.padded)
    start = part[0] + batch * strides[0] + head * strides[1] + place.to(tl.int64)[:, None] * strides[2]
    return tl.load(start + channel[None, :], mask=inside[:, None] & (channel < LAYOUT.size)[None, :], other=0.0)


@_jit()
def _read_packed(part: tl.tuple, strides: tl.tuple, at: tl.tuple, LAYOUT: tl.constexpr) -> tl.tensor:
    """Return the packed codes, uint8 [TILE, bytes], of the slots that ``at`` names.

    ``at`` = (row, head, slots [TILE], mask of the slots to read).
    """
    batch, head, place, inside = at
    byte = tl.arange(0, LAYOUT.padded * LAYOUT.bits // 8)
    is_byte = (byte < LAYOUT.size * LAYOUT.bits // 8)[None, :]
    start = part[0] + batch * strides[0] + head * strides[1] + place.to(tl.int64)[:, None] * strides[2]
    return tl.load(start + byte[None, :], mask=inside[:, None] & is_byte, other=0)


@_jit()
def _decode(
    packed: tl.tensor,
    part: tl.tuple,
    strides: tl.tuple,
    at: tl.tuple,
    first: tl.tensor,
    done: tl.tensor,
    parameters: tl.tuple,
    dtype: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> tl.tensor:
    """Return the keys or values [TILE, padded] that ``packed`` codes stand for, in ``dtype``.

    ``at`` = (row, head, slots [TILE], mask of the slots to read); ``first`` is the first slot of the tile. Entries at
    positions below ``done`` are quantised. ``parameters`` are the result of ``_read_parameters``.
    """
    batch, head, _, _ = at
    numbers = _numbers_of(packed, LAYOUT)
    if LAYOUT.groups == 0:  # PER_HEAD
        numbers *= parameters[0].to(tl.float32)
    elif LAYOUT.run > 0:
        numbers = _scale_runs(numbers, part, strides, (batch, head, first, done), LAYOUT)
    elif LAYOUT.groups == -1:  # BY_TABLE
        numbers = _scale_channels(numbers, part, strides, at, LAYOUT)
    else:
        numbers = _scale_tokens(numbers, parameters, LAYOUT)
    return numbers.to(dtype)


@_jit()
def _read_ring(
    part: tl.tuple, strides: tl.tuple, at: tl.tuple, position: tl.tensor, done: tl.tensor, LAYOUT: tl.constexpr
) -> tl.tensor:
    """Return the unquantised entries [TILE, padded] from the ring buffer that holds the newest ones.

    Positions below ``done`` are quantised already; for them the result is 0.
    """
    batch, head, _, _ = at
    channel = tl.arange(0, LAYOUT.padded)
    exact = (position >= 0) & (position >= done)
    start = part[3] + batch * strides[8] + head * strides[9]
    start += (position % LAYOUT.ring).to(tl.int64)[:, None] * strides[10]
    return tl.load(start + channel[None, :], mask=exact[:, None] & (channel < LAYOUT.size)[None, :], other=0.0)


@_jit()
def _numbers_of(packed: tl.tensor, LAYOUT: tl.constexpr) -> tl.tensor:
    """Unpack codes to numbers, to which no scale has been applied yet: float32 [TILE, padded]."""
    if LAYOUT.kind == "e4m3":
        numbers = packed.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif LAYOUT.kind == "e5m2":
        numbers = packed.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        codes = packed.to(tl.int32)
        if LAYOUT.bits == 4:
            codes = tl.interleave(codes & 15, codes >> 4)
        elif LAYOUT.bits == 2:
            even = tl.interleave(codes & 3, (codes >> 4) & 3)
            codes = tl.interleave(even, tl.interleave((codes >> 2) & 3, codes >> 6))
        zero: tl.constexpr = 128 if LAYOUT.kind == "int8" else (8 if LAYOUT.kind == "q4" else 0)
        if LAYOUT.kind == "int8":
            codes = codes ^ 128
        # as the last bits of the float 2^23: much faster than a conversion, and exact
        numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    return numbers


@_jit()
def _scale_channels(
    numbers: tl.tensor, part: tl.tuple, strides: tl.tuple, at: tl.tuple, LAYOUT: tl.constexpr
) -> tl.tensor:
    """Apply scales and zeros to keys quantised per channel, ``numbers`` [TILE, padded].

    Scales and zeros are in a table with one row per group of keys; the group of each key is looked up.
    """
    batch, head, place, inside = at
    group = tl.load(part[2] + batch * strides[6] + head * strides[7] + place, mask=inside, other=-1).to(tl.int64)
    channel = tl.arange(0, LAYOUT.padded)
    start = part[1] + batch * strides[3] + head * strides[4] + group[:, None] * strides[5] + channel[None, :]
    is_read = (group >= 0)[:, None] & (channel < LAYOUT.size)[None, :]
    numbers *= tl.load(start, mask=is_read, other=0.0).to(tl.float32)
    if LAYOUT.kind == "unsigned":
        numbers += tl.load(start + LAYOUT.size, mask=is_read, other=0.0).to(tl.float32)
    return numbers


@_jit()
def _scale_runs(numbers: tl.tensor, part: tl.tuple, strides: tl.tuple, at: tl.tuple, LAYOUT: tl.constexpr) -> tl.tensor:
    """Apply scales and zeros to keys quantised per channel, ``numbers`` [TILE, padded], by whole rows of the table.

    The table has one row per group of keys. No key's group is looked up, so a tile must consist of whole runs (slots
    that share a row of the table) or be part of one run.
    """
    batch, head, first, done = at
    ROWS: tl.constexpr = LAYOUT.rows
    row = first // LAYOUT.run + tl.arange(0, ROWS)
    channel = tl.arange(0, LAYOUT.padded)
    start = part[1] + batch * strides[3] + head * strides[4] + row.to(tl.int64)[:, None] * strides[5]
    start += channel[None, :]
    # keys at ``done`` or later have no row in the table yet
    is_read = (row * LAYOUT.run < done)[:, None] & (channel < LAYOUT.size)[None, :]
    scaled = tl.reshape(numbers, [ROWS, numbers.shape[0] // ROWS, LAYOUT.padded])
    scaled *= tl.load(start, mask=is_read, other=0.0).to(tl.float32)[:, None, :]
    if LAYOUT.kind == "unsigned":
        scaled += tl.load(start + LAYOUT.size, mask=is_read, other=0.0).to(tl.float32)[:, None, :]
    return tl.reshape(scaled, numbers.shape)


@_jit()
def _scale_tokens(numbers: tl.tensor, parameters: tl.tuple, LAYOUT: tl.constexpr) -> tl.tensor:
    """Apply the scale and zero of each token's channel groups to ``numbers`` [TILE, padded]."""
    scaled = tl.reshape(numbers, [numbers.shape[0], LAYOUT.padded // LAYOUT.width, LAYOUT.width])
    scaled *= parameters[0].to(tl.float32)[:, :, None]
    if LAYOUT.kind == "unsigned":
        scaled += parameters[1].to(tl.float32)[:, :, None]
    return tl.reshape(scaled, numbers.shape)


@_jit()
def _read_parameters(part: tl.tuple, strides: tl.tuple, at: tl.tuple, LAYOUT: tl.constexpr) -> tl.tuple:
    """Return the scales and zeros [TILE, groups] of the entries in some slots, or the one scale of the head.

    ``at`` = (row, head, slots [TILE], mask of the slots to read). For keys quantised per channel the result is
    meaningless and not used: their parameters are in a table (see ``_scale_channels``).
    """
    batch, head, place, inside = at
    if LAYOUT.groups == -1:  # BY_TABLE
        scales = place
        zeros = place
    elif LAYOUT.groups == 0:  # PER_HEAD
        scales = tl.load(part[1] + head)
        zeros = scales
    else:
        step: tl.constexpr = 2 if LAYOUT.kind == "unsigned" else 1  # parameters of a group
        group = tl.arange(0, LAYOUT.padded // LAYOUT.width) * LAYOUT.width // (LAYOUT.size // LAYOUT.groups)
        start = part[1] + batch * strides[3] + head * strides[4] + place.to(tl.int64)[:, None] * strides[5]
        start += (group * step)[None, :]
        is_read = inside[:, None] & (group < LAYOUT.groups)[None, :]
        scales = tl.load(start, mask=is_read, other=0.0)
        zeros = scales
        if LAYOUT.kind == "unsigned":
            zeros = tl.load(start + 1, mask=is_read, other=0.0)
    return scales, zeros


@_jit()
def _write_kernel(
    parts: tl.tuple,
    part_strides: tl.tuple,
    positions: tl.tensor,
    position_strides: tl.tuple,
    mass: tl.tensor,
    mass_strides: tl.tuple,
    entry: tl.tuple,
    entry_strides: tl.tuple,
    query_positions: tl.tensor,
    slot: tl.tensor,
    HEADS: tl.constexpr,
    SIZES: tl.constexpr,
    PADDED: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Write the key, value and position of one row and head into a slot, and 0 as the slot's accumulated attention.

    ``PLACES`` has a number for keys and one for values. If it is above 0, the key or the value goes into a ring buffer
    of that many places instead.
    """
    row = tl.program_id(0)
    batch, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    at = tl.load(slot)
    position = tl.load(query_positions + batch).to(tl.int32)
    for part in tl.static_range(2):
        place = at
        if PLACES[part] > 0:
            place = (position % PLACES[part]).to(tl.int64)
        channel, strides, source = tl.arange(0, PADDED[part]), part_strides[part], entry_strides[part]
        is_channel = channel < SIZES[part]
        if PLACES[part] > 0:
            is_channel = is_channel & (position >= 0)
        numbers = tl.load(entry[part] + batch * source[0] + head * source[1] + channel, mask=is_channel)
        start = parts[part] + batch * strides[0] + head * strides[1] + place * strides[2]
        tl.store(start + channel, numbers.to(parts[part].dtype.element_ty), mask=is_channel)
    tl.store(positions + batch * position_strides[0] + head * position_strides[1] + at, position)
    if mass is not None:
        tl.store(mass + batch * mass_strides[0] + head * mass_strides[1] + at, 0.0)
