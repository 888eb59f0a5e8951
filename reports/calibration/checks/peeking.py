"""Looking before all clusters are in: false passes over several looks at a share of the level each (row 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from reports.calibration.case import Case, Figure, Outcome, Rates, Scale, at_most
from reports.calibration.checks.intervals import ALPHA, MARGIN
from reports.calibration.probit import Probit
from reports.calibration.streams import blocks
from reports.stats.looks import alpha_per_look
from reports.stats.tango import many_ess_tango

DRAWS = 4_000
LOOKS, EACH, ITEMS, DISCORDANCES, OWN = (2, 3, 5), 20, (5, 10), (0.1, 0.2), 0.25


@dataclass(frozen=True)
class PeekingCase(Case):
    """A number of looks, each after 20 more clusters."""

    model: Probit
    looks: int
    items: int

    @property
    def name(self) -> str:
        return f"peeking looks={self.looks} items={self.items} discordance={self.model.discordance:g}"

    def rates(self, seed: int) -> Rates:
        found = 0
        clusters, level = self.looks * EACH, alpha_per_look(ALPHA, self.looks)
        for block in blocks(self.name, seed=seed, simulations=self.simulations, clusters=clusters, items=self.items):
            z = self.model.draw(block.rng, block.size, block.counts)
            passed = np.zeros(block.size, dtype=np.bool_)
            for end in range(EACH, clusters + 1, EACH):
                seen = block.counts[:end]
                passed |= many_ess_tango(z[:, : seen.sum()], seen, alpha=level).lower > -MARGIN
            found += int(np.count_nonzero(passed))
        return {"passed": found / self.simulations}


def cases(scale: Scale) -> list[PeekingCase]:
    """Every number of looks at a drift of exactly the margin."""
    designs = product(LOOKS, ITEMS, DISCORDANCES) if scale.every_case else product(LOOKS, ITEMS[:1], DISCORDANCES[:1])
    return [
        PeekingCase(Probit(-MARGIN, discordance, OWN), looks, items, simulations=scale.draws(DRAWS))
        for looks, items, discordance in designs
    ]


def figures(outcomes: Sequence[Outcome], scale: Scale) -> list[Figure]:
    """Row 8."""
    own = [o for o in outcomes if isinstance(o.case, PeekingCase)]
    what = "interval clears a drift at the margin in any of 2 to 5 looks"
    return [at_most(8, what, own, "passed", 0.065, scale=scale)]
