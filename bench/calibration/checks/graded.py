"""Row 10 of the calibration: false alarms, coverage and false passes of scores between 0 and 1, as judges give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_least, at_most
from bench.calibration.checks.intervals import ALPHA, MARGIN, called_as
from bench.calibration.probit import Floats
from bench.calibration.streams import blocks
from kvaudit.reports.stats.rule import Call
from kvaudit.reports.stats.tango import many_ess_tango

_ROW, _DRAWS, _ITEMS = 10, 10_000, 5
_CLUSTERS, SPREADS, _SHARES = (60, 100), (0.05, 0.2), (0.0, 0.3)
INSIDE = -0.03  # a drop that is real and within the margin
GRADED_DRIFTS = (0.0, INSIDE, -MARGIN)
GRADED_RATES = ("rejected", "covered", "passed", "failed")


@dataclass(frozen=True)
class GradedCase(Case):
    """Differences of standard deviation ``spread`` around a drift; ``shared`` of their variance is by template."""

    drift: float
    spread: float
    shared: float
    clusters: int

    @property
    def name(self) -> str:
        return f"graded drift={self.drift:g} spread={self.spread:g} shared={self.shared:g} C={self.clusters}"

    def rates(self, seed: int) -> CaseRates:
        found = np.zeros(len(GRADED_RATES))
        for block in blocks(self.name, seed=seed, simulations=self.simulations, clusters=self.clusters, items=_ITEMS):
            z = self._draw(block.rng, block.size, block.counts)
            b = many_ess_tango(z, block.counts, alpha=ALPHA, graded=True)
            called = called_as(b, z, block.counts, b.pvalue_drop, alpha=ALPHA)
            events = (
                b.pvalue < ALPHA,
                (b.low <= self.drift) & (self.drift <= b.high),
                np.isin(called, (Call.PASS, Call.PASS_NOTED)),
                called == Call.FAIL,
            )
            found += [np.count_nonzero(event) for event in events]
        return dict(zip(GRADED_RATES, (found / self.simulations).tolist(), strict=True))

    def _draw(self, rng: np.random.Generator, simulations: int, counts: npt.NDArray[np.int64]) -> Floats:
        """Draw item differences [simulations, N]."""
        common = np.repeat(rng.standard_normal((simulations, len(counts)), dtype=np.float32), counts, axis=1)
        own = rng.standard_normal(common.shape, dtype=np.float32)
        mixed = np.float32(self.shared**0.5) * common + np.float32((1 - self.shared) ** 0.5) * own
        z: Floats = np.float32(self.drift) + np.float32(self.spread) * mixed
        return np.clip(z, -1, 1)


def cases(scale: Scale) -> list[GradedCase]:
    """Return narrow and wide differences, with and without a part by template."""
    designs = list(product(GRADED_DRIFTS, SPREADS, _SHARES, _CLUSTERS))
    return [
        GradedCase(*design, simulations=scale.draws(_DRAWS))
        # clusters vary fastest, so these are of one number of them
        for design in (designs if scale.every_case else designs[:: len(_CLUSTERS)])
    ]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    own = [(o, o.case) for o in outcomes if isinstance(o.case, GradedCase)]
    still, edge = ([o for o, case in own if case.drift == drift] for drift in (0, -MARGIN))
    sharp = [o for o, case in own if case.drift == INSIDE and case.spread == min(SPREADS)]
    what = "scores between 0 and 1"
    everywhere = [o for o, _ in own]
    return [
        at_most(_ROW, f"{what}: two-sided false alarms without drift", still, "rejected", 0.06, scale=scale),
        at_least(_ROW, "same, coverage of the 95 % interval", everywhere, "covered", 0.94, scale=scale),
        at_most(_ROW, "same, coverage is not more than asked either", everywhere, "covered", 0.965, scale=scale),
        at_most(_ROW, "same, FAIL at no drift", still, "failed", ALPHA, scale=scale),
        at_most(_ROW, "same, FAIL at -3 pp with a standard error of .3 pp", sharp, "failed", ALPHA, scale=scale),
        at_most(_ROW, "same, gate passes at the margin", edge, "passed", 0.06, scale=scale),
    ]
