"""Row 8 of the calibration: how often does the fixed sequence declare a dose safe that is not?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_most
from bench.calibration.checks.intervals import ALPHA, MARGIN, passes
from bench.calibration.family import Family
from bench.calibration.streams import blocks
from kvaudit.reports.stats.rule import cleared
from kvaudit.reports.stats.tango import many_ess_tango

_DRAWS, _CLUSTERS, _ITEMS = 3_000, 60, 5
LADDERS = ((0.0, -0.01, -0.02, -0.05, -0.08), (0.0, -0.05, -0.06, -0.1), (-0.05, -0.05, -0.05), (0.0, -0.05, 0.0))


@dataclass(frozen=True)
class DoseCase(Case):
    """Drifts by dose, from the mildest to the harshest."""

    model: Family

    @property
    def name(self) -> str:
        return f"doses {','.join(f'{drift:g}' for drift in self.model.drifts)}"

    def rates(self, seed: int) -> CaseRates:
        found = 0
        first_unsafe = int(np.argmax(np.array(self.model.drifts) <= -MARGIN))
        for block in blocks(self.name, seed=seed, simulations=self.simulations, clusters=_CLUSTERS, items=_ITEMS):
            z = self.model.draw(block.rng, block.size, block.counts)
            b = many_ess_tango(z, block.counts, alpha=ALPHA)
            count = cleared(passes(b, z, block.counts, alpha=ALPHA))
            found += int(np.count_nonzero(count > first_unsafe))
        return {"cleared": found / self.simulations}


def cases(scale: Scale) -> list[DoseCase]:
    """Return ladders whose first unsafe dose comes late, early, first, or before a safe one."""
    return [DoseCase(Family(drifts, 0.1, 0.25), simulations=scale.draws(_DRAWS)) for drifts in LADDERS]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    own = [o for o in outcomes if isinstance(o.case, DoseCase)]
    return [at_most(8, "safe budget clears an unsafe dose", own, "cleared", 0.06, scale=scale)]
