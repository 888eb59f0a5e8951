"""Simulate the design of one run: how often its gate would be wrong with its templates, samples and margins.

Of the run's answers only the reference's rate, the share of answers that differ and the template sizes are used. Used
by ``python -m bench.calibration --design``; docs/results/calibration.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.calibration.broken import BrokenTemplates
from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_most, reported
from bench.calibration.checks.intervals import called_as
from bench.calibration.probit import Probit
from bench.calibration.streams import fixed_blocks
from kvaudit.reports.stats.rule import Call
from kvaudit.reports.stats.tango import many_ess_tango

_DRAWS = 10_000
SHARED = 0.25  # of an arm's own part that a template has in common
_ROOM = 0.95  # of what two independent arms would differ in: more cannot be had of a shared difficulty


@dataclass(frozen=True)
class RunDesign:
    """One suite at one length as a run asked it; rates and margin in score units.

    ``counts`` [C] are the items of its templates, ``draws`` the samples that one item difference averages.
    """

    suite: str
    context_tokens: int
    counts: tuple[int, ...]
    draws: int
    reference: float
    discordance: float
    graded: bool
    margin: float
    alpha: float

    @property
    def name(self) -> str:
        """The design's name in the table."""
        return f"{self.suite} {self.context_tokens}: {len(self.counts)} templates, {sum(self.counts)} items"


@dataclass(frozen=True)
class DesignCase(Case):
    """A model of the drift, simulated in the templates of a run."""

    design: RunDesign
    what: str
    model: Probit | BrokenTemplates

    @property
    def name(self) -> str:
        return f"design {self.design.name}, {self.what}"

    def rates(self, seed: int) -> CaseRates:
        d, found = self.design, np.zeros(2)
        counts: npt.NDArray[np.int64] = np.array(d.counts)
        for block in fixed_blocks(self.name, seed=seed, simulations=self.simulations, counts=counts):
            z = self.model.draw(block.rng, block.size, counts)
            b = many_ess_tango(z, counts, samples=d.draws, alpha=d.alpha, graded=d.graded)
            called = called_as(b, z, counts, b.pvalue_drop, alpha=d.alpha, margin=d.margin)
            found += [np.isin(called, (Call.PASS, Call.PASS_NOTED)).sum(), (called == Call.FAIL).sum()]
        passed, failed = (found / self.simulations).tolist()
        return {"passed": passed, "failed": failed}


EQUAL, SPREAD, WHOLE, LARGER, TWICE = (
    "an equal model passes",
    "a loss of the margin, spread over the items, passes",
    "a loss of the margin by whole templates passes",
    "the same, larger templates more often",
    "a loss of twice the margin fails",
)


def design_cases(designs: Sequence[RunDesign], scale: Scale) -> list[DesignCase]:
    """Return each suite without drift, with a drift of the margin in three shapes, and with twice the margin."""
    return [
        DesignCase(design, what, model, simulations=scale.draws(_DRAWS))
        for design in designs
        for what, model in _models(design)
    ]


def design_figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    """Return the figures: false passes must stay within 1.2 times the level; other rates are only reported."""
    figures, suites = [], list(dict.fromkeys(o.case.design for o in outcomes if isinstance(o.case, DesignCase)))
    for o in outcomes:
        assert isinstance(o.case, DesignCase)
        row = suites.index(o.case.design) + 1
        what, name = o.case.what, f"{o.case.design.name}: {o.case.what}"
        if what in (EQUAL, TWICE):
            figures.append(reported(row, name, [o], "passed" if what == EQUAL else "failed"))
        else:
            figures.append(at_most(row, name, [o], "passed", 1.2 * o.case.design.alpha, scale=scale))
    return figures


def _models(d: RunDesign) -> Iterator[tuple[str, Probit | BrokenTemplates]]:
    quiet = max(0.0, min(1.0, d.discordance))
    # a lost score between 0 and 1 costs one half in the mean, so twice as many have to break
    broken = BrokenTemplates(2 * d.margin if d.graded else d.margin, quiet, d.draws, graded=d.graded)
    if not d.graded:
        yield EQUAL, _probit(d, 0.0)
        yield SPREAD, _probit(d, -d.margin)
    yield WHOLE, broken
    if len(set(d.counts)) > 1:
        yield LARGER, broken._replace(by_size=True)
    if not d.graded:
        yield TWICE, _probit(d, -2 * d.margin)


def _probit(d: RunDesign, drift: float) -> Probit:
    """Return the model with this drift that is nearest to the run's rates."""
    reference = min(max(d.reference, 0.02 - drift), 0.98)  # both arms' rates stay off the ends
    candidate = reference + drift
    most = _ROOM * (reference * (1 - candidate) + candidate * (1 - reference))
    discordance = min(max(d.discordance, abs(drift) + 0.01), most)  # what drifts differs, and a little more
    return Probit(drift, discordance, SHARED, d.draws, reference)
