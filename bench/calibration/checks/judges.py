"""Row 7 of the calibration: human labels beside a judge that errs more in one arm, or misses whole templates.

People label one concordant pair of each template, the fewest that a PASS needs, or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.calibration.broken import BrokenTemplates
from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_least, at_most
from bench.calibration.checks.intervals import ALPHA, MARGIN
from bench.calibration.checks.templates import ASKED, DRAWS, FURTHEST
from bench.calibration.probit import Floats, Probit
from bench.calibration.streams import EVEN, UNEVEN, Block, blocks
from kvaudit.reports.stats.adjudication import Labelled, adjudicated_bounds, labelled_pairs, round_robin
from kvaudit.reports.stats.rule import clusters_required, shows_margin, too_uneven

_ROW = 7
_DRAWS = 4_000
_CLUSTERS, _ITEMS, CONCORDANT = 40, 10, 100
_Flags = npt.NDArray[np.bool_]


class SimulatedJudge(NamedTuple):
    """A judge's chances to label a desired answer as desired, and an undesired one as undesired."""

    sensitivity: float
    specificity: float

    def labels(self, rng: np.random.Generator, desired: Floats) -> _Flags:
        """Draw the judge's labels of answers [...], which are 1 if desired."""
        chance = np.where(desired > 0.5, self.sensitivity, 1 - self.specificity)
        return rng.random(desired.shape, dtype=np.float32) < chance


SIMULATED_JUDGES = (
    (SimulatedJudge(0.95, 0.90), SimulatedJudge(0.95, 0.80)),
    (SimulatedJudge(0.95, 0.80), SimulatedJudge(0.95, 0.90)),
    (SimulatedJudge(0.95, 0.90), SimulatedJudge(0.85, 0.90)),
)


def looked_at(block: Block, apart: _Flags, z: Floats, concordant: int) -> Labelled:
    """Return the human labels of pairs [B, N]: all that the judge labels differently, and ``concordant`` others."""
    clusters = np.repeat(np.arange(len(block.counts)), block.counts)
    chosen = apart | round_robin(block.rng, ~apart, clusters, concordant)
    return labelled_pairs(apart, np.where(chosen, z, np.nan), clusters)


@dataclass(frozen=True)
class JudgeCase(Case):
    """One judge for the reference and one for the candidate."""

    model: Probit
    judges: tuple[SimulatedJudge, SimulatedJudge]

    @property
    def name(self) -> str:
        one, two = self.judges
        return (
            f"judge reference={one.sensitivity:g},{one.specificity:g} candidate={two.sensitivity:g},{two.specificity:g}"
        )

    def rates(self, seed: int) -> CaseRates:
        passed = 0
        for block in blocks(self.name, seed=seed, simulations=self.simulations, clusters=_CLUSTERS, items=_ITEMS):
            answers = self.model.answers(block.rng, block.size, block.counts)
            said = [judge.labels(block.rng, y) for judge, y in zip(self.judges, answers, strict=True)]
            labelled = looked_at(block, said[0] != said[1], answers[1] - answers[0], CONCORDANT)
            passed += int(np.count_nonzero(adjudicated_bounds(labelled, confidence=1 - ALPHA).low > -MARGIN))
        return {"passed": passed / self.simulations}


LEAST = clusters_required(MARGIN, ALPHA)
BLIND_CLUSTERS, BLIND_ITEMS = range(LEAST, round(FURTHEST * LEAST) + 1, 4), 5
EACH, BACKGROUNDS = (1, 2, 3), (0.02, 0.08)
USUAL = 2  # labels of a template unless told
_ENOUGH = ((72, EVEN), (100, EVEN), (100, UNEVEN))  # that are asked for power; 72 uneven ones are too few to pass


@dataclass(frozen=True)
class BlindCase(Case):
    """A judge that sees no change in templates that lost everything, and all other flipped answers."""

    broken: float
    background: float  # share of the other answers that flip
    clusters: int
    each: int  # concordant pairs that people label, per template
    sizes: str

    @property
    def name(self) -> str:
        return (
            f"judge blind broken={self.broken:g} background={self.background:g} C={self.clusters} "
            f"labels={self.each} {self.sizes}"
        )

    def rates(self, seed: int) -> CaseRates:
        passed, flips = 0, BrokenTemplates(0.0, self.background)
        drawn = blocks(
            self.name,
            seed=seed,
            simulations=self.simulations,
            clusters=self.clusters,
            items=BLIND_ITEMS,
            sizes=self.sizes,
        )
        for block in drawn:
            lost = np.repeat(block.rng.random((block.size, self.clusters)) < self.broken, block.counts, axis=1)
            z = np.where(lost, np.float32(-1), flips.draw(block.rng, block.size, block.counts))
            labelled = looked_at(block, (z != 0) & ~lost, z, self.each * self.clusters)
            passed += int(np.count_nonzero(self._passes(labelled)))
        return {"passed": passed / self.simulations}

    def _passes(self, x: Labelled) -> _Flags:
        """Return which cells pass, as the gate decides labelled cells."""
        if too_uneven(x.pairs, MARGIN, ALPHA):
            return np.zeros(x.totals.shape[:-1], dtype=np.bool_)
        within = adjudicated_bounds(x, confidence=1 - ALPHA).low > -MARGIN
        shown: _Flags = within & shows_margin(x.totals, x.pairs, margin=MARGIN, alpha=ALPHA) & (x.unseen == 0)
        return shown


def cases(scale: Scale) -> list[Case]:
    """Return every pair of judges at a drift of exactly the margin, and blind ones with and without drift."""
    uneven = [
        JudgeCase(Probit(-MARGIN, 0.1, 0.25), judges, simulations=scale.draws(_DRAWS)) for judges in SIMULATED_JUDGES
    ]
    at_margin = product((MARGIN,), BACKGROUNDS, BLIND_CLUSTERS, EACH, (EVEN, UNEVEN))
    alike = [(0.0, BACKGROUNDS[-1], clusters, USUAL, sizes) for clusters, sizes in _ENOUGH]
    blind = [BlindCase(*design, simulations=scale.draws(DRAWS)) for design in (*at_margin, *alike)]
    return [*uneven, *(blind if scale.every_case else (blind[0], blind[-1]))]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    uneven = [o for o in outcomes if isinstance(o.case, JudgeCase)]
    blind = [(o, o.case) for o in outcomes if isinstance(o.case, BlindCase)]
    at_margin = [o for o, case in blind if case.broken]
    alike = [o for o, case in blind if not case.broken]
    return [
        at_most(
            _ROW,
            "adjudicated interval clears a drift at the margin, judge errs unevenly",
            uneven,
            "passed",
            0.05,
            scale=scale,
        ),
        at_most(
            _ROW,
            "human labels pass with 5 % of templates broken that the judge sees as unchanged, C >= C_min",
            at_margin,
            "passed",
            ASKED[ALPHA],
            scale=scale,
        ),
        at_least(
            _ROW,
            f"human labels pass without drift, {USUAL} of each of 72 even or 100 uneven templates, 8 % of answers flip",
            alike,
            "passed",
            0.8,
            scale=scale,
        ),
    ]
