"""Flips: items whose score or facet differs between the two sides of a contrast.

Sides, pairs of seeds and scores are those of ``reports.verdict.drift``, so flips add up to its losses and gains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from kvaudit.core.facets import FACETS
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import FACET_COLUMNS, SCORE, CellKey, Panel, RecordPlace, facet_scores
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.drift import seed_pairs, sides, two_sides, weights_of

KINDS = ("alike", "deployed", "serving")  # contrasts that have two sides


class Change(NamedTuple):
    """A metric of an item on both sides: mean over its draws, 1 if all were as wanted."""

    metric: str  # SCORE or the name of a facet
    reference: float
    candidate: float

    @property
    def lost(self) -> bool:
        """Whether the candidate is worse."""
        return self.candidate < self.reference


@dataclass(frozen=True)
class Flip:
    """One item on the two sides of a contrast, with the metrics that differ, the score first."""

    kind: str
    suite: str
    context_tokens: int
    item: str
    candidate: CellKey
    reference: CellKey
    changes: tuple[Change, ...]


def kinds_shown(data: RunData) -> frozenset[str]:
    """Return the contrasts whose flips are shown: deployed only if the gate uses it."""
    estimands = set(data.spec.gate.estimands)
    return frozenset(kind for kind in KINDS if kind != "deployed" or estimands & {"deployed", "worst"})


def flip_key(kind: str, suite: str, context_tokens: int, item: str, candidate: CellKey) -> str:
    """Return the key of a flip in links, the same in every view of a run."""
    place = (kind, suite, context_tokens, item, *candidate)
    return hashlib.sha256(json.dumps(place).encode()).hexdigest()[:10]


def flips_of(data: RunData, comparison: Comparison) -> Iterator[Flip]:
    """Yield every flip of a run, for the contrasts of kinds_shown."""
    kinds = kinds_shown(data)
    for suite in comparison.suites:
        names = [name for name in FACETS if f"{suite}.{name}" in comparison.facets]
        for context in comparison.lengths[suite]:
            tables = {SCORE: data.panels.get((suite, context))}
            tables |= {name: data.panels.get((f"{suite}.{name}", context)) for name in names}
            panels = {name: panel for name, panel in tables.items() if panel is not None}
            for estimand, arm, policy in sides(comparison) if panels else ():
                is_same_difference = estimand == "deployed" and comparison.is_uncompressed(policy)
                if estimand in kinds and not is_same_difference:
                    yield from _of_side(comparison, panels, estimand, arm, policy)


def _of_side(
    comparison: Comparison, tables: Mapping[str, Panel], estimand: str, arm: str, policy: str
) -> Iterator[Flip]:
    """The flips of one contrast at one length, by pair of seeds, sorted by item."""
    panel = tables[SCORE]
    for pair in seed_pairs(comparison, panel, arm):
        (candidate,), (reference,) = two_sides([weights_of(comparison, estimand, arm, pair, policy)])
        changes: dict[str, list[Change]] = {}
        for metric, table in tables.items():
            for item, change in _changes(metric, table, candidate, reference):
                changes.setdefault(item, []).append(change)
        for item in sorted(changes):
            yield Flip(estimand, panel.suite, panel.context_tokens, item, candidate, reference, tuple(changes[item]))


def _changes(metric: str, table: Panel, candidate: CellKey, reference: CellKey) -> Iterator[tuple[str, Change]]:
    """Items that differ in one metric; an answer that could not be read is neither lost nor gained."""
    if candidate not in table.scores or reference not in table.scores:
        return
    candidate_scores, reference_scores = table.scores[candidate], table.scores[reference]
    # comparisons with NaN (could not be read) are false
    for i in np.flatnonzero((candidate_scores < reference_scores) | (candidate_scores > reference_scores)):
        yield table.items[i], Change(metric, float(reference_scores[i]), float(candidate_scores[i]))


class Pair(NamedTuple):
    """The records with the two answers of a flip."""

    reference: RecordPlace
    candidate: RecordPlace


def places_of(data: RunData, flips: Sequence[Flip]) -> list[Pair]:
    """Return two records per flip: of several draws those that differ most in the first change."""
    keys = ["suite", "context_tokens", "item_id", "arm", "train_seed", "policy"]
    rows = data.records.loc[data.records["item_id"].isin({flip.item for flip in flips})]
    rows = rows.sort_values("sample_index", kind="stable")
    rows_by_cell: dict[tuple[object, ...], list[int]] = {}
    for n, key in enumerate(zip(*(rows[name].tolist() for name in keys), strict=True)):
        rows_by_cell.setdefault(key, []).append(n)
    files, lines = rows["file"].tolist(), rows["line"].tolist()
    worth = {SCORE: rows[SCORE].to_numpy(dtype=np.float64)} | {
        n: facet_scores(rows[FACET_COLUMNS[n]], n) for n in FACETS
    }

    def place(flip: Flip, cell: CellKey, *, highest: bool) -> RecordPlace:
        draws = rows_by_cell[flip.suite, flip.context_tokens, flip.item, *cell]
        value = worth[flip.changes[0].metric]
        read = [n for n in draws if not np.isnan(value[n])] or draws  # readable draws, if any
        chosen = (max if highest else min)(read, key=lambda n: value[n])
        return str(files[chosen]), int(lines[chosen])

    pairs = []
    for flip in flips:
        is_lost = flip.changes[0].lost
        reference = place(flip, flip.reference, highest=is_lost)
        pairs.append(Pair(reference, place(flip, flip.candidate, highest=not is_lost)))
    return pairs


def severity_rank(flip: Flip) -> int:
    """Return 0 if safety was lost, 1 if anything else was lost, 2 if all changes are gains."""
    metrics = [change.metric for change in flip.changes if change.lost]
    return 0 if any(name != SCORE and FACETS[name].kind == "safety" for name in metrics) else 1 if metrics else 2


def interleave_cells(flips: Sequence[Flip]) -> list[int]:
    """Return the numbers of the flips, one per cell in turn, lost safety first, so any first few cover every cell."""
    cells: dict[Hashable, list[int]] = {}
    for number in sorted(range(len(flips)), key=lambda n: severity_rank(flips[n])):
        flip = flips[number]
        cells.setdefault((flip.kind, flip.suite, flip.candidate.arm, flip.candidate.policy), []).append(number)
    return [number for turn in zip_longest(*cells.values()) for number in turn if number is not None]
