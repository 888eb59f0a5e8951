"""A judge that errs more in one arm: false passes after adjudication of the discordant pairs (row 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_most
from reports.calibration.checks.intervals import ALPHA, MARGIN
from reports.calibration.judged import Judge, concordant_sample
from reports.calibration.probit import Floats, Probit
from reports.calibration.streams import blocks
from reports.stats.clustered import cr3_variance, many_totals
from reports.stats.judges import Labelled, adjudicated_bounds
from reports.stats.tango import design_effects

_DRAWS = 4_000
CLUSTERS, ITEMS, CONCORDANT = 40, 10, 100
JUDGES = (
    (Judge(0.95, 0.90), Judge(0.95, 0.80)),
    (Judge(0.95, 0.80), Judge(0.95, 0.90)),
    (Judge(0.95, 0.90), Judge(0.85, 0.90)),
)


@dataclass(frozen=True)
class JudgeCase(Case):
    """A judge for the reference and one for the candidate."""

    model: Probit
    judges: tuple[Judge, Judge]

    @property
    def name(self) -> str:
        one, two = self.judges
        return (
            f"judge reference={one.sensitivity:g},{one.specificity:g} candidate={two.sensitivity:g},{two.specificity:g}"
        )

    def rates(self, seed: int) -> CaseRates:
        passed = 0
        for block in blocks(self.name, seed=seed, simulations=self.simulations, clusters=CLUSTERS, items=ITEMS):
            answers = self.model.answers(block.rng, block.size, block.counts)
            said = np.stack([j.labels(block.rng, y) for j, y in zip(self.judges, answers, strict=True)])
            apart, z = said[0] != said[1], answers[1] - answers[0]
            sample = concordant_sample(block.rng, apart, z, size=CONCORDANT)
            labelled = label(apart, z, block.counts, sample)
            bounds = adjudicated_bounds(labelled, df=CLUSTERS - 1, confidence=1 - ALPHA)
            passed += int(np.count_nonzero(bounds.low > -MARGIN))
        return {"passed": passed / self.simulations}


def label(apart: npt.NDArray[np.bool_], z: Floats, counts: npt.NDArray[np.int64], sample: Floats) -> Labelled:
    """What humans saw of pairs [B, N]: every one that the judge parts, and a sample [B, F] of the others."""
    t = many_totals(np.where(apart, z, np.float32(0)), counts)
    return Labelled(
        losses=t.losses,
        gains=t.gains,
        items=np.array(float(counts.sum())),
        deff=design_effects(t, cr3_variance(t.residuals, t.counts), floor=1.0),
        sample_losses=(sample < 0).sum(axis=1).astype(np.float64),
        sample_gains=(sample > 0).sum(axis=1).astype(np.float64),
        sample_size=np.array(float(sample.shape[1])),
        weight=(~apart).mean(axis=1),
    )


def cases(scale: Scale) -> list[JudgeCase]:
    """Every pair of judges at a drift of exactly the margin."""
    return [JudgeCase(Probit(-MARGIN, 0.1, 0.25), judges, simulations=scale.draws(_DRAWS)) for judges in JUDGES]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    """Row 7."""
    own = [o for o in outcomes if isinstance(o.case, JudgeCase)]
    what = "adjudicated interval clears a drift at the margin, judge errs unevenly"
    return [at_most(7, what, own, "passed", 0.05, scale=scale)]
