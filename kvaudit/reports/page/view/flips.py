"""The pairs behind a report's losses and gains: an item whose score or facet differs between the sides of a contrast.

The sides, the pairs of seeds and the scores are those of ``kvaudit.reports.drift``, so that what is lost and gained
here is what its contrasts count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvaudit.core.facets import FACETS
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import FACET_COLUMNS, SCORE, CellKey, Panel, RecordPlace, facet_scores
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.drift import seed_pairs, sides, two_sides, weights_of

KINDS = ("alike", "deployed", "serving")  # of contrasts: those that have two sides


class Change(NamedTuple):
    """What an item had on both sides: mean over its draws, 1 where all were as wanted."""

    metric: str  # SCORE or the name of a facet
    reference: float
    candidate: float

    @property
    def lost(self) -> bool:
        """Whether the candidate has less of what is wanted."""
        return self.candidate < self.reference


@dataclass(frozen=True)
class Flip:
    """One item on the two sides of a contrast, with everything in which they differ, the score first."""

    kind: str
    suite: str
    context_tokens: int
    item: str
    candidate: CellKey
    reference: CellKey
    changes: tuple[Change, ...]


def kinds_shown(data: RunData) -> frozenset[str]:
    """The contrasts whose flips are shown: candidates as deployed where the gate asks for them."""
    asked = set(data.spec.gate.estimands)
    return frozenset(kind for kind in KINDS if kind != "deployed" or asked & {"deployed", "worst"})


def flip_key(kind: str, suite: str, context_tokens: int, item: str, candidate: CellKey) -> str:
    """What a link names a flip by; the same in every view of a run."""
    where = (kind, suite, context_tokens, item, *candidate)
    return hashlib.sha256(json.dumps(where).encode()).hexdigest()[:10]


def flips_of(data: RunData, comparison: Comparison) -> Iterator[Flip]:
    """Every flip of a run: arms served alike, policies against none, and candidates as deployed where the gate asks."""
    kinds = kinds_shown(data)
    for suite in comparison.suites:
        names = [name for name in FACETS if f"{suite}.{name}" in comparison.facets]
        for context in comparison.lengths[suite]:
            tables = {SCORE: data.panels.get((suite, context))}
            tables |= {name: data.panels.get((f"{suite}.{name}", context)) for name in names}
            known = {name: panel for name, panel in tables.items() if panel is not None}
            for estimand, arm, policy in sides(comparison) if known else ():
                alike = estimand == "deployed" and comparison.is_uncompressed(policy)
                if estimand in kinds and not alike:
                    yield from _of_side(comparison, known, estimand, arm, policy)


def _of_side(
    comparison: Comparison, tables: Mapping[str, Panel], estimand: str, arm: str, policy: str
) -> Iterator[Flip]:
    """The flips of one contrast at one length, pair of seeds by pair of seeds, in the order of the items."""
    panel = tables[SCORE]
    for pair in seed_pairs(comparison, panel, arm):
        (candidate,), (reference,) = two_sides([weights_of(comparison, estimand, arm, pair, policy)])
        found: dict[str, list[Change]] = {}
        for metric, table in tables.items():
            for item, change in _changes(metric, table, candidate, reference):
                found.setdefault(item, []).append(change)
        for item in sorted(found):
            yield Flip(estimand, panel.suite, panel.context_tokens, item, candidate, reference, tuple(found[item]))


def _changes(metric: str, table: Panel, candidate: CellKey, reference: CellKey) -> Iterator[tuple[str, Change]]:
    """Items that differ in one metric; what could not be read on a side is neither lost nor gained."""
    if candidate not in table.scores or reference not in table.scores:
        return
    new, old = table.scores[candidate], table.scores[reference]
    # NaN is neither below nor above
    for i in np.flatnonzero((new < old) | (new > old)):
        yield table.items[i], Change(metric, float(old[i]), float(new[i]))


class Pair(NamedTuple):
    """Where the two answers of a flip stand."""

    reference: RecordPlace
    candidate: RecordPlace


def places_of(data: RunData, flips: Sequence[Flip]) -> list[Pair]:
    """Of every flip the two records that show it: of several draws those furthest apart in what changed first."""
    keys = ["suite", "context_tokens", "item_id", "arm", "train_seed", "policy"]
    rows = data.records.loc[data.records["item_id"].isin({flip.item for flip in flips})]
    rows = rows.sort_values("sample_index", kind="stable")
    where: dict[tuple[object, ...], list[int]] = {}
    for n, key in enumerate(zip(*(rows[name].tolist() for name in keys), strict=True)):
        where.setdefault(key, []).append(n)
    files, lines = rows["file"].tolist(), rows["line"].tolist()
    worth = {SCORE: rows[SCORE].to_numpy(dtype=np.float64)} | {
        n: facet_scores(rows[FACET_COLUMNS[n]], n) for n in FACETS
    }

    def place(flip: Flip, cell: CellKey, *, highest: bool) -> RecordPlace:
        draws = where[flip.suite, flip.context_tokens, flip.item, *cell]
        value = worth[flip.changes[0].metric]
        read = [n for n in draws if not np.isnan(value[n])] or draws  # those that could be read, if any
        chosen = (max if highest else min)(read, key=lambda n: value[n])
        return str(files[chosen]), int(lines[chosen])

    lost = [(flip, flip.changes[0].lost) for flip in flips]
    return [
        Pair(place(flip, flip.reference, highest=is_lost), place(flip, flip.candidate, highest=not is_lost))
        for flip, is_lost in lost
    ]
