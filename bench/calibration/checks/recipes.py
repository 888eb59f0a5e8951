"""Row 6 of the calibration: false alarms of the recipe claim over training seeds that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_most, reported
from bench.calibration.checks.intervals import ALPHA
from bench.calibration.family import Seeded
from bench.calibration.streams import blocks
from kvaudit.reports.stats.seeds import SEEDS_ADVISED, SEEDS_NEEDED, many_recipe_effects

_DRAWS = 4_000
SEEDS, DEVIATIONS, _CLUSTERS, _ITEMS = (3, 5, 8), (0.0, 0.02, 0.04), 30, 5
_LARGER = ((72, 2), (100, 5), (150, 5))  # templates and items of each: of the default audit, and beyond
FEWEST, _ENOUGH = SEEDS_NEEDED, (SEEDS_ADVISED, 8)
_HARDEST = (100, 0.04)
THREE_SEEDS = "recipe false alarms, 3 seeds of 0 to 4 pp scatter, 72 to 150 templates"


@dataclass(frozen=True)
class RecipeCase(Case):
    """A number of seeds and their scatter."""

    model: Seeded
    clusters: int = _CLUSTERS
    items: int = _ITEMS

    @property
    def name(self) -> str:
        size = "" if (self.clusters, self.items) == (_CLUSTERS, _ITEMS) else f" C={self.clusters} items={self.items}"
        return f"recipe S={self.model.seeds} deviation={self.model.deviation:g}{size}"

    def rates(self, seed: int) -> CaseRates:
        rejected = 0
        for block in blocks(
            self.name, seed=seed, simulations=self.simulations, clusters=self.clusters, items=self.items
        ):
            z = self.model.draw(block.rng, block.size, block.counts)
            rejected += int(np.count_nonzero(many_recipe_effects(z, block.counts, alpha=ALPHA).pvalue < ALPHA))
        return {"rejected": rejected / self.simulations}


def cases(scale: Scale) -> list[RecipeCase]:
    """Return every number of seeds and scatter; larger sizes for every case in the full table, else for the hardest."""
    simulations = scale.draws(_DRAWS)
    larger = [
        RecipeCase(Seeded(seeds, deviation, 0.1, 0.25), clusters, items, simulations=simulations)
        for (clusters, items), seeds, deviation in product(_LARGER, SEEDS, DEVIATIONS)
    ]
    return [
        *(
            RecipeCase(Seeded(seeds, deviation, 0.1, 0.25), simulations=simulations)
            for seeds, deviation in product(SEEDS, DEVIATIONS)
        ),
        *(case for case in larger if scale.every_case or (case.clusters, case.model.deviation) == _HARDEST),
    ]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    own = [(o, o.case) for o in outcomes if isinstance(o.case, RecipeCase)]
    few = [o for o, case in own if case.clusters == _CLUSTERS]
    three = [o for o, case in own if case.clusters > _CLUSTERS and case.model.seeds == FEWEST]
    more = [o for o, case in own if case.clusters > _CLUSTERS and case.model.seeds in _ENOUGH]
    return [
        at_most(6, "recipe false alarms, 3 to 8 seeds of 0 to 4 pp scatter", few, "rejected", 0.06, scale=scale),
        at_most(6, "same with 5 and 8 seeds, 72 to 150 templates", more, "rejected", 0.065, scale=scale),
        reported(6, THREE_SEEDS, three, "rejected"),
    ]
