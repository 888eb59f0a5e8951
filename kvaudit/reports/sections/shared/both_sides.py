"""The scores of both sides of a gated cell, item by item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvaudit.reports.records.rows import Panel, Panels
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellName
from kvaudit.reports.verdict.drift import broken_contract, paired_scores, seed_pairs, two_sides, weights_of
from kvaudit.reports.verdict.verdict import Decided, Decision


@dataclass(frozen=True)
class BothSides:
    """Scores [N] of both sides, averaged over samples and paired seeds.

    For a facet, N counts the items that both sides of some pair answered readably. ``draws`` is the number of samples
    that an item's score averages, ``samples`` of them in each of the ``*_pairs`` [S, N]; ``graded`` means that some
    sample is neither 0 nor 1.
    """

    items: tuple[str, ...]
    clusters: npt.NDArray[np.int64]  # [N] codes
    templates: tuple[str, ...]  # [N] names
    reference: Array
    candidate: Array
    reference_pairs: Array
    candidate_pairs: Array
    samples: int
    draws: int
    graded: bool

    @property
    def difference(self) -> Array:
        """Candidate minus reference [N]."""
        return self.candidate - self.reference


def both_sides(panel: Panel, comparison: Comparison, name: CellName) -> BothSides | None:
    """Return both sides of an alike, deployed or serving cell; None if its records cannot be compared."""
    pairs = seed_pairs(comparison, panel, name.arm)
    weights = [weights_of(comparison, name.estimand, name.arm, pair, name.policy) for pair in pairs]
    positive, negative = two_sides(weights)
    if not pairs or broken_contract(panel, sorted({*positive, *negative})):
        return None
    read = [~np.isnan(np.stack([panel.scores[cell] for cell in cells])) for cells in (positive, negative)]  # [S, N]
    present: npt.NDArray[np.bool_] = np.any(read[0] & read[1], axis=0)  # [N]
    candidate, reference = paired_scores(panel, weights, present)
    return BothSides(
        items=tuple(panel.items[i] for i in np.flatnonzero(present)),
        clusters=panel.clusters[present],
        templates=tuple(panel.cluster_names[code] for code in panel.clusters[present]),
        reference=reference.mean(axis=0),
        candidate=candidate.mean(axis=0),
        reference_pairs=reference,
        candidate_pairs=candidate,
        samples=panel.samples,
        draws=panel.samples * len(pairs),
        graded=panel.graded,
    )


def has_two_sides(d: Decision) -> bool:
    """Return whether a gated decision compares one pair of cells and has a number."""
    return d.gated and d.estimand in ("alike", "deployed", "serving") and d.effect is not None


def gated_sides(decided: Decided, tables: Panels) -> Iterator[tuple[Decision, BothSides]]:
    """Yield every gated cell that has a number, with both of its sides."""
    for d in decided.verdict.decisions:
        if has_two_sides(d):
            sides = both_sides(tables[d.suite, d.context_tokens], decided.comparison, d)
            if sides is not None:
                yield d, sides
