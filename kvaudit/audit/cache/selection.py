"""Which keys a query attended to, where it attended to some only: the record, and what a pass makes of it.

Nothing has left such a cache, so no integer per entry can say it; the record holds one list per query, layer and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvaudit.core.errors import DataError

NO_UNIT = -1  # fills up a list
_LATE = 2**31 - 1  # sorts NONE behind every unit


@dataclass(frozen=True)
class Selection:
    """What the choosing queries of one row attended to; CPU tensors.

    Query ``queries[n]`` (int32 [N], row positions, rising) saw in layer ``layers[s]`` and head a, of the keys up to its
    own, those at positions p with p // ``unit`` in ``chosen[s, a, n]``: int32 [S, A, N, k], rising, NONE at the end. A
    is 1 where all heads share their lists, the number of KV heads or that of query heads. Other queries and other
    layers saw everything that had not left.
    """

    unit: int
    layers: tuple[int, ...]
    queries: Tensor
    chosen: Tensor

    def keys(self, layer: int, head: int, heads: int) -> list[tuple[int, frozenset[int]]]:
        """Choosing queries and the positions that head ``head`` of ``heads`` attends to, in a layer that chooses."""
        if layer not in self.layers:
            return []
        lists = self.chosen[self.layers.index(layer)]
        units = lists[head * len(lists) // heads].tolist()  # neighbouring heads share a list
        return [
            (query, frozenset(p for p in range(query + 1) if p // self.unit in named))
            for query, named in zip(self.queries.tolist(), units, strict=True)
        ]

    def until(self, length: int) -> Selection:
        """The same, of queries before position ``length``."""
        before = self.queries < length
        return Selection(self.unit, self.layers, self.queries[before], self.chosen[:, :, before])


def unit_mask(units: Tensor, keys: Tensor, unit: int, most: int) -> Tensor:
    """Which keys lists of units name: bool [B, A, Q, K] from units [B, A, Q, k] below ``most`` and positions [B, K]."""
    # padding counts to unit 0: callers hide it by its position
    own = (keys.clamp(min=0) // unit).long()[:, None, None] + 1  # [B, 1, 1, K]
    return _named(units, most).gather(3, own.expand(*units.shape[:3], -1))


def slot_mask(units: Tensor, length: int, unit: int, most: int) -> Tensor:
    """The same for keys [B, length] that each stand at the position of their number."""
    marks = _named(units, most)[..., 1:, None]  # [B, A, Q, most, 1]
    return marks.expand(*marks.shape[:-1], unit).flatten(3)[..., :length]


def _named(units: Tensor, most: int) -> Tensor:
    """Bool [B, A, Q, 1 + most], True where a unit below ``most`` is named; the first column is NONE's."""
    marks = torch.zeros(*units.shape[:3], 1 + most, dtype=torch.bool, device=units.device)
    return marks.scatter_(3, units.long().clamp(min=NO_UNIT) + 1, True)


_Step = tuple[Tensor, dict[int, Tensor]]  # positions [B] of its queries, and per layer units [B, A, k]


class RecordedChoices:
    """What the queries of a sampler's decode steps chose, step after step."""

    def __init__(self, unit: int, rows: int) -> None:
        self._unit, self._rows = unit, rows
        self._steps: list[_Step] = []

    def begin(self, positions: Tensor) -> None:
        """Announce a decode step of queries at positions [B], -1 = none."""
        self._steps.append((positions, {}))

    def add(self, layer: int, units: Tensor) -> None:
        """Note a layer's lists [B, A, k], in any order."""
        self._steps[-1][1][layer] = units.to(torch.int32)

    def rows(self) -> list[Selection | None]:
        """Every row's record; None where no query has chosen yet."""
        if not any(step for _, step in self._steps):  # nothing drawn yet, or no layer that chooses
            return [None] * self._rows
        layers = tuple(self._steps[0][1])
        widest = max(units.shape[-1] for _, step in self._steps for units in step.values())
        at = torch.stack([positions for positions, _ in self._steps], 1).cpu()  # [B, N]
        chosen = torch.stack(
            [_rising(torch.stack([_widened(step[layer], widest) for _, step in self._steps], 2)) for layer in layers], 1
        ).cpu()  # [B, S, A, N, k]
        return [
            Selection(self._unit, layers, own[own >= 0].to(torch.int32), lists[:, :, own >= 0])
            if bool((own >= 0).any())
            else None
            for own, lists in zip(at, chosen, strict=True)  # own [N], lists [S, A, N, k]
        ]

    def reindex(self, rows: Tensor) -> None:
        """Hold these rows instead, in this order, each as often as it is named."""
        self._rows = len(rows)
        held = ((positions[rows], step) for positions, step in self._steps)
        # a step of rows that are gone is no longer of any: batches that rows come to and leave go on for long
        self._steps = [
            (positions, {layer: units[rows] for layer, units in step.items()})
            for positions, step in held
            if bool((positions >= 0).any())
        ]

    def join(self, other: RecordedChoices) -> None:
        """Hold the rows of another record too, behind its own."""
        self._steps = [_among(step, 0, other._rows) for step in self._steps] + [
            _among(step, self._rows, 0) for step in other._steps
        ]
        self._rows += other._rows


def _among(step: _Step, before: int, behind: int) -> _Step:
    """A step among so many rows more that took no part in it."""
    positions, chosen = step
    rows = (before, behind)
    return pad(positions, rows, value=NO_UNIT), {
        n: pad(units, (0, 0, 0, 0, *rows), value=NO_UNIT) for n, units in chosen.items()
    }


