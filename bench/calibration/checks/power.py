"""Row 9 of the calibration: how often a run of usual size passes an equal model, and fails one that lost 8 points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_least, reported
from bench.calibration.checks.families import family_pvalues
from bench.calibration.checks.intervals import ALPHA, called_as, passes
from bench.calibration.probit import Probit
from bench.calibration.streams import EVEN, blocks
from kvaudit.reports.stats.rule import Call
from kvaudit.reports.stats.tango import many_ess_tango

_ROW, _DRAWS = 9, 10_000


@dataclass(frozen=True)
class PowerCase(Case):
    """One true drift in one design; the cell is the whole family."""

    model: Probit
    clusters: int
    items: int

    @property
    def name(self) -> str:
        m = self.model
        return (
            f"power drift={m.drift:g} C={self.clusters} items={self.items} k={m.samples} "
            f"discordance={m.discordance:g} own={m.own_by_cluster:g}"
        )

    @property
    def design(self) -> str:
        """The design in words, for the table."""
        m = self.model
        draws = f", {m.samples} seeds or samples averaged" if m.samples > 1 else ""
        alike = "" if m.own_by_cluster else ", templates have nothing in common"
        return f"{self.clusters} templates x {self.items}{draws}, {100 * m.discordance:g} % discordant{alike}"

    def rates(self, seed: int) -> CaseRates:
        passed = failed = 0
        drawn = blocks(
            self.name, seed=seed, simulations=self.simulations, clusters=self.clusters, items=self.items, sizes=EVEN
        )
        for block in drawn:
            z = self.model.draw(block.rng, block.size, block.counts)
            b = many_ess_tango(z, block.counts, samples=self.model.samples, alpha=ALPHA)
            drop = family_pvalues(z[:, None], block.counts, seed=int(block.rng.integers(2**31)))[:, 0]
            passed += int(np.count_nonzero(passes(b, z, block.counts, alpha=ALPHA)))
            called = called_as(b, z, block.counts, drop, alpha=ALPHA)
            failed += int(np.count_nonzero(called == Call.FAIL))
        return {"passed": passed / self.simulations, "failed": failed / self.simulations}


# model, templates, items in each, asked of a PASS
_EQUAL = (
    (Probit(0.0, 0.08, 0.0, 3), 72, 2, 0.80),
    (Probit(0.0, 0.1, 0.25), 120, 5, 0.92),
    (Probit(0.0, 0.1, 0.25), 60, 5, None),
    (Probit(0.0, 0.1, 0.25, 4), 60, 5, None),
    (Probit(0.0, 0.08, 0.25, 3), 72, 2, None),
)
_WORSE, FOUND = (Probit(-0.08, 0.1, 0.25), 60, 5), 0.98


def cases(scale: Scale) -> list[PowerCase]:
    """Return an equal model, and one that is 8 points worse, in each design."""
    designs = [*(design[:3] for design in _EQUAL), _WORSE]
    return [PowerCase(*design, simulations=scale.draws(_DRAWS)) for design in designs]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    own = {(o.case.model, o.case.clusters, o.case.items): o for o in outcomes if isinstance(o.case, PowerCase)}
    found = []
    for model, clusters, items, asked in _EQUAL:
        o = own[model, clusters, items]
        assert isinstance(o.case, PowerCase)
        what = f"PASS of an equal model: {o.case.design}"
        found.append(
            reported(_ROW, what, [o], "passed")
            if asked is None
            else at_least(_ROW, what, [o], "passed", asked, scale=scale)
        )
    worse = own[_WORSE]
    assert isinstance(worse.case, PowerCase)
    what = f"FAIL of a model 8 pp worse: {worse.case.design}"
    return [*found, at_least(_ROW, what, [worse], "failed", FOUND, scale=scale)]
