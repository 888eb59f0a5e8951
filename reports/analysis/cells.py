"""What stands beside the gate, cell by cell.

Churn (E7): losses and gains cancel in the drift, a user meets both. Concentration: a drop spread over all templates and
one template that broke are different failures. Seeds: how far the drift of paired training seeds lies apart beyond what
their items do to it; at three seeds the interval is so wide that it is printed beside the number. Reach: the smallest
drop that this family finds with power .8, (critical + t_.80) * error: the quantile of max-T over its cells, and the
standard error that a cell's own one-sided bounds imply. Simulated at .74 to .78; sizes for the next run come from
``kvaudit plan``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.analysis.results import CellChurn, CellConcentration, ItemLoss, Reach, SeedSpread, TemplateLoss
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.drift import broken_contract, paired_scores, seed_pairs, two_sides, weights_of
from kvaudit.reports.drift.results import CellName, Contrast
from kvaudit.reports.gate.verdict import Adjustment, Decision
from kvaudit.reports.records.rows import CellKey, Panel, Panels
from kvaudit.reports.stats.churn import churn_of, concentration_of, flips
from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.stats.seeds import seed_spread


@dataclass(frozen=True)
class BothSides:
    """Scores [N] of both sides, averaged over samples and paired seeds; ``*_best`` count unscored samples as 1.

    Of a facet N are the items that both sides of some pair answered in a form that can be read, and ``*_best`` are the
    scores. ``draws`` is how many samples an item's score averages, ``samples`` of them in each of the ``*_pairs``
    [S, N]; ``graded`` says that some sample is neither 0 nor 1.
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
    graded: bool

    @property
    def difference(self) -> Array:
        """Candidate minus reference [N]."""
        return self.candidate - self.reference


def both_sides(panel: Panel, comparison: Comparison, name: CellName) -> BothSides | None:
    """Both sides of a two-sided estimand (E1, E2, E4); None where the cells cannot be compared."""
    pairs = seed_pairs(comparison, panel, name.arm)
    weights = [weights_of(comparison, name.estimand, name.arm, pair, name.policy) for pair in pairs]
    positive, negative = two_sides(weights)
    if not pairs or broken_contract(panel, sorted({*positive, *negative})):
        return None
    present: npt.NDArray[np.bool_] = np.any(_read(panel, positive) & _read(panel, negative), axis=0)
    kept = np.flatnonzero(present)
    candidate, reference = paired_scores(panel, weights, present)

    def best(scores: Array, cells: list[CellKey]) -> Array:
        if name.suite not in comparison.facets:  # whose scores leave out what could not be read
            scores = np.stack([panel.best[cell][present] for cell in cells])
        found: Array = scores.mean(axis=0)
        return found

    return BothSides(
        items=tuple(panel.items[i] for i in kept),
        clusters=panel.clusters[present],
        templates=tuple(panel.cluster_names[code] for code in panel.clusters[present]),
        reference=reference.mean(axis=0),
        candidate=candidate.mean(axis=0),
        reference_best=best(reference, negative),
        candidate_best=best(candidate, positive),
        reference_pairs=reference,
        candidate_pairs=candidate,
        samples=panel.samples,
        draws=panel.samples * len(pairs),
        graded=panel.graded,
    )


def _read(panel: Panel, cells: list[CellKey]) -> npt.NDArray[np.bool_]:
    """[S, N]: which items have an answer that could be read."""
    return ~np.isnan(np.stack([panel.scores[cell] for cell in cells]))


def name_of_cell(d: Decision) -> CellName:
    """The name of a decision's cell."""
    return CellName(d.estimand, d.arm, d.policy, d.suite, d.context_tokens)


def two_sided(d: Decision) -> bool:
    """Whether a decision is about a single pair of cells that has a number."""
    return d.gated and d.estimand in ("E1", "E2", "E4") and d.effect is not None


