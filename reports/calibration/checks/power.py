"""What 300 items in 60 templates can decide: PASS of an equal model, FAIL of one that lost 8 pp (row 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reports.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_least
from reports.calibration.checks.families import family_pvalues
from reports.calibration.checks.intervals import ALPHA, called_as, passes
from reports.calibration.probit import Probit
from reports.calibration.streams import blocks
from reports.stats.rule import Call
from reports.stats.tango import many_ess_tango

DRAWS, CLUSTERS, ITEMS = 10_000, 60, 5


@dataclass(frozen=True)
class PowerCase(Case):
    """One true drift; the cell is the whole family."""

    model: Probit

    @property
    def name(self) -> str:
        return f"power drift={self.model.drift:g}"

    def rates(self, seed: int) -> CaseRates:
        passed = failed = 0
        for block in blocks(self.name, seed=seed, simulations=self.simulations, clusters=CLUSTERS, items=ITEMS):
            z = self.model.draw(block.rng, block.size, block.counts)
            b = many_ess_tango(z, block.counts, alpha=ALPHA)
            drop = family_pvalues(z[:, None], block.counts, seed=int(block.rng.integers(2**31)))[:, 0]
            passed += int(np.count_nonzero(passes(b, z, block.counts, alpha=ALPHA)))
            called = called_as(b, z, block.counts, drop, alpha=ALPHA)
            failed += int(np.count_nonzero(called == Call.FAIL))
        return {"passed": passed / self.simulations, "failed": failed / self.simulations}


def cases(scale: Scale) -> list[PowerCase]:
    """Equal, and 8 pp worse."""
    return [PowerCase(Probit(drift, 0.1, 0.25), simulations=scale.draws(DRAWS)) for drift in (0.0, -0.08)]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    """Row 9."""
    own = [(o, o.case) for o in outcomes if isinstance(o.case, PowerCase)]
    equal = [o for o, case in own if case.model.drift == 0]
    worse = [o for o, case in own if case.model.drift < 0]
    design = "300 items, 60 templates, 10 % discordant"
    return [
        at_least(9, f"PASS of an equal model: {design}", equal, "passed", 0.75, scale=scale),
        at_least(9, f"FAIL of a model 8 pp worse: {design}", worse, "failed", 0.98, scale=scale),
    ]
