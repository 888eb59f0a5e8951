"""The record of the keys that each query selected, under a policy that selects keys, and masks for its replay.

Such a policy evicts nothing, so ``evicted_at`` cannot record the selection. The record is one list of units (runs of
positions) per query, layer and head.
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
_LATEST = 2**31 - 1  # sorts NO_UNIT behind every unit


@dataclass(frozen=True)
class Selection:
    """The keys that the selecting queries of one row attended to; CPU tensors.

    A unit is a run of ``unit`` positions; position p is in unit p // ``unit``. ``queries`` int32 [N] are the row
    positions of the selecting queries, rising. ``chosen`` int32 [S, A, N, k] are the units that they selected: in layer
    ``layers[s]`` and head a, query n saw the keys up to its own position in the units ``chosen[s, a, n]``. Each list of
    units rises, with NO_UNIT at the end. A is 1 if all heads share their lists, else the number of KV heads or of query
    heads. Other queries and other layers saw everything that was not evicted.
    """

    unit: int
    layers: tuple[int, ...]
    queries: Tensor
    chosen: Tensor

    def until(self, length: int) -> Selection:
        """Return the part of the record that is about queries before position ``length``."""
        before = self.queries < length
        return Selection(self.unit, self.layers, self.queries[before], self.chosen[:, :, before])


def unit_mask(units: Tensor, positions: Tensor, unit: int, max_units: int) -> Tensor:
    """Return which keys are in the runs of positions (units) that each query has listed, bool [B, A, Q, K].

    ``units`` [B, A, Q, k] are the numbers of the listed runs of ``unit`` positions, all below ``max_units``;
    ``positions`` [B, K] are those of the keys. Padding counts as unit 0, so callers mask it.
    """
    index = (positions.clamp(min=0) // unit).long()[:, None, None] + 1  # [B, 1, 1, K]
    return _mark_units(units, max_units).gather(3, index.expand(*units.shape[:3], -1))


def slot_mask(units: Tensor, length: int, unit: int, max_units: int) -> Tensor:
    """Return which of the first ``length`` slots each query selected, bool [B, A, Q, length].

    Slot n must hold position n. ``units`` [B, A, Q, k] are the numbers of the listed runs of ``unit`` positions. The
    general form is ``unit_mask``, which is slower.
    """
    marks = _mark_units(units, max_units)[..., 1:, None]  # [B, A, Q, max_units, 1]
    return marks.expand(*marks.shape[:-1], unit).flatten(3)[..., :length]


def _mark_units(units: Tensor, max_units: int) -> Tensor:
    """Return, for each query, which units (runs of positions) its list names: bool [B, A, Q, 1 + max_units].

    ``units`` [B, A, Q, k] are these lists, of unit numbers, for A heads or one list for all. The first column is for
    NO_UNIT, with which short lists are filled.
    """
    marks = torch.zeros(*units.shape[:3], 1 + max_units, dtype=torch.bool, device=units.device)
    return marks.scatter_(3, units.long().clamp(min=NO_UNIT) + 1, True)


_Step = tuple[Tensor, dict[int, Tensor]]  # positions [B] of its queries, and per layer units [B, A, k]


class RecordedChoices:
    """The recorder of the runs of positions (units) that queries select, decode step by decode step."""

    def __init__(self, unit: int, rows: int) -> None:
        self._unit, self._rows = unit, rows
        self._steps: list[_Step] = []

    def begin(self, positions: Tensor) -> None:
        self._steps.append((positions, {}))

    def add(self, layer: int, units: Tensor) -> None:
        self._steps[-1][1][layer] = units.to(torch.int32)

    def rows(self) -> list[Selection | None]:
        """Return every row's record; None for a row whose queries have selected nothing yet."""
        if not any(step for _, step in self._steps):  # nothing decoded yet, or no layer that selects
            return [None] * self._rows
        layers = tuple(self._steps[0][1])
        width = max(units.shape[-1] for _, step in self._steps for units in step.values())
        positions = torch.stack([positions for positions, _ in self._steps], 1).cpu()  # [B, N]
        padded = [
            {layer: pad(units, (0, width - units.shape[-1]), value=NO_UNIT) for layer, units in step.items()}
            for _, step in self._steps
        ]
        # [B, S, A, N, k]
        units = torch.stack([torch.stack([step[layer] for step in padded], 2) for layer in layers], 1)
        # in order, with NO_UNIT at the end
        ordered = torch.where(units < 0, _LATEST, units).sort(-1).values
        chosen = torch.where(ordered == _LATEST, NO_UNIT, ordered).cpu()
        return [
            Selection(self._unit, layers, queries[queries >= 0].to(torch.int32), lists[:, :, queries >= 0])
            if bool((queries >= 0).any())
            else None
            for queries, lists in zip(positions, chosen, strict=True)  # [N] and [S, A, N, k]
        ]

    def reindex(self, rows: Tensor) -> None:
        self._rows = len(rows)
        steps = ((positions[rows], units) for positions, units in self._steps)
        # steps of removed rows are dropped: a batch that rows join and leave may go on for long
        self._steps = [
            (positions, {layer: tensor[rows] for layer, tensor in units.items()})
            for positions, units in steps
            if bool((positions >= 0).any())
        ]

    def join(self, other: RecordedChoices) -> None:
        later = [_pad_rows(step, self._rows, 0) for step in other._steps]
        self._steps = [_pad_rows(step, 0, other._rows) for step in self._steps] + later
        self._rows += other._rows


def _pad_rows(step: _Step, before: int, after: int) -> _Step:
    positions, chosen = step
    rows = (before, after)
    padded = {layer: pad(units, (0, 0, 0, 0, *rows), value=NO_UNIT) for layer, units in chosen.items()}
    return pad(positions, rows, value=NO_UNIT), padded


