"""The recipe claim: false alarms over training seeds that really differ (row 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from reports.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_most
from reports.calibration.checks.intervals import ALPHA
from reports.calibration.family import Seeded
from reports.calibration.streams import blocks
from reports.stats.seeds import many_recipe_effects

_DRAWS = 4_000
SEEDS, DEVIATIONS, CLUSTERS, ITEMS = (3, 5, 8), (0.0, 0.02, 0.04), 30, 5


@dataclass(frozen=True)
class RecipeCase(Case):
    """A number of seeds and how far they scatter."""

    model: Seeded

    @property
    def name(self) -> str:
        return f"recipe S={self.model.seeds} deviation={self.model.deviation:g}"

    def rates(self, seed: int) -> CaseRates:
        rejected = 0
        for block in blocks(self.name, seed=seed, simulations=self.simulations, clusters=CLUSTERS, items=ITEMS):
            z = self.model.draw(block.rng, block.size, block.counts)
            rejected += int(np.count_nonzero(many_recipe_effects(z, block.counts, alpha=ALPHA).pvalue < ALPHA))
        return {"rejected": rejected / self.simulations}


def cases(scale: Scale) -> list[RecipeCase]:
    """Every number of seeds and scatter."""
    return [
        RecipeCase(Seeded(seeds, deviation, 0.1, 0.25), simulations=scale.draws(_DRAWS))
        for seeds, deviation in product(SEEDS, DEVIATIONS)
    ]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    """Row 6."""
    own = [o for o in outcomes if isinstance(o.case, RecipeCase)]
    return [at_most(6, "recipe false alarms, 3 to 8 seeds of 0 to 4 pp scatter", own, "rejected", 0.06, scale=scale)]
