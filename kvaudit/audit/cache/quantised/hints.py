"""Hints: the codes that rounding could have decided, recorded so that a replay decides them alike.

One pass does not round like many. A value that lies within rounding of the border between two codes may fall on the
other side in a replay, and the flipped code moves everything after it. So the sampler notes every code that would have
been another had its value moved by ``BAND`` of the largest magnitude of its token's head, and the shadow pass takes it
over. A hint that is at no border in the replay is forged, or of other weights: it is never taken over.

A hint is a uint16 word: 12 bits say how many numbers lie between it and the hint before, 4 bits are the low ones of the
code's rank among all codes. Elements count as ``(((token * L + layer) * 2 + part) * H + head) * D + channel``, part 0
being keys and D the wider of key and value heads; a word of distance 4,095 is no hint and only moves on.
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

BAND, REACH = 1e-5, 1e-4  # what is recorded, and what a replay may be off by before a hint is forged
HINTED = (torch.float32, torch.float64)  # below, rounding is of the size of a code: hints would be all codes
KEYS, VALUES = 0, 1
_LOW, _FAR = 16, 2**12 - 1  # of a word: what 4 bits of rank tell apart, and the most that 12 bits of distance say
_HOST_PIECE = 1 << 18  # elements that are looked at together on a processor
WAIT = 64  # slots that are looked at together, so that a decode step pays next to nothing
Strays = list[tuple[int, int]]  # row and layer of hints that are at no border


class Ranks(NamedTuple):
    """A codec's codes by size: ``of`` int64 [2^bits] ranks them, ``codes`` uint8 is the way back."""

    of: Tensor
    codes: Tensor


@cache
def ranks(codec: Quantiser, device: torch.device) -> Ranks:
    """Neighbours differ by one, and codes that stand for the same number (two zeros) are of one rank."""
    codes = torch.arange(2**codec.bits, dtype=torch.uint8)
    numbers, of = torch.unique(codec.numbers(codes, torch.empty_like(codes, dtype=torch.float64)), return_inverse=True)
    back = torch.zeros(len(numbers), dtype=torch.uint8).scatter_(0, of, codes)
    return Ranks(of.to(device), back.to(device))


# --- the file's words -----------------------------------------------------------------------------------------------


