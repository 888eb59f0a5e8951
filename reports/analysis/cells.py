"""Both sides of a contrast, item by item: what the analyses beside the gate start from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.analysis.results import CellName
from reports.drift.comparison import Comparison
from reports.drift.contrast import ESTIMANDS, broken_contract, two_sides
from reports.drift.drift import seed_pairs
from reports.gate.verdict import Decision
from reports.records.panel import CellKey, Panel

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BothSides:
    """Scores [N] of both sides, averaged over samples and paired seeds; ``*_best`` count unscored samples as 1.

    ``draws`` is how many samples an item's score averages, ``samples`` of them in each of the ``*_pairs`` [S, N].
    """

    items: tuple[str, ...]
    clusters: npt.NDArray[np.int64]  # [N] codes
    templates: tuple[str, ...]  # [N] names
    reference: Array
    candidate: Array
    reference_best: Array
    candidate_best: Array
    reference_pairs: Array
    candidate_pairs: Array
    samples: int
    draws: int

    @property
    def difference(self) -> Array:
        """Candidate minus reference [N]."""
        return self.candidate - self.reference


def sides(panel: Panel, comparison: Comparison, name: CellName) -> BothSides | None:
    """Both sides of a two-sided estimand (E1, E2, E4); None where the cells cannot be compared."""
    pairs = seed_pairs(comparison, panel, name.arm)
    weights = [ESTIMANDS[name.estimand](name.arm, comparison.reference, pair, name.policy) for pair in pairs]
    positive, negative = two_sides(weights)
    if not pairs or broken_contract(panel, sorted({*positive, *negative})):
        return None
    present = ~np.isnan(panel.scores[positive[0]])
    kept = np.flatnonzero(present)

    def mean(table: str, cells: list[CellKey]) -> Array:
        found: Array = np.mean([getattr(panel, table)[cell][present] for cell in cells], axis=0)
        return found

    return BothSides(
        items=tuple(panel.items[i] for i in kept),
        clusters=panel.clusters[present],
        templates=tuple(panel.cluster_names[code] for code in panel.clusters[present]),
        reference=mean("scores", negative),
        candidate=mean("scores", positive),
        reference_best=mean("best", negative),
        candidate_best=mean("best", positive),
        reference_pairs=np.stack([panel.scores[cell][present] for cell in negative]),
        candidate_pairs=np.stack([panel.scores[cell][present] for cell in positive]),
        samples=panel.samples,
        draws=panel.samples * len(pairs),
    )


def name_of_cell(d: Decision) -> CellName:
    """The name of a decision's cell."""
    return CellName(d.estimand, d.arm, d.policy, d.suite, d.context_tokens)


def two_sided(d: Decision) -> bool:
    """Whether a decision is about a single pair of cells that has a number."""
    return d.gated and d.estimand in ("E1", "E2", "E4") and d.effect is not None
