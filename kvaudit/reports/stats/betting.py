"""A paired difference that is tested while rows still come in: its bounds hold at every look (interim test).

Part of the level goes to a betting test. For a claim "the mean is above M" it bets on every cluster mean d in [-1, 1].
If the mean is at most M, the wealth prod (1 + b (d - M)) has an expectation of at most 1 for each fixed bet b between 0
and 1 / (1 + M), and so has any mixture of such wealths. By Ville's inequality the wealth ever exceeds 1 / level with a
probability of at most ``level``. So the largest M at which it exceeds 1 / level is a lower bound of the mean at all
times (Waudby-Smith & Ramdas 2024, JRSS B 86:1). The mixture is fixed, so the wealth does not depend on the order of the
differences.

The rest goes to one fixed-sample test at the last look, whose rows are planned before it: the bounds of ESS-Tango
(Tango's score interval at the effective sample size), and for a PASS the template rule (``rule``). Both parts together
keep the level by the union bound; the last look decides many cells that the bets alone leave open (row 16 of
``bench.calibration``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.effect import LEVEL, Array, Effect, Statistic
from kvaudit.reports.stats.rule import blind_spot, shows_margin
from kvaudit.reports.stats.tango import ess_tango

METHOD = "betting bounds, and ESS-Tango at the last planned look"
SOURCE = "Waudby-Smith & Ramdas 2024; Tango 1998"
_POWER = 0.8  # with which a number of rows is planned
SHARE = 0.35  # share of the level for the betting test; the last look, which decides more often, has the rest
# Bets as shares of the largest allowed bet, with their weights. If no answer changes the last bet wins first, if a few
# do the others; chosen on designs of bench.calibration.checks.rounds.
_BETS: Array = np.append(np.geomspace(0.1, 0.9, 16), 0.98)
_WEIGHTS: Array = np.append(np.full(16, 0.6 / 16), 0.4)
_STEPS = 30  # bisection steps: exact to a millionth of a percentage point


def log_wealth(means: npt.ArrayLike, null: float) -> float:
    """Return the log of the wealth that bets win on cluster means [C] in [-1, 1].

    They are bets against the claim that the mean is at most ``null``.
    """
    values, counts = np.unique(np.asarray(means, dtype=np.float64), return_counts=True)
    bets = _BETS / (1 + null)
    logs = np.log1p(np.outer(bets, values - null)) @ counts + np.log(_WEIGHTS)
    largest = float(logs.max())
    return largest + float(np.log(np.exp(logs - largest).sum()))


def betting_bound(means: npt.ArrayLike, level: float) -> float:
    """Return the lower bound at ``level``, valid at any time, for the mean of cluster means [C] in [-1, 1]."""
    values, threshold = np.asarray(means, dtype=np.float64), -float(np.log(level))
    low, high = -1.0, float(values.mean()) if len(values) else -1.0
    if high == low:
        return low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if log_wealth(values, middle) >= threshold else (low, middle)
    return low


def betting_effect(
    z: npt.ArrayLike, clusters: npt.ArrayLike, *, alpha: float = 0.05, tests: int = 1, is_last: bool = False
) -> Effect:
    """Return the effect of item differences z [N] in [-1, 1] at one look (interim test).

    Every cluster counts once, by its mean. ``lower`` holds at ``alpha`` and ``upper`` at ``alpha / tests``: a PASS
    needs all tests, a FAIL only one. ``is_last`` marks the last planned look.
    """
    values, labels = np.asarray(z, dtype=np.float64), np.asarray(clusters)
    assert np.abs(values).max(initial=0) <= 1 + 1e-9, "differences lie in [-1, 1]"
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.clip(np.bincount(codes, weights=values) / counts, -1, 1)
    tail = (1 - LEVEL) / 2  # of the printed interval
    return Effect(
        estimate=float(means.mean()),
        low=_lower_bound(means, tail, is_last=is_last),
        high=-_lower_bound(-means, tail, is_last=is_last),
        lower=_lower_bound(means, alpha, is_last=is_last),
        upper=-_lower_bound(-means, alpha / tests, is_last=is_last),
        alpha=alpha,
        pvalue=min(1.0, 2 * min(_pvalue(means, is_last=is_last), _pvalue(-means, is_last=is_last))),
        pvalue_drop=_pvalue(-means, is_last=is_last),
        method=METHOD,
        source=SOURCE,
        n_items=len(values),
        n_clusters=len(means),
        losses=float(np.abs(np.minimum(values, 0)).sum()),
        gains=float(np.maximum(values, 0).sum()),
        deff=1.0,
        df=float(len(means) - 1),
    )


def clusters_show(means: npt.ArrayLike, margin: float, alpha: float) -> bool:
    """Return whether cluster means [C] support a PASS at the last look (interim test).

    Either the bets alone rule out a loss of the margin, or the template rule does (a few broken templates cannot hide
    it).
    """
    values = np.asarray(means, dtype=np.float64)
    if log_wealth(values, -margin) >= -np.log(SHARE * alpha):
        return True
    return bool(shows_margin(values, np.ones(len(values)), margin=margin, alpha=(1 - SHARE) * alpha))


def smallest_margin(rows: int, alpha: float) -> float:
    """Return the smallest loss that this number of rows can rule out at the last look (interim test).

    That is the loss ruled out if no answer changes.
    """
    return blind_spot(rows, (1 - SHARE) * alpha)


def decidable_churn(rows: int, margin: float, alpha: float) -> float:
    """Return the largest share of changed answers with which a PASS at the last look has a chance of .8.

    It is assumed that as many answers change for the better as for the worse, so that there is no drift.
    """
    quantiles = float(special.ndtri(_POWER) - special.ndtri((1 - SHARE) * alpha))
    return min(1.0, rows * (margin / quantiles) ** 2)


def _lower_bound(means: Array, level: float, *, is_last: bool) -> float:
    bound = betting_bound(means, SHARE * level)
    return max(bound, _fixed_sample(means, (1 - SHARE) * level).lower) if is_last else bound


def _fixed_sample(means: Array, level: float) -> Effect:
    # cluster means of several rows are graded: they can lie between -1, 0 and 1
    return ess_tango(means, np.arange(len(means)), alpha=level, graded=bool(np.any(means % 1)))


def _pvalue(means: Array, *, is_last: bool) -> float:
    """Return the one-sided p-value against "the mean is at most 0".

    It is the p-value of the bets; at the last look that of the fixed-sample test, if it is smaller.
    """
    pvalue = float(np.exp(min(0.0, -log_wealth(means, 0.0)))) / SHARE
    if is_last:
        pvalue = min(pvalue, (1 - _fixed_sample(means, LEVEL).pvalue_drop) / (1 - SHARE))
    return min(1.0, pvalue)


STATISTIC = Statistic(
    betting_effect,
    oracle="tests/test_stats_betting.py::test_a_single_bet_is_that_of_confseq",
    of=lambda z, clusters: betting_effect(z, clusters, is_last=True),
)
