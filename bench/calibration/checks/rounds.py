"""Row 16 of the calibration: how often a check in rounds is wrong, and how often it decides.

A check looks at its rows after 32, after 100, then after half as many again, and at its last planned row; if it is
still open there, it goes on by bets alone while rows are left. Rows lose, keep or gain an answer with fixed
probabilities. At exactly the margin both PASS and FAIL are errors.

Decisions come from the functions that the gate calls; one draw in forty is also decided by ``betting_effect`` itself,
with the same result required.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_least, at_most, reported
from bench.calibration.checks.intervals import ALPHA
from bench.calibration.streams import generator
from kvaudit.audit.runs.round_plan import look_sizes
from kvaudit.reports.stats.betting import SHARE, betting_effect, clusters_show, log_wealth
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.stats.rule import shows_margin
from kvaudit.reports.stats.tango import many_ess_tango

ROUNDS_ROW, _DRAWS = 16, 4_000
_TESTS = 2  # gated cells, as in a check of harm and benign
_OPEN, _PASS, _FAIL = 0, 1, 2
_RECHECK = 40  # every so many draws one is also decided by ``betting_effect``
# (margin, planned rows, rows at hand): whole endpoints, plans that minutes cut short, and a plan of the first look only
_ENDPOINTS = ((0.05, 1036, 1036), (0.10, 283, 283))
_SHORT_PLANS = ((0.05, 400, 1036), (0.05, 100, 1036), (0.05, 283, 283), (0.10, 150, 283), (0.10, 100, 100))
_NO_LOSS, _HALF, _EDGE, _TWICE = "no loss", "half the margin", "at the margin", "twice the margin"
_GAINED = {_NO_LOSS: (0, 0.02, 0.05, 0.10), _HALF: (0, 0.005, 0.025), _TWICE: (0, 0.02, 0.05)}
_GAINED_AT_EDGE = (0, 0.005, 0.01, 0.05, 0.10)
_LOSS = {_NO_LOSS: 0.0, _HALF: 0.5, _EDGE: 1.0, _TWICE: 2.0}  # in margins
_ASKED = ((_NO_LOSS, "passed", 0.8), (_HALF, "passed", 0.8), (_TWICE, "failed", 0.9))
# .8 and .9 were asked: too few harmless rows exist, and at half of 5 points one design in three passes in .79
_FALLS_SHORT = ((0.05, _HALF), (0.10, _HALF), (0.10, _TWICE))
WRONG_PASS = "check in rounds passes a loss at the margin"
WRONG_FAIL = "check in rounds fails a loss at the margin"


@dataclass(frozen=True)
class RoundsCase(Case):
    """One true loss under one plan: rows lose an answer with probability ``lost`` and gain one with ``gained``."""

    loss: str
    lost: float
    gained: float
    margin: float
    planned: int
    rows: int

    @property
    def name(self) -> str:
        plan = f"margin={self.margin:g} planned={self.planned} rows={self.rows}"
        return f"rounds {self.loss} lost={self.lost:g} gained={self.gained:g} {plan}"

    @property
    def looks(self) -> list[int]:
        """The numbers of rows at which the check looks, those after the last planned row included."""
        looks = look_sizes(self.planned)
        while looks[-1] < self.rows:
            looks.append(min(looks[-1] * 3 // 2, self.rows))
        return looks

    def rates(self, seed: int) -> CaseRates:
        shares = [self.lost, 1 - self.lost - self.gained, self.gained]
        size = (self.simulations, self.rows)
        answers = generator(seed, self.name, 0).choice([-1.0, 0.0, 1.0], p=shares, size=size)
        decisions = np.full(self.simulations, _OPEN)
        for look in self.looks:
            is_open = np.flatnonzero(decisions == _OPEN)
            if len(is_open):
                decisions[is_open] = self._decide(answers[is_open, :look], is_last=look == self.planned)
        for draw in range(0, self.simulations, _RECHECK):
            assert decisions[draw] == self._decide_one(answers[draw]), (self.name, draw)
        return {"passed": float(np.mean(decisions == _PASS)), "failed": float(np.mean(decisions == _FAIL))}

    def _decide(self, answers: Array, *, is_last: bool) -> npt.NDArray[np.int64]:
        """Return the decision of each draw of answers [D, N] at one look."""
        passed = _bets_exceed(answers, -self.margin, SHARE * ALPHA)
        failed = _bets_exceed(-answers, self.margin, SHARE * ALPHA / _TESTS)
        if is_last:
            level, rows = (1 - SHARE) * ALPHA, np.ones(answers.shape[1])
            templates = shows_margin(answers, rows, margin=self.margin, alpha=level)
            passed |= (_tango_lower(answers, level) > -self.margin) & templates
            failed |= _tango_lower(-answers, level / _TESTS) > self.margin
        return np.where(passed, _PASS, np.where(failed, _FAIL, _OPEN))

    def _decide_one(self, answers: Array) -> int:
        """Return the decision for one draw [N], by the functions that the gate calls."""
        for look in self.looks:
            z, is_last = answers[:look], look == self.planned
            effect = betting_effect(z, np.arange(look), alpha=ALPHA, tests=_TESTS, is_last=is_last)
            if effect.lower > -self.margin and clusters_show(z, self.margin, ALPHA):
                return _PASS
            if effect.upper < -self.margin:
                return _FAIL
        return _OPEN


def _bets_exceed(answers: Array, null: float, level: float) -> npt.NDArray[np.bool_]:
    """Return for each draw [D, N] whether the bets show a mean above ``null``."""
    counts = np.stack([(answers < 0).sum(1), (answers == 0).sum(1), (answers > 0).sum(1)], axis=1)
    kinds, kind_of_draw = np.unique(counts, axis=0, return_inverse=True)
    wealth = np.array([log_wealth(np.repeat([-1.0, 0.0, 1.0], kind), null) for kind in kinds])
    exceeded: npt.NDArray[np.bool_] = wealth[kind_of_draw.ravel()] >= -np.log(level)
    return exceeded


def _tango_lower(answers: Array, level: float) -> Array:
    """Return the lower bounds of ESS-Tango for draws [D, N]."""
    return many_ess_tango(answers, np.ones(answers.shape[1]), samples=1, alpha=level).lower


def cases(scale: Scale) -> list[RoundsCase]:
    """Return every true loss under the plans of whole endpoints, and losses at the margin under shorter plans too."""
    designs = [(loss, gained, *plan) for plan in _ENDPOINTS for loss, many in _GAINED.items() for gained in many]
    designs += [(_EDGE, gained, *plan) for plan in (*_ENDPOINTS, *_SHORT_PLANS) for gained in _GAINED_AT_EDGE]
    found = [
        RoundsCase(
            loss=loss,
            lost=_LOSS[loss] * margin + gained,
            gained=gained,
            margin=margin,
            planned=planned,
            rows=rows,
            simulations=scale.draws(_DRAWS),
        )
        for loss, gained, margin, planned, rows in designs
    ]
    return found if scale.every_case else found[::9]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    own = [(o, o.case) for o in outcomes if isinstance(o.case, RoundsCase)]
    edge = [o for o, case in own if case.loss == _EDGE]
    found = [
        at_most(ROUNDS_ROW, WRONG_PASS, edge, "passed", 0.05, scale=scale),
        at_most(ROUNDS_ROW, WRONG_FAIL, edge, "failed", 0.05, scale=scale),
    ]
    for margin, planned, rows in _ENDPOINTS:
        for loss, event, bound in _ASKED:
            plan = (loss, margin, planned, rows)
            some = [o for o, case in own if (case.loss, case.margin, case.planned, case.rows) == plan]
            verb = {"passed": "passes", "failed": "fails"}[event]
            what = f"same {verb} {loss}, {100 * margin:g} pp, {rows} rows"
            if some and (margin, loss) in _FALLS_SHORT:
                found.append(reported(ROUNDS_ROW, what, some, event, smallest=True))
            elif some:
                found.append(at_least(ROUNDS_ROW, what, some, event, bound, scale=scale))
    return found
