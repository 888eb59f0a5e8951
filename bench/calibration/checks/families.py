"""Row 5 of the calibration: false alarms of many cells and power to see a bad one, max-T against Holm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_least, at_most
from bench.calibration.checks.intervals import ALPHA
from bench.calibration.family import Family
from bench.calibration.probit import Floats
from bench.calibration.streams import blocks
from kvaudit.reports.stats.clustered import many_totals
from kvaudit.reports.stats.signflip import flip_statistics, holm, max_t_pvalues, signs, studentised
from kvaudit.reports.stats.tango import many_ess_tango

_DRAWS, FLIPS = 4_000, 999  # the report flips 9,999 times
CELLS_AT_ONCE = 500  # whose flipped statistics are held in memory
_SIZES, _CLUSTERS, _ITEMS, BAD = (6, 12, 24), 30, 5, -0.07


@dataclass(frozen=True)
class FamilyCase(Case):
    """The drifts of the cells of one family; a bad cell comes first."""

    model: Family

    @property
    def name(self) -> str:
        return f"family K={len(self.model.drifts)} first={self.model.drifts[0]:g}"

    def rates(self, seed: int) -> CaseRates:
        found = np.zeros(3)
        good = np.array(self.model.drifts) == 0
        for block in blocks(self.name, seed=seed, simulations=self.simulations, clusters=_CLUSTERS, items=_ITEMS):
            z = self.model.draw(block.rng, block.size, block.counts)
            rejected = family_pvalues(z, block.counts, seed=int(block.rng.integers(2**31))) < ALPHA
            beside = holm_pvalues(many_ess_tango(z, block.counts, alpha=ALPHA).pvalue_drop) < ALPHA
            found += [rejected[:, good].any(axis=1).sum(), rejected[:, 0].sum(), beside[:, 0].sum()]
        alarms, power, beside = (found / self.simulations).tolist()
        return {"any good cell": alarms, "first cell": power, "beyond Holm": power - beside}


def family_pvalues(z: Floats, counts: npt.NDArray[np.int64], *, seed: int) -> npt.NDArray[np.float64]:
    """Return max-T p-values [simulations, K] of a drop in each cell of z [simulations, K, N]."""
    sums, sizes = many_totals(z, counts)[:2]
    patterns, exact = signs(len(sizes), FLIPS, seed)
    parts = np.array_split(sums, max(1, sums[..., 0].size // CELLS_AT_ONCE))
    return np.concatenate(
        [max_t_pvalues(studentised(s, sizes), flip_statistics(s, sizes, patterns), exact=exact) for s in parts]
    )


def holm_pvalues(pvalues: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return Holm's adjustment of each row of p-values [simulations, K]."""
    return np.array([holm(row) for row in pvalues.tolist()])


def cases(scale: Scale) -> list[FamilyCase]:
    """Return every size, without and with a bad cell."""
    return [
        FamilyCase(Family((first, *(0.0,) * (size - 1)), 0.1, 0.25), simulations=scale.draws(_DRAWS))
        for size in (_SIZES if scale.every_case else _SIZES[:2])
        for first in (0.0, BAD)
    ]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    own = [(o, o.case) for o in outcomes if isinstance(o.case, FamilyCase)]
    bad = [o for o, case in own if case.model.drifts[0] < 0]
    return [
        at_most(5, "max-T alarms in a good cell", [o for o, _ in own], "any good cell", 0.06, scale=scale),
        at_least(5, "power of max-T beyond Holm's, one bad cell", bad, "beyond Holm", 0.0, scale=scale),
    ]
