"""Rows 1 to 3 of the calibration: false alarms, false passes and coverage of the gate's interval and rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_least, at_most, mean_between, reported
from bench.calibration.probit import Floats, Probit
from bench.calibration.streams import blocks
from kvaudit.reports.stats.clustered import cr3_variance, many_totals, t_bounds
from kvaudit.reports.stats.effect import Bounds
from kvaudit.reports.stats.rule import Call, calls, clusters_required, effective_clusters, shows_margin, too_uneven
from kvaudit.reports.stats.tango import many_ess_tango

MARGIN, ALPHA, RELEASE_ALPHA = 0.05, 0.05, 0.025
_DRAWS = 10_000
DRIFTS = (0.0, -MARGIN / 2, -MARGIN, -1.6 * MARGIN)
_CLUSTERS, _ITEMS, _SAMPLES = (20, 60, 100), (5, 10), (1, 4, 8)
DISCORDANCES, OWN = (0.02, 0.06, 0.1, 0.2), (0.0, 0.25, 0.5)
RATE = 0.85
BEYOND = (  # reference rate, margin, discordance
    (0.6, 0.05, 0.1),
    (0.6, 0.05, 0.2),
    (0.95, 0.05, 0.08),
    (0.98, 0.03, 0.04),
    (RATE, 0.03, 0.05),
    (RATE, 0.03, 0.1),
    (RATE, 0.1, 0.15),
)
RATES = ("rejected", "covered", "within", "within release", "passed", "rejected by CR3-t")
NEAR_LEVEL = (0.045, 0.055)
FALSE_ALARMS = "two-sided false alarms without drift, any design"
GATE_MEAN, GATE_MOST = (f"gate passes at the margin, C >= C_min, {which}" for which in ("mean", "any design"))
RELEASE_MOST = "same at the release level .025"
BEYOND_MOST = "interval clears a drift at the margin, other rates and margins"
COVERAGE = "coverage of the 95 % interval, any drift and design"
SIX = (
    (20, 5, 0.1, 1, 0.25),
    (20, 10, 0.2, 8, 0.5),
    (60, 5, 0.06, 1, 0.0),
    (60, 5, 0.1, 4, 0.5),
    (100, 5, 0.2, 1, 0.5),
    (100, 10, 0.1, 8, 0.25),
)


@dataclass(frozen=True)
class IntervalCase(Case):
    """One drift in one design of the probit model."""

    model: Probit
    clusters: int
    items: int  # per cluster, on average
    margin: float = MARGIN

    @property
    def name(self) -> str:
        m = self.model
        return (
            f"interval margin={self.margin:g} drift={m.drift:g} reference={m.reference:g} C={self.clusters} "
            f"items={self.items} discordance={m.discordance:g} k={m.samples} own={m.own_by_cluster:g}"
        )

    def rates(self, seed: int) -> CaseRates:
        found = np.zeros(len(RATES))
        drift = self.model.drift
        for block in blocks(
            self.name, seed=seed, simulations=self.simulations, clusters=self.clusters, items=self.items
        ):
            z = self.model.draw(block.rng, block.size, block.counts)
            bounds = many_ess_tango(z, block.counts, samples=self.model.samples, alpha=ALPHA)
            events = (
                bounds.pvalue < ALPHA,
                (bounds.low <= drift) & (drift <= bounds.high),
                bounds.lower > -self.margin,
                bounds.low > -self.margin,  # one-sided at .025 is two-sided at .05
                passes(bounds, z, block.counts, alpha=ALPHA, margin=self.margin),
                _plain_pvalues(z, block.counts) < ALPHA,
            )
            found += [np.count_nonzero(event) for event in events]
        return dict(zip(RATES, (found / self.simulations).tolist(), strict=True))


def _plain_pvalues(z: Floats, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return p-values of CR3-t, which also serves values outside [-1, 1]."""
    t = many_totals(z, counts)
    return t_bounds(t.mean, cr3_variance(t.residuals, t.counts), len(counts) - 1, alpha=ALPHA).pvalue