def cell_churn(comparison: Comparison, tables: Panels, decisions: Iterable[Decision]) -> Iterator[CellChurn]:
    """The churn of every gated cell that has a number."""
    for d in decisions:
        found = both_sides(tables[d.suite, d.context_tokens], comparison, name_of_cell(d)) if two_sided(d) else None
        if found is not None:
            pairs = found.reference_pairs, found.candidate_pairs
            moved = flips(*pairs, samples=1 if found.graded else found.samples)
            any_seed = churn_of(found.reference, found.candidate, samples=1 if found.graded else found.draws)
            yield CellChurn(
                cell=name_of_cell(d),
                drift=_drift(found, d),
                losses=moved.lost,
                gains=moved.won,
                churn=moved.churn,
                rerun=moved.rerun,
                draws=any_seed.draw_churn,
                draws_rerun=any_seed.rerun_churn,
            )


def _drift(found: BothSides, d: Decision) -> float:
    """The gate's own number to the last bit, so that no tie is rounded two ways; not where people gave that number."""
    own = float(found.difference.mean())
    return d.effect.estimate if d.effect and math.isclose(own, d.effect.estimate, abs_tol=1e-9) else own


MOST_ITEMS = 20
MOST_TEMPLATES = 20


def cell_concentration(
    comparison: Comparison, tables: Panels, decisions: Iterable[Decision]
) -> Iterator[CellConcentration]:
    """Losses by template and by item of every gated cell that lost anything."""
    for d in decisions:
        found = both_sides(tables[d.suite, d.context_tokens], comparison, name_of_cell(d)) if two_sided(d) else None
        if found is not None and (found.difference < 0).any():
            yield _cell(found, name_of_cell(d))


def _cell(found: BothSides, name: CellName) -> CellConcentration:
    z = found.difference
    by_template = concentration_of(z, np.array(found.templates, dtype=object).astype(str))
    worst = [i for i in np.argsort(z, kind="stable") if z[i] < 0][:MOST_ITEMS]
    lost = [entry for entry in by_template.clusters if entry.losses > 0]
    return CellConcentration(
        cell=name,
        losses=by_template.losses,
        gini=by_template.gini,
        chance=by_template.chance,
        deff=cr3_effect(z, found.clusters).deff,
        carrying_half=by_template.carrying_half,
        n_templates=len(by_template.clusters),
        n_losing=len(lost),
        templates=tuple(
            TemplateLoss(str(t.label), int(t.items), t.losses, t.gains, t.share) for t in lost[:MOST_TEMPLATES]
        ),
        dominant=tuple(str(label) for label in by_template.dominant),
        items=tuple(ItemLoss(found.items[i], found.templates[i], float(-z[i])) for i in worst),
    )


def seed_spreads(contrasts: Iterable[Contrast], decisions: Iterable[Decision]) -> Iterator[SeedSpread]:
    """The drift of every gated cell seed by seed."""
    known = {(c.estimand, c.arm, c.policy, c.suite, c.context_tokens): c for c in contrasts}
    for d in decisions:
        c = known.get((d.estimand, d.arm, d.policy, d.suite, d.context_tokens))
        if d.gated and d.effect and c and c.seed_estimates:
            found = seed_spread(c.seed_estimates, c.seed_noise)
            low, sd, high = found or (None, None, None)
            yield SeedSpread(name_of_cell(d), c.seeds, c.seed_estimates, sd, low, high)


POWER = 0.8


def reached(decisions: Iterable[Decision], adjustment: Adjustment) -> Iterator[Reach]:
    """The reach of every gated cell that has a number and a margin."""
    for d in decisions:
        if d.gated and d.effect and d.margin is not None:
            e = d.effect
            df = e.n_clusters - 1
            error = (e.upper - e.lower) / (2 * float(special.stdtrit(df, 1 - e.alpha)))
            found = error * (adjustment.critical + float(special.stdtrit(df, POWER)))
            yield Reach(name_of_cell(d), d.margin, e.n_clusters, found, d.larger)