class Choices(NamedTuple):
    """The keys that each query of a batch selected while sampling, in tensors that a replay can read.

    ``lists`` int32 [B, S, A, N, k] holds the units that each of N queries selected, in S layers and A heads. ``slots``
    maps a layer to its index along S; ``list_index`` [B, T] maps the position of a query to its index along N, -1 for a
    query that did not select.
    """

    unit: int
    slots: dict[int, int]
    list_index: Tensor
    lists: Tensor

    def visible(self, layer: int, at: Tensor, keys: Tensor) -> Tensor:
        """Return which keys each query selected, bool [B, A, Q, K]; causality is not applied.

        Queries are at positions ``at`` [B, Q], keys at positions ``keys`` [B, K].
        """
        tokens = self.list_index.shape[1]
        number = self.list_index.gather(1, at.clamp(0, tokens - 1).long())  # [B, Q]
        number = torch.where((at >= 0) & (at < tokens), number, NO_UNIT)
        lists = self.lists[:, self.slots[layer]]  # [B, A, N, k]
        # the list of each query [B, A, Q, k]; any list for a query without one
        index = number.clamp(min=0)[:, None, :, None].expand(-1, lists.shape[1], -1, lists.shape[3])
        mask = unit_mask(lists.gather(2, index), keys, self.unit, tokens // self.unit + 1)
        return mask | (number < 0)[:, None, :, None]  # without a list a query sees everything


def batch_choices(selections: Sequence[Selection | None], tokens: int, device: torch.device) -> Choices | None:
    """Combine the selections of rows of at most ``tokens`` tokens; return None if no row has any.
    Raises DataError if rows differ in units, layers or heads.
    """
    used = [selection for selection in selections if selection is not None and len(selection.queries)]
    if not used:
        return None
    kinds = {(selection.unit, selection.layers, selection.chosen.shape[1]) for selection in used}
    if len(kinds) > 1:
        raise DataError(
            "rollouts of one batch selected their keys in different units, layers or heads; replay them separately"
        )
    queries, width = (max(selection.chosen.shape[dim] for selection in used) for dim in (2, 3))
    list_index = torch.full((len(selections), tokens), NO_UNIT)  # [B, T]
    # [B, S, A, N, k] for the row with most selecting queries and the longest lists
    lists = torch.full((len(selections), *used[0].chosen.shape[:2], queries, width), NO_UNIT, dtype=torch.int32)
    for row, selection in enumerate(selections):
        if selection is not None:
            count = len(selection.queries)
            list_index[row, selection.queries.long()] = torch.arange(count)
            lists[row, :, :, :count, : selection.chosen.shape[3]] = selection.chosen
    slots = {layer: slot for slot, layer in enumerate(used[0].layers)}
    return Choices(used[0].unit, slots, list_index.to(device), lists.to(device))


def selection_fault(selection: Selection, evicted_at: Tensor) -> str | None:
    """Return why a selection cannot belong to a row with ``evicted_at`` [L, H, T]; None if it can.

    The reason is a verb phrase, such as "names a unit twice, or not in order".
    """
    layers, heads, tokens = evicted_at.shape
    queries, chosen = selection.queries, selection.chosen
    form = (queries.dtype, chosen.dtype, queries.dim(), chosen.dim())
    if form != (torch.int32, torch.int32, 1, 4) or chosen.shape[2] != len(queries) or not chosen.shape[3]:
        return f"has choices of shape {tuple(chosen.shape)} for {len(queries)} queries"
    if chosen.shape[0] != len(selection.layers) or (chosen.shape[1] % max(heads, 1) and chosen.shape[1] != 1):
        expected = f"{len(selection.layers)} layers, and 1 head or a multiple of {heads}"
        return f"has choices of {chosen.shape[0]} layers and {chosen.shape[1]} heads, expected {expected}"
    if list(selection.layers) != sorted({*selection.layers} & {*range(layers)}):
        return f"has choices in layers {list(selection.layers)}, the model has {layers}"
    ordered = torch.cat([queries.new_tensor([-1]), queries, queries.new_tensor([tokens])])
    if not bool((ordered[1:] > ordered[:-1]).all()):
        return f"has selecting queries that do not rise from 0 to {tokens - 1}"
    # each unit is larger than the one before, and only NO_UNIT after the first NO_UNIT
    if bool((torch.where(chosen < 0, _LATEST, chosen).diff(dim=-1) < (chosen[..., 1:] >= 0).int()).any()):
        return "names a unit twice, or not in order"
    # divided, since a product of forged numbers may overflow
    if bool((chosen > queries[:, None] // min(selection.unit, _LATEST)).any()) or bool((chosen[..., 0] < 0).any()):
        return "lets a query select what comes after it, or nothing"
    return None


def attends_to_nothing(selection: Selection, evicted_at: Tensor) -> bool:
    """Return whether some query selected only entries that had been evicted before."""
    choices = batch_choices([selection], evicted_at.shape[2], evicted_at.device)
    keys, at = torch.arange(evicted_at.shape[2]), selection.queries[:, None]
    for layer in selection.layers if choices else ():
        evicted = evicted_at[layer]  # [H, T]
        if bool((evicted > len(keys)).all()):  # nothing was evicted, and no list is empty (``selection_fault``)
            continue
        assert choices is not None
        chosen = choices.visible(layer, selection.queries[None], keys[None])[0]  # [A, N, T]
        in_cache = (keys <= at) & (at < evicted[:, None])  # [H, N, T]
        groups = max(1, len(chosen) // len(in_cache))  # lists per KV head, if they are by query head
        if not bool((in_cache.repeat_interleave(groups, 0) & chosen).any(-1).all()):
            return True
    return False
