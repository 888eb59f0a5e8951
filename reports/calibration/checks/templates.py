"""Broken templates: how often the gate passes a model that lost 5 % of its templates altogether (row 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from reports.calibration.broken import BrokenTemplates
from reports.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_most, reported
from reports.calibration.checks.intervals import ALPHA, MARGIN, RELEASE, passes
from reports.calibration.streams import blocks
from reports.stats.tango import many_ess_tango

ROW, DRAWS = 4, 20_000
ENOUGH = {ALPHA: (59, 60, 80, 120), RELEASE: (72, 100, 150)}
_FEW = {ALPHA: (10, 20, 40, 58), RELEASE: (20, 60, 71)}
ITEMS, BACKGROUNDS = 5, (0.0, 0.02)
HARDER_ITEMS, HARDER_BACKGROUNDS = (5, 10), (0.02, 0.04, 0.1)  # and uneven clusters or several samples
HARDER = ((False, 1), (False, 4), (False, 8), (True, 4), (True, 8))  # clusters of one size, samples


@dataclass(frozen=True)
class TemplateCase(Case):
    """One number of clusters at one level."""

    model: BrokenTemplates
    clusters: int
    items: int
    even: bool  # clusters of one size
    alpha: float

    @property
    def name(self) -> str:
        return (
            f"templates broken={self.model.broken:g} background={self.model.background:g} C={self.clusters} "
            f"items={self.items} even={self.even} alpha={self.alpha:g}{self._repeats}"
        )

    @property
    def _repeats(self) -> str:
        return f" k={self.model.samples}" if self.model.samples > 1 else ""

    @property
    def harder(self) -> bool:
        """Whether it is beyond what the rule was asked to withstand."""
        return (self.even, self.model.samples) in HARDER

    def rates(self, seed: int) -> CaseRates:
        passed = 0
        drawn = blocks(
            self.name,
            seed=seed,
            simulations=self.simulations,
            clusters=self.clusters,
            items=self.items,
            even=self.even,
        )
        for block in drawn:
            z = self.model.draw(block.rng, block.size, block.counts)
            b = many_ess_tango(z, block.counts, samples=self.model.samples, alpha=self.alpha)
            passed += int(np.count_nonzero(passes(b, clusters=self.clusters, alpha=self.alpha)))
        return {"passed": passed / self.simulations}


def cases(scale: Scale) -> list[TemplateCase]:
    """Designs with C_min clusters and with fewer, at both levels, and harder ones."""
    backgrounds = BACKGROUNDS if scale.every_case else BACKGROUNDS[-1:]
    asked = [
        TemplateCase(BrokenTemplates(MARGIN, background), clusters, ITEMS, True, alpha, simulations=scale.draws(DRAWS))
        for background, alpha in product(backgrounds, (ALPHA, RELEASE))
        for clusters in (*_FEW[alpha], *ENOUGH[alpha])
    ]
    harder = [
        TemplateCase(
            BrokenTemplates(MARGIN, background, samples),
            clusters,
            items,
            even,
            alpha,
            simulations=scale.draws(DRAWS),
        )
        for (even, samples), items, background, alpha in product(
            HARDER, HARDER_ITEMS, HARDER_BACKGROUNDS, (ALPHA, RELEASE)
        )
        for clusters in ENOUGH[alpha]
    ]
    return asked + (harder if scale.every_case else harder[:1])


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    """Row 4."""
    own = [(o, o.case) for o in outcomes if isinstance(o.case, TemplateCase)]
    few = [o for o, case in own if case.clusters in _FEW[case.alpha]]
    pr, release, harder, harder_release = (
        [o for o, case in own if case.harder is hard and case.alpha == alpha and case.clusters in ENOUGH[alpha]]
        for hard, alpha in product((False, True), (ALPHA, RELEASE))
    )
    what = "gate passes with 5 % of templates broken"
    hard = f"{what}, uneven templates or 4 to 8 samples, 2 to 10 % of other answers flip, level .05"
    beyond = [reported(ROW, hard, harder, "passed")]
    if harder_release:
        beyond.append(reported(ROW, "same at the release level .025", harder_release, "passed"))
    return [
        at_most(ROW, f"{what}, C >= C_min, level .05", pr, "passed", 0.076, scale=scale),
        at_most(ROW, "same at the release level .025", release, "passed", 0.042, scale=scale),
        at_most(ROW, f"{what}, C < C_min", few, "passed", 0.0, scale=scale),
        *beyond,
    ]
