"""Rounding hints: the recorded codes of values near the border between two codes, so that a replay rounds them alike.

A replay computes with other rounding, so a value at a border may get the neighbouring code, which changes all that
follows. The sampler therefore records the code of every value that has exactly one border within ``BAND`` times the
largest magnitude in its token and head, and the shadow pass uses the recorded code. If the replay's value has no border
within ``REACH`` times that magnitude, the hint is forged or comes from other weights, and is not used.

A hint is a uint16 word: 12 bits for the distance to the hint before, 4 bits for the low bits of the code's rank among
all codes. Elements are numbered ``(((token * L + layer) * 2 + part) * H + head) * D + channel``, where part 0 is keys
and part 1 values, and D the wider of key and value heads. A word of distance 4,095 is no hint and only adds to the
distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.codes import encode_as
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Quantiser

BAND, REACH = 1e-5, 1e-4  # distance from a border that is recorded, and that a replay accepts
HINTED_DTYPES = (torch.float32, torch.float64)  # rounding of shorter types is as large as a code: all would be hints
KEYS, VALUES = 0, 1
HINT_BATCH = 64  # slots examined together, so that a decode step pays next to nothing
_LOW, _FAR = 16, 2**12 - 1  # ranks that 4 bits distinguish, and the largest distance of 12 bits
_HOST_PIECE = 1 << 18  # elements examined together on a CPU
Strays = list[tuple[int, int]]  # row and layer of hints that are at no border


class Ranks(NamedTuple):
    """The order of a codec's codes by the value that each decodes to.

    ``rank_of`` int64 [2^bits] maps codes to ranks, ``code_of`` uint8 maps ranks to codes.
    """

    rank_of: Tensor
    code_of: Tensor


@cache
def ranks(codec: Quantiser, device: torch.device) -> Ranks:
    """Return the ranks of a codec's codes, ordered by the value that a code stands for.

    Codes of equal value, such as +0 and -0, share a rank.
    """
    codes = torch.arange(2**codec.bits, dtype=torch.uint8)
    decoded = codec.numbers(codes, torch.empty_like(codes, dtype=torch.float64))
    numbers, rank_of = torch.unique(decoded, return_inverse=True)
    code_of = torch.zeros(len(numbers), dtype=torch.uint8).scatter_(0, rank_of, codes)
    return Ranks(rank_of.to(device), code_of.to(device))


# --- packing to uint16 words ------------------------------------------------------------------------------------------


def pack_hints(index: Tensor, low: Tensor) -> Tensor:
    """Pack hints into uint16 words; the inverse of ``unpack_hints``.

    A hint is an element number, ``index`` int64 [N] in any order, and the low bits of its code's rank, ``low`` [N].
    """
    if not len(index):
        return torch.zeros(0, dtype=torch.uint16)
    index, order = index.sort()
    distance = index.diff(prepend=index.new_zeros(1))
    places = (distance // _FAR + 1).cumsum(0) - 1
    words = torch.full((int(places[-1]) + 1,), _FAR * _LOW, dtype=torch.int32)
    words[places] = (distance % _FAR * _LOW + low[order]).to(torch.int32)
    return words.to(torch.uint16)


def unpack_hints(words: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack rounding hints (words made by ``pack_hints``) into their two parts, each int64 [n].

    These are the element numbers and the low bits of the codes' ranks.
    """
    wide = words.to(torch.int64)
    index, is_hint = (wide // _LOW).cumsum(0), wide // _LOW < _FAR
    return index[is_hint], wide[is_hint] % _LOW


def are_valid_hints(words: Tensor) -> bool:
    """Return whether ``words`` (uint16 [N]) can come from ``pack_hints``, and so name no element twice.

    Hints name the elements whose stored code differs from that of a replay, so that it can round them the same way.
    """
    if words.dtype is not torch.uint16 or words.dim() != 1:
        return False
    return bool((unpack_hints(words)[0].diff() > 0).all())


# --- recording while sampling -----------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """The arguments of one call of ``HintRecorder.add``, kept until its K entries are examined."""

    part: int
    x: Tensor
    codes: Tensor
    parameters: Tensor
    positions: Tensor | int
    is_due: Tensor | None


class HintRecorder:
    """The recorder of one layer's rounding hints (codes of values near the border of two codes), row by row."""

    def __init__(self, codec: Quantiser, rows: int) -> None:
        self._codec = codec
        self._batches: list[_Batch] = []
        self._slots = 0
        self._hints: list[list[Tensor]] = [[] for _ in range(rows)]  # [n, 5] token, part, head, channel, rank

    def add(
        self,
        part: int,
        x: Tensor,
        codes: Tensor,
        parameters: Tensor,
        is_due: Tensor | None,
        positions: Tensor | int,
        places: Tensor | None = None,
        *,
        is_copy: bool = False,
    ) -> None:
        """Record the hints of those entries of ``x`` [B, H, K, D] that were now quantised to ``codes``.

        ``x`` are keys (``part`` 0) or values (1) before quantising. ``is_due`` [B, H, K] marks the quantised ones; None
        if all were. ``positions`` is [B, H, K], or the first of K consecutive positions, equal in all rows and heads.
        ``places``: the indices along K at which anything is due, if known. ``is_copy``: ``x`` shares no memory and is
        not changed later.
        """
        if x.dtype not in HINTED_DTYPES:
            return
        if places is not None:
            assert not isinstance(positions, int), "consecutive positions have no places left out"
            index = upload(places, x.device)
            x, codes, parameters, positions = (t.index_select(2, index) for t in (x, codes, parameters, positions))
            is_due, is_copy = None if is_due is None else is_due.index_select(2, index), True
        batch = _Batch(part, x, codes, parameters, positions, is_due)
        if x.shape[2] >= HINT_BATCH:  # a prompt
            self._examine([batch])
            return
        if not is_copy:  # a view would keep all exact entries in memory until it is examined
            positions = positions if isinstance(positions, int) else positions.clone()
            batch = batch._replace(x=x.clone(), positions=positions)
        self._batches.append(batch)
        self._slots += x.shape[2]
        if self._slots >= HINT_BATCH:
            self._examine_all()

    def _examine_all(self) -> None:
        for part in (KEYS, VALUES):
            batches = [batch for batch in self._batches if batch.part == part]
            if batches:
                self._examine(batches)
        self._batches, self._slots = [], 0

    def _examine(self, batches: Sequence[_Batch]) -> None:
        tensors = zip(*((batch.x, batch.codes, batch.parameters) for batch in batches), strict=True)
        joined = [*map(_concat_slots, tensors), _concat_positions(batches), _concat_masks(batches)]
        for first_row, piece in _pieces(joined):
            self._record(batches[0].part, first_row, *piece)

    def _record(
        self,
        part: int,
        first_row: int,
        x: Tensor,
        codes: Tensor,
        parameters: Tensor,
        positions: Tensor,
        is_due: Tensor,
    ) -> None:
        ranked = ranks(self._codec, x.device)
        band = BAND * x.abs().amax(-1, keepdim=True)
        below, above = (encode_as(moved, parameters, self._codec) for moved in (x - band, x + band))
        elements = ((below != above) & is_due[..., None]).nonzero()
        index = tuple(elements.unbind(1))
        # with several borders within the band a wrong code is no larger than rounding itself
        is_single = ranked.rank_of[above[index].long()] - ranked.rank_of[below[index].long()] == 1
        row, head, slot, channel = elements[is_single].unbind(1)
        rank = ranked.rank_of[codes[row, head, slot, channel].long()]
        fields = [positions[row, head, slot], torch.full_like(row, part), head, channel, rank]
        hints = torch.stack(fields, 1).int().cpu()
        counts = row.bincount(minlength=len(x)).tolist()
        for row_hints, new in zip(self._hints[first_row : first_row + len(x)], torch.split(hints, counts), strict=True):
            row_hints.append(new)

    def row_hints(self, row: int, layer: int, layers: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the hints of a row, in any order: element numbers, and the low bits of the codes' ranks.

        Element numbers depend on the number ``layer`` of this layer, and on the model's ``layers``, KV ``heads`` and
        ``width`` (the larger of the two head sizes).
        """
        self._examine_all()
        hints = torch.cat([torch.zeros(0, 5, dtype=torch.int32), *self._hints[row]]).long()
        token, part, head, channel, rank = hints.unbind(1)
        return (((token * layers + layer) * 2 + part) * heads + head) * width + channel, rank % _LOW

    def reindex(self, rows: Tensor) -> None:
        self._examine_all()
        self._hints = [list(self._hints[row]) for row in rows.tolist()]

    def join(self, other: HintRecorder) -> None:
        self._examine_all()
        other._examine_all()
        self._hints += other._hints


def _concat_slots(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], 2)


def _concat_positions(batches: Sequence[_Batch]) -> Tensor:
    x = batches[0].x
    ranges = [range(b.positions, b.positions + b.x.shape[2]) for b in batches if isinstance(b.positions, int)]
    if len(batches) > 1 and len(ranges) == len(batches):  # decode steps: one upload for all
        numbers = torch.tensor([position for steps in ranges for position in steps], dtype=torch.int32)
        return upload(numbers, x.device).expand(*x.shape[:2], -1)
    tensors = []
    for batch in batches:
        positions = batch.positions
        if isinstance(positions, int):
            numbers = torch.arange(positions, positions + batch.x.shape[2], dtype=torch.int32)
            positions = upload(numbers, x.device).expand(*x.shape[:2], -1)
        tensors.append(positions)
    return _concat_slots(tensors)


def _concat_masks(batches: Sequence[_Batch]) -> Tensor:
    if all(batch.is_due is None for batch in batches):
        slots = sum(batch.x.shape[2] for batch in batches)
        return torch.ones(*batches[0].x.shape[:2], slots, dtype=torch.bool, device=batches[0].x.device)
    return _concat_slots(
        [b.x.new_ones(b.x.shape[:3], dtype=torch.bool) if b.is_due is None else b.is_due for b in batches]
    )


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Split tensors [B, H, K, ...] by rows and slots; yield each piece with the number of its first row.

    The intermediate results of a piece stay in the processor's cache; those of all rows would need new memory.
    """
    rows, heads, slots, size = tensors[0].shape
    max_elements = _HOST_PIECE if tensors[0].device.type == "cpu" else rows * heads * slots * size
    width = max(1, min(slots, max_elements // max(heads * size, 1)))
    step = max(1, max_elements // max(heads * size * width, 1))
    for first in range(0, rows, step):
        for start in range(0, slots, width):
            yield first, [tensor[first : first + step, :, start : start + width] for tensor in tensors]


# --- applying hints in a replay ---------------------------------------------------------------------------------------


class LayerPart(NamedTuple):
    """The keys (``part`` 0) or values (``part`` 1) of a layer; ``width`` is the larger of the two head sizes."""

    layer: int
    part: int
    width: int


class Hints(NamedTuple):
    """The n hints for the keys, or for the values, of one layer.

    Each names an element of the tensor [B, H, K, D] by its indices, and the low bits of its code's rank.
    """

    row: Tensor
    head: Tensor
    column: Tensor
    channel: Tensor
    low: Tensor


class HintTable:
    """The recorded rounding hints of a batch, for a replay whose K keys are at row positions [B, K] (-1 = padding).

    A hint is the recorded code of a value near the border between two codes. Hints for tokens after the replayed ones
    are ignored. ``strays`` collects (row, layer) of each hint that cannot be right: its value is near no border in the
    replay, or the replay has no key for its token. After an update of the weights, and under a reference model, honest
    hints are strays too, so check them only when replaying the sampler's own weights.
    """

    def __init__(self, words: Sequence[Tensor], positions: Tensor, layers: int, strays: Strays | None = None) -> None:
        self._words, self._positions, self._layers, self._strays = words, positions, layers, strays
        self._parts: dict[int, Hints] | None = None

    def _unpack(self, heads: int, width: int) -> dict[int, Hints]:
        """Return the hints of all layers as {layer * 2 + part: hints}, where part is 0 for keys and 1 for values."""
        device, unpacked = self._positions.device, [unpack_hints(words.cpu()) for words in self._words]
        index, low = (torch.cat(tensors).to(device) for tensors in zip(*unpacked, strict=True))
        row = torch.repeat_interleave(torch.tensor([len(numbers) for numbers, _ in unpacked])).to(device)
        token, part = index // (self._layers * 2 * heads * width), index // (heads * width) % (self._layers * 2)
        column = _columns(self._positions, row, token)
        # tokens after the last column are in the sampler's cache, but no query of the replay follows them
        is_missing = (column < 0) & (token <= self._positions.amax(1)[row])
        self._add_strays(row[is_missing], part[is_missing] // 2)
        order = part.argsort(stable=True)
        order = order[column[order] >= 0]
        hints = Hints(row[order], (index // width % heads)[order], column[order], (index % width)[order], low[order])
        ends = part[order].bincount(minlength=self._layers * 2).cumsum(0).tolist()
        slices = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return {number: Hints(*(tensor[span] for tensor in hints)) for number, span in enumerate(slices)}

    def apply(self, layer_part: LayerPart, x: Tensor, codes: Tensor, parameters: Tensor, codec: Quantiser) -> Tensor:
        """Return ``codes`` [B, H, K, D] of ``x``, with the recorded code for each value near a border of two codes."""
        ranked = ranks(codec, x.device)
        if self._parts is None:
            self._parts = self._unpack(x.shape[1], layer_part.width)
        row, head, column, named_channel, low = self._parts[layer_part.layer * 2 + layer_part.part]
        # hints count channels by the wider of keys and values: a forged one may name a channel that this part lacks
        channel = named_channel.clamp(max=x.shape[3] - 1)
        value, code = x[row, head, column, channel], codes[row, head, column, channel]
        group = channel // (x.shape[3] // parameters.shape[-2])
        fitted = parameters[row, head, column, group].to(x.dtype)
        reach = REACH * x.abs().amax(-1)[row, head, column]
        below, above = (ranked.rank_of[codec.encode(moved, fitted).long()] for moved in (value - reach, value + reach))
        rank = ranked.rank_of[code.long()]
        rank = rank + (low - rank + _LOW // 2) % _LOW - _LOW // 2  # the nearest rank with these low bits
        is_near = (below < above) & (below <= rank) & (rank <= above) & (channel == named_channel)
        self._add_strays(row[~is_near], torch.full_like(row[~is_near], layer_part.layer))
        recorded = ranked.code_of[rank.clamp(0, len(ranked.code_of) - 1)]
        return codes.index_put((row, head, column, channel), torch.where(is_near, recorded, code))

    def _add_strays(self, row: Tensor, layer: Tensor) -> None:
        if self._strays is not None:
            self._strays += zip(row.tolist(), layer.tolist(), strict=True)


def _columns(positions: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """Return where along K each position ``token`` [N] of row ``row`` [N] is found: indices [N], -1 if nowhere.

    ``positions`` [B, K] are the row positions of a batch of padded rows.
    """
    longest = int(positions.max()) + 1
    table = positions.new_full((len(positions), longest + 1), -1, dtype=torch.int64)
    columns = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    table.scatter_(1, torch.where(positions >= 0, positions, longest).long(), columns)
    table[:, longest] = -1
    return table[row, token.clamp(max=longest)]