def passes(
    b: Bounds, z: Floats, counts: npt.NDArray[np.int64], *, alpha: float, margin: float = MARGIN
) -> npt.NDArray[np.bool_]:
    """Return which cells with these bounds and item differences z [..., N] the gate passes, also with a note."""
    called = called_as(b, z, counts, b.pvalue_drop, alpha=alpha, margin=margin)
    return np.isin(called, (Call.PASS, Call.PASS_NOTED))


def called_as(
    b: Bounds,
    z: Floats,
    counts: npt.NDArray[np.int64],
    pvalue_drop: npt.NDArray[np.float64],
    *,
    alpha: float,
    margin: float = MARGIN,
) -> npt.NDArray[np.int8]:
    """Return the gate's status of each cell; the template rule is computed only if the interval would pass."""
    shown = np.asarray(b.lower > -margin)
    shown[shown] = shows_margin(many_totals(z[shown], counts).sums, counts, margin=margin, alpha=alpha)
    return calls(
        b.lower,
        b.upper,
        pvalue_drop,
        clusters=effective_clusters(counts),
        uneven=too_uneven(counts, margin, alpha),
        shown=shown,
        margin=margin,
        alpha=alpha,
    )


def cases(scale: Scale) -> list[IntervalCase]:
    """Return every drift that is possible with a design's discordance."""
    designs = tuple(product(_CLUSTERS, _ITEMS, DISCORDANCES, _SAMPLES, OWN)) if scale.every_case else SIX
    asked = [
        IntervalCase(Probit(drift, discordance, own, samples), clusters, items, simulations=scale.draws(_DRAWS))
        for clusters, items, discordance, samples, own in designs
        for drift in DRIFTS
        if discordance > -drift
    ]
    beyond = [
        IntervalCase(
            Probit(-margin, discordance, 0.25, samples, rate), clusters, 5, margin, simulations=scale.draws(_DRAWS)
        )
        for (rate, margin, discordance), samples, clusters in product(BEYOND, (1, 8), _CLUSTERS)
    ]
    return asked + (beyond if scale.every_case else beyond[:2])


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    """Return the figures of rows 1 to 3."""
    own = [(o, o.case) for o in outcomes if isinstance(o.case, IntervalCase) and not _is_beyond(o.case)]
    still = [o for o, case in own if case.model.drift == 0]
    edge = [(o, case) for o, case in own if case.model.drift == -MARGIN]
    everywhere = [o for o, _ in edge]
    required = clusters_required(MARGIN, ALPHA)
    enough, few = ([o for o, case in edge if (case.clusters >= required) is is_enough] for is_enough in (True, False))
    any_drift, any_other = [o for o, _ in own], [o for o in outcomes if _is_beyond(o.case)]
    return [
        at_most(1, FALSE_ALARMS, still, "rejected", 0.0565, scale=scale),
        reported(1, "same by CR3-t, as for interactions", still, "rejected by CR3-t"),
        mean_between(2, "interval clears a drift at the margin, mean", everywhere, "within", NEAR_LEVEL, scale=scale),
        at_most(2, "interval clears a drift at the margin, any design", everywhere, "within", 0.066, scale=scale),
        at_most(2, RELEASE_MOST, everywhere, "within release", 0.034, scale=scale),
        mean_between(2, GATE_MEAN, enough, "passed", (0.0, ALPHA), scale=scale),
        at_most(2, GATE_MOST, enough, "passed", 0.060, scale=scale),
        at_most(2, "gate passes at the margin, C < C_min", few, "passed", 0.0, scale=scale),
        reported(2, BEYOND_MOST, any_other, "within"),
        at_least(3, COVERAGE, any_drift, "covered", 0.943, scale=scale),
    ]


def _is_beyond(case: Case) -> bool:
    return isinstance(case, IntervalCase) and (case.margin, case.model.reference) != (MARGIN, RATE)