class Choices(NamedTuple):
    """The records of a batch, for a pass: ``place`` [B, T] says which list a position has, -1 = none.

    ``lists`` int32 [B, S, A, N, k]; ``slots`` maps a layer to its place along S.
    """

    unit: int
    slots: dict[int, int]
    place: Tensor
    lists: Tensor

    def visible(self, layer: int, at: Tensor, keys: Tensor) -> Tensor:
        """Bool [B, A, Q, K] of queries and keys at positions [B, Q] and [B, K]; causality is not looked at."""
        place = self.place.gather(1, at.clamp(0, self.place.shape[1] - 1).long())  # [B, Q]
        place = torch.where((at >= 0) & (at < self.place.shape[1]), place, NO_UNIT)
        lists = self.lists[:, self.slots[layer]]  # [B, A, N, k]
        # [B, A, Q, k], the list of each query; any for one that has none
        index = place.clamp(min=0)[:, None, :, None].expand(-1, lists.shape[1], -1, lists.shape[3])
        found = unit_mask(lists.gather(2, index), keys, self.unit, self.place.shape[1] // self.unit + 1)
        return found | (place < 0)[:, None, :, None]  # without a list it sees everything


def batch_choices(selections: Sequence[Selection | None], tokens: int, device: torch.device) -> Choices | None:
    """The records of a batch of rows of at most ``tokens`` tokens; None where no query chose.

    Raises DataError where rows chose in different units, layers or heads.
    """
    some = [selection for selection in selections if selection is not None and len(selection.queries)]
    if not some:
        return None
    kinds = {(selection.unit, selection.layers, selection.chosen.shape[1]) for selection in some}
    if len(kinds) > 1:
        raise DataError("rollouts of one batch chose their keys in different units, layers or heads; replay them apart")
    most, widest = (max(s.chosen.shape[dim] for s in some) for dim in (2, 3))
    place = torch.full((len(selections), tokens), NO_UNIT)  # [B, T]
    # [B, S, A, N, k] of the row with most choosing queries and the longest lists
    lists = torch.full((len(selections), *some[0].chosen.shape[:2], most, widest), NO_UNIT, dtype=torch.int32)
    for row, selection in enumerate(selections):
        if selection is not None:
            count = len(selection.queries)
            place[row, selection.queries.long()] = torch.arange(count)
            lists[row, :, :, :count, : selection.chosen.shape[3]] = selection.chosen
    slots = {layer: slot for slot, layer in enumerate(some[0].layers)}
    return Choices(some[0].unit, slots, place.to(device), lists.to(device))


def selection_fault(selection: Selection, evicted_at: Tensor) -> str | None:
    """Why a row whose entries left at [L, H, T] cannot have chosen so, in words, or None."""
    layers, heads, tokens = evicted_at.shape
    queries, chosen = selection.queries, selection.chosen
    kinds = (queries.dtype, chosen.dtype, queries.dim(), chosen.dim())
    if kinds != (torch.int32, torch.int32, 1, 4) or chosen.shape[2] != len(queries) or not chosen.shape[3]:
        return f"has choices of shape {tuple(chosen.shape)} for {len(queries)} queries"
    if chosen.shape[0] != len(selection.layers) or (chosen.shape[1] % heads and chosen.shape[1] != 1):
        wanted = f"{len(selection.layers)} of 1 or {heads}"
        return f"has choices of {chosen.shape[0]} layers and {chosen.shape[1]} heads, wanted {wanted}"
    if list(selection.layers) != sorted({*selection.layers} & {*range(layers)}):
        return f"has choices in layers {list(selection.layers)}, the model has {layers}"
    ordered = torch.cat([queries.new_tensor([-1]), queries, queries.new_tensor([tokens])])
    if not bool((ordered[1:] > ordered[:-1]).all()):
        return f"has choosing queries that do not rise from 0 to {tokens - 1}"
    # each unit above the one before, and behind the first NONE nothing but NONE
    if bool((torch.where(chosen < 0, _LATE, chosen).diff(dim=-1) < (chosen[..., 1:] >= 0).int()).any()):
        return "names a unit twice, or not in order"
    if bool((chosen * selection.unit > queries[:, None]).any()) or bool((chosen[..., 0] < 0).any()):
        return "lets a query choose what comes after it, or nothing"
    return None


def attends_to_nothing(selection: Selection, evicted_at: Tensor) -> bool:
    """Whether some query chose only entries that had left by then."""
    choices = batch_choices([selection], evicted_at.shape[2], evicted_at.device)
    keys, at = torch.arange(evicted_at.shape[2]), selection.queries[:, None]
    for layer in selection.layers if choices else ():
        leaves_at = evicted_at[layer]  # [H, T]
        if bool((leaves_at > len(keys)).all()):  # nothing left here, and no list is empty (``selection_fault``)
            continue
        assert choices is not None
        chosen = choices.visible(layer, selection.queries[None], keys[None])[0]  # [A, N, T]
        held = (keys <= at) & (at < leaves_at[:, None])  # [H, N, T]
        apart = max(1, len(chosen) // len(held))  # query heads of a KV head, if lists are by query head
        if not bool((held.repeat_interleave(apart, 0) & chosen).any(-1).all()):
            return True
    return False


def _rising(units: Tensor) -> Tensor:
    """Lists [..., k] in order, with NONE at the end, as the record has them."""
    ordered = torch.where(units < 0, _LATE, units).sort(-1).values
    return torch.where(ordered == _LATE, NO_UNIT, ordered)


def _widened(units: Tensor, width: int) -> Tensor:
    return pad(units, (0, width - units.shape[-1]), value=NO_UNIT)
