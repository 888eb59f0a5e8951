"""How far training runs of one recipe lie apart: the standard deviation of the drift over paired seeds.

Its interval is that of chi-square with S - 1 degrees of freedom, wide enough at three seeds (.52 to 6.3 times) that it
is printed beside the number. With fewer there is no claim about a recipe and no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from scipy import special

from reports.analysis.cells import name_of_cell
from reports.analysis.results import SeedSpread
from reports.drift.results import Contrast
from reports.gate.verdict import Decision
from reports.stats.effect import LEVEL
from reports.stats.seeds import SEEDS_NEEDED


def seed_spreads(contrasts: Iterable[Contrast], decisions: Iterable[Decision]) -> Iterator[SeedSpread]:
    """The drift of every gated cell seed by seed."""
    known = {(c.estimand, c.arm, c.policy, c.suite, c.context_tokens): c for c in contrasts}
    for d in decisions:
        c = known.get((d.estimand, d.arm, d.policy, d.suite, d.context_tokens))
        if d.gated and d.effect and c and c.seed_estimates:
            low, sd, high = spread(c.seed_estimates)
            yield SeedSpread(name_of_cell(d), c.seeds, c.seed_estimates, sd, low, high)


def spread(estimates: tuple[float, ...]) -> tuple[float | None, float | None, float | None]:
    """(low, standard deviation, high) of drifts [S]; all None with fewer than three seeds."""
    df = len(estimates) - 1
    if len(estimates) < SEEDS_NEEDED:
        return None, None, None
    sd = float(np.std(estimates, ddof=1))
    tail = (1 - LEVEL) / 2
    high, low = (sd * float(np.sqrt(df / special.chdtri(df, p))) for p in (1 - tail, tail))
    return low, sd, high
