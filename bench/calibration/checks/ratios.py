"""Row 15 of the calibration: how often the gate passes a model whose rate is exactly at a limit of a ratio.

The loss is spread over the items (probit answers of two arms) or caused by whole templates that break. The number of
templates is at least C_min of the limit in score units at the reference's true rate; an audit knows only the rate that
it measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_most, reported
from bench.calibration.checks.intervals import ALPHA
from bench.calibration.probit import Floats, Probit
from bench.calibration.streams import EVEN, UNEVEN, blocks
from kvaudit.reports.stats.clustered import many_totals
from kvaudit.reports.stats.ratio import points_of
from kvaudit.reports.stats.rule import clusters_required
from kvaudit.reports.stats.tango import deff_floors
from kvaudit.reports.verdict.chance import Audits, interval_rate, pass_rate

RATIO_ROW, _DRAWS, _ITEMS = 15, 2_000, 5
SPREAD, WHOLE, NONE = "spread", "whole templates", "no change"
_LIMITS = ((0.5, 1.1), (0.5, 1.2), (0.3, 1.1), (0.3, 1.25), (0.2, 1.5), (0.1, 2.0))  # reference's rate, limit
_TIMES = (1.0, 1.3, 1.7, 2.4)  # C_min
_CHURN, _QUIET = 0.1, 0.02  # of single answers: beside a spread loss or none, beside broken templates
_ROOM = 0.9  # of what two independent arms would differ in
AT_LIMIT = "gate passes a model at the limit of a ratio, spread over the items or by whole templates"
INTERVAL_AT_LIMIT = "interval of a ratio clears a model at the limit, 59 templates or more"
NO_CHANGE = "no change passes a ratio that comes to 5 pp or more, twice C_min or more, 10 % of answers differ"


@dataclass(frozen=True)
class RatioCase(Case):
    """One limit in one design; ``rate`` is the reference's."""

    rate: float
    limit: float
    loss: str
    clusters: int
    sizes: str
    samples: int
    own: float

    @property
    def allowed(self) -> float:
        """The limit in score units."""
        return float(points_of(self.limit, self.rate))

    @property
    def name(self) -> str:
        what = f"ratio rate={self.rate:g} limit={self.limit:g} {self.loss}"
        return f"{what} C={self.clusters} {self.sizes} k={self.samples} own={self.own:g}"

    def rates(self, seed: int) -> CaseRates:
        passed = within = 0.0
        for block in blocks(
            self.name, seed=seed, simulations=self.simulations, clusters=self.clusters, items=_ITEMS, sizes=self.sizes
        ):
            audits = self._audits(block.rng, block.size, block.counts)
            asked = {"margin": self.allowed, "alpha": ALPHA, "ratio": self.limit}
            passed += block.size * pass_rate(audits, **asked)
            within += block.size * interval_rate(audits, **asked)
        return {"passed": passed / self.simulations, "within": within / self.simulations}

    def _audits(self, rng: np.random.Generator, size: int, counts: npt.NDArray[np.int64]) -> Audits:
        reference, candidate = (1 - side for side in self._model().answers(rng, size, counts))
        if self.loss == WHOLE:
            broken = rng.random((size, len(counts))) < self.allowed / (1 - self.rate)
            candidate = np.where(np.repeat(broken, counts, axis=1), np.float32(1), candidate)
        z: Floats = reference - candidate
        t, own = many_totals(z, counts), many_totals(reference, counts)
        return Audits(t.sums, t.counts, t.losses + t.gains, deff_floors(z, self.samples), own.sums)

    def _model(self) -> Probit:
        drift = -self.allowed if self.loss == SPREAD else 0.0
        wanted = 1 - self.rate
        most = _ROOM * (wanted * (1 - wanted - drift) + (wanted + drift) * (1 - wanted))
        churn = _QUIET if self.loss == WHOLE else min(max(_CHURN, -drift + 0.01), most)
        return Probit(drift, churn, self.own, self.samples, wanted)


def cases(scale: Scale) -> list[RatioCase]:
    """Return models at the limit in two shapes, and models without a change."""
    found = [
        RatioCase(rate, limit, loss, clusters, sizes, samples, own, simulations=scale.draws(_DRAWS))
        for (rate, limit), times, sizes, samples in product(_LIMITS, _TIMES, (EVEN, UNEVEN), (1, 4))
        for loss, own in ((SPREAD, 0.0), (SPREAD, 0.5), (WHOLE, 0.25), (NONE, 0.25))
        for clusters in [round(times * clusters_required(float(points_of(limit, rate)), ALPHA))]
    ]
    return found if scale.every_case else found[:: len(found) // 12]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    own = [(o, o.case) for o in outcomes if isinstance(o.case, RatioCase)]
    edge = [(o, case) for o, case in own if case.loss != NONE]
    large = [o for o, case in edge if case.clusters >= clusters_required(0.05, ALPHA) and case.loss == SPREAD]
    found = [at_most(RATIO_ROW, AT_LIMIT, [o for o, _ in edge], "passed", 0.060, scale=scale)]
    return [*found, *([reported(RATIO_ROW, INTERVAL_AT_LIMIT, large, "within")] if large else [])]