def pack_hints(index: Tensor, low: Tensor) -> Tensor:
    """Words uint16 of element numbers int64 [N], in any order, and the low bits of their ranks [N]."""
    if not len(index):
        return torch.zeros(0, dtype=torch.uint16)
    index, order = index.sort()
    distance = index.diff(prepend=index.new_zeros(1))
    places = (distance // _FAR + 1).cumsum(0) - 1
    words = torch.full((int(places[-1]) + 1,), _FAR * _LOW, dtype=torch.int32)
    words[places] = (distance % _FAR * _LOW + low[order]).to(torch.int32)
    return words.to(torch.uint16)


def unpack_hints(words: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of ``pack_hints``."""
    wide = words.to(torch.int64)
    index, here = (wide // _LOW).cumsum(0), wide // _LOW < _FAR
    return index[here], wide[here] % _LOW


def sound_hints(words: Tensor) -> bool:
    """Whether these can be words of ``pack_hints``: no element is named twice."""
    if words.dtype is not torch.uint16 or words.dim() != 1:
        return False
    return bool((unpack_hints(words)[0].diff() > 0).all())


# --- the sampler's side ---------------------------------------------------------------------------------------------


class _Waiting(NamedTuple):
    """What ``HintRecorder.add`` was given of K entries, until it is looked at."""

    part: int
    x: Tensor
    codes: Tensor
    parameters: Tensor
    at: Tensor | int
    leaving: Tensor | None

    @property
    def positions(self) -> Tensor:
        """[B, H, K]"""
        if isinstance(self.at, Tensor):
            return self.at
        numbers = torch.arange(self.at, self.at + self.x.shape[2], dtype=torch.int32)
        return upload(numbers, self.x.device).expand(*self.x.shape[:2], -1)


class HintRecorder:
    """The hints of one layer, row by row."""

    def __init__(self, codec: Quantiser, rows: int) -> None:
        self._codec = codec
        self._waiting: list[_Waiting] = []
        self._slots = 0
        self._found: list[list[Tensor]] = [[] for _ in range(rows)]  # [n, 5] token, part, head, channel, rank

    def add(
        self,
        part: int,
        x: Tensor,
        codes: Tensor,
        parameters: Tensor,
        leaving: Tensor | None,
        at: Tensor | int,
        places: Tensor | None = None,
        *,
        own: bool = False,
    ) -> None:
        """Note what of ``x`` [B, H, K, D] became ``codes`` where ``leaving`` [B, H, K], at positions ``at``; None: all.

        A number for ``at`` is the position of the first of K, which the others follow, in all rows and heads. Of K
        something leaves at these ``places`` only; None: perhaps at all. ``own``: ``x`` is a copy that stays as it is,
        and no more than that.
        """
        if x.dtype not in HINTED:
            return
        if places is not None:
            assert not isinstance(at, int), "positions in a row have no places left out"
            there = upload(places, x.device)
            x, codes, parameters, at = (tensor.index_select(2, there) for tensor in (x, codes, parameters, at))
            leaving, own = None if leaving is None else leaving.index_select(2, there), True
        waiting = _Waiting(part, x, codes, parameters, at, leaving)
        if x.shape[2] >= WAIT:  # a prompt
            self._look_at([waiting])
            return
        if not own:  # a view would hold all of what was exact until it is looked at
            waiting = waiting._replace(x=x.clone(), at=at if isinstance(at, int) else at.clone())
        self._waiting.append(waiting)
        self._slots += x.shape[2]
        if self._slots >= WAIT:
            self._look()

    def _look(self) -> None:
        for part in (KEYS, VALUES):
            waiting = [one for one in self._waiting if one.part == part]
            if waiting:
                self._look_at(waiting)
        self._waiting, self._slots = [], 0

    def _look_at(self, waiting: Sequence[_Waiting]) -> None:
        """Of one part, one behind the other."""
        parts = zip(*((one.x, one.codes, one.parameters) for one in waiting), strict=True)
        together = [*map(_one_behind_another, parts), _positions(waiting), _leaving(waiting)]
        for first, piece in _pieces(together):
            self._enter(waiting[0].part, first, *piece)

    def _enter(
        self, part: int, first: int, x: Tensor, codes: Tensor, parameters: Tensor, at: Tensor, leaving: Tensor
    ) -> None:
        """Of some rows, from number ``first`` on."""
        ranked = ranks(self._codec, x.device)
        band = BAND * x.abs().amax(-1, keepdim=True)
        below, above = (encode_as(moved, parameters, self._codec) for moved in (x - band, x + band))
        where = ((below != above) & leaving[..., None]).nonzero()
        points = tuple(where.unbind(1))
        # several borders within the band: steps so small that a flip is rounding itself
        one = ranked.of[above[points].long()] - ranked.of[below[points].long()] == 1
        row, head, slot, channel = where[one].unbind(1)
        rank = ranked.of[codes[row, head, slot, channel].long()]
        found = torch.stack([at[row, head, slot], torch.full_like(row, part), head, channel, rank], 1).int().cpu()
        counts = row.bincount(minlength=len(x)).tolist()
        for own, new in zip(self._found[first : first + len(x)], torch.split(found, counts), strict=True):
            own.append(new)

    def of(self, row: int, layer: int, layers: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Element numbers and low bits of a row's hints so far, in no order."""
        self._look()
        found = torch.cat([torch.zeros(0, 5, dtype=torch.int32), *self._found[row]]).long()
        token, part, head, channel, rank = found.unbind(1)
        return (((token * layers + layer) * 2 + part) * heads + head) * width + channel, rank % _LOW

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named: with what was found so far."""
        self._look()
        self._found = [list(self._found[row]) for row in rows.tolist()]

    def join(self, other: HintRecorder) -> None:
        """Hold the rows of another recorder too, behind its own."""
        self._look()
        other._look()
        self._found += other._found


def _one_behind_another(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], 2)


def _positions(waiting: Sequence[_Waiting]) -> Tensor:
    """[B, H, K]"""
    if len(waiting) == 1 or any(isinstance(one.at, Tensor) for one in waiting):
        return _one_behind_another([one.positions for one in waiting])
    # of the steps of decoding by one upload
    numbers = [one.at + n for one in waiting if isinstance(one.at, int) for n in range(one.x.shape[2])]
    first = waiting[0].x
    return upload(torch.tensor(numbers, dtype=torch.int32), first.device).expand(*first.shape[:2], -1)


def _leaving(waiting: Sequence[_Waiting]) -> Tensor:
    """Bool [B, H, K]."""
    if all(one.leaving is None for one in waiting):
        slots = sum(one.x.shape[2] for one in waiting)
        return torch.ones(*waiting[0].x.shape[:2], slots, dtype=torch.bool, device=waiting[0].x.device)
    return _one_behind_another(
        [one.x.new_ones(one.x.shape[:3], dtype=torch.bool) if one.leaving is None else one.leaving for one in waiting]
    )


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Tensors [B, H, K, ...] in pieces by rows and slots, each with the number of its first row.

    What is made of a piece on the way stays in the processor's cache, where all at once would be new memory each time.
    """
    rows, heads, slots, size = tensors[0].shape
    most = _HOST_PIECE if tensors[0].device.type == "cpu" else rows * heads * slots * size
    width = max(1, min(slots, most // max(heads * size, 1)))
    step = max(1, most // max(heads * size * width, 1))
    for first in range(0, rows, step):
        for start in range(0, slots, width):
            yield first, [tensor[first : first + step, :, start : start + width] for tensor in tensors]


# --- the replay's side ----------------------------------------------------------------------------------------------


class CodePlace(NamedTuple):
    """Keys or values of a layer; ``width`` is the wider of their heads."""

    layer: int
    part: int
    width: int


class Hints(NamedTuple):
    """The n hints of one part of one layer: where they stand in [B, H, K, D], and the low bits of their ranks."""

    row: Tensor
    head: Tensor
    column: Tensor
    channel: Tensor
    low: Tensor


class HintTable:
    """The hints of a pass whose columns are at row positions [B, K] (-1 = padding); those of other columns are left.

    ``strays`` grows by every hint that is at no border in the replay, or in no column. After an update of the weights,
    and under a reference model, honest hints are strays too: only who replays the sampler's own weights should mind.
    """

    def __init__(self, words: Sequence[Tensor], positions: Tensor, layers: int, strays: Strays | None = None) -> None:
        self._words, self._positions, self._layers, self._strays = words, positions, layers, strays
        self._parts: dict[int, Hints] | None = None

    def _of(self, place: CodePlace, heads: int) -> Hints:
        if self._parts is None:
            self._parts = self._laid(heads, place.width)
        return self._parts[place.layer * 2 + place.part]

    def _laid(self, heads: int, width: int) -> dict[int, Hints]:
        device, unpacked = self._positions.device, [unpack_hints(words.cpu()) for words in self._words]
        index, low = (torch.cat(parts).to(device) for parts in zip(*unpacked, strict=True))
        row = torch.repeat_interleave(torch.tensor([len(own) for own, _ in unpacked])).to(device)
        token, place = index // (self._layers * 2 * heads * width), index // (heads * width) % (self._layers * 2)
        column = _columns(self._positions, row, token)
        # what was given last is in the sampler's cache already, and no query of a replay follows it
        within = (column < 0) & (token <= self._positions.amax(1)[row])
        self._enter_strays(row[within], place[within] // 2)
        order = place.argsort(stable=True)
        order = order[column[order] >= 0]
        every = Hints(row[order], (index // width % heads)[order], column[order], (index % width)[order], low[order])
        ends = place[order].bincount(minlength=self._layers * 2).cumsum(0).tolist()
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return {number: Hints(*(tensor[part] for tensor in every)) for number, part in enumerate(parts)}

    def take_over(self, place: CodePlace, x: Tensor, codes: Tensor, parameters: Tensor, codec: Quantiser) -> Tensor:
        """``codes`` [B, H, K, D] of ``x``, with the recorded ones where a border is near."""
        ranked = ranks(codec, x.device)
        row, head, column, named, low = self._of(place, x.shape[1])
        # hints count channels by the wider of both parts: a forged one may be of none that this part has
        channel = named.clamp(max=x.shape[3] - 1)
        value, own = x[row, head, column, channel], codes[row, head, column, channel]
        group = channel // (x.shape[3] // parameters.shape[-2])
        fitted = parameters[row, head, column, group].to(x.dtype)
        reach = REACH * x.abs().amax(-1)[row, head, column]
        below, above = (ranked.of[codec.encode(moved, fitted).long()] for moved in (value - reach, value + reach))
        rank = ranked.of[own.long()]
        rank = rank + (low - rank + _LOW // 2) % _LOW - _LOW // 2  # the nearest with these low bits
        near = (below < above) & (below <= rank) & (rank <= above) & (channel == named)
        self._enter_strays(row[~near], torch.full_like(row[~near], place.layer))
        taken = ranked.codes[rank.clamp(0, len(ranked.codes) - 1)]
        return codes.index_put((row, head, column, channel), torch.where(near, taken, own))

    def _enter_strays(self, row: Tensor, layer: Tensor) -> None:
        if self._strays is not None:
            self._strays += zip(row.tolist(), layer.tolist(), strict=True)


def _columns(positions: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """The columns [N] where tokens of rows stand, -1 for those that stand nowhere."""
    longest = int(positions.max()) + 1
    table = positions.new_full((len(positions), longest + 1), -1, dtype=torch.int64)
    columns = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    table.scatter_(1, torch.where(positions >= 0, positions, longest).long(), columns)
    table[:, longest] = -1
    return table[row, token.clamp(max=longest)]
