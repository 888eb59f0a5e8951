"""A paired difference that may be looked at while rows still come in: bounds that hold whenever somebody stops.

Part of the level goes to a betting test, which is valid at every look. For a claim "the mean is above M" it bets on
every cluster mean d in [-1, 1]: the wealth prod (1 + b (d - M)) has an expectation of at most 1 wherever the mean is M
or less, for each fixed bet b in (0, 1 / (1 + M)), and so has any mixture of such wealths. By Ville's inequality it
exceeds 1 / level at some time with a probability of at most ``level``, so the largest M whose wealth does is a lower
bound at every time (Waudby-Smith & Ramdas 2024, JRSS B 86:1). The mixture is fixed, which makes the wealth a function
of the differences and not of their order.

The rest is kept for one fixed-sample test, at the last look that was planned before the first row: ESS-Tango's bounds
there, and for a PASS the template rule (``rule``). Stopping earlier leaves that part unspent. Both parts together keep
the level by the union bound, and the last look decides much that the bets alone leave open (``bench.looks``).
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
SHARE = 0.35  # of the level that the betting test takes; the last look, which decides more often, has the rest
# Bets as shares of the largest that is allowed, with their weights. The last wins soonest where nothing changes at all,
# the others where a few answers do; both were chosen on the designs of bench.looks.
_BETS: Array = np.append(np.geomspace(0.1, 0.9, 16), 0.98)
_WEIGHTS: Array = np.append(np.full(16, 0.6 / 16), 0.4)
_STEPS = 30  # halvings of a bound, which then is exact to a millionth of a percentage point


def log_wealth(means: npt.ArrayLike, null: float) -> float:
    """The log of the mixture's wealth against "the mean is at most ``null``", of cluster means [C] in [-1, 1]."""
    values, counts = np.unique(np.asarray(means, dtype=np.float64), return_counts=True)
    bets = _BETS / (1 + null)
    logs = np.log1p(np.outer(bets, values - null)) @ counts + np.log(_WEIGHTS)
    most = float(logs.max())
    return most + float(np.log(np.exp(logs - most).sum()))


def betting_bound(means: npt.ArrayLike, level: float) -> float:
    """The lower bound at ``level`` for the mean that cluster means [C] in [-1, 1] are drawn around, at any time."""
    known, wanted = np.asarray(means, dtype=np.float64), -float(np.log(level))
    low, high = -1.0, float(known.mean()) if len(known) else -1.0
    if high == low:
        return low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if log_wealth(known, middle) >= wanted else (low, middle)
    return low


def betting_effect(
    z: npt.ArrayLike, clusters: npt.ArrayLike, *, alpha: float = 0.05, tests: int = 1, is_last: bool = False
) -> Effect:
    """The effect of item differences z [N] in [-1, 1] after some look; every cluster counts once, by its mean.

    ``lower`` holds at ``alpha`` and ``upper`` at ``alpha / tests``: all of ``tests`` have to show that little is lost,
    and one that shows a loss is enough. ``is_last``: this is the last look that was planned.
    """
    values, labels = np.asarray(z, dtype=np.float64), np.asarray(clusters)
    assert np.abs(values).max(initial=0) <= 1 + 1e-9, "differences lie in [-1, 1]"
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.clip(np.bincount(codes, weights=values) / counts, -1, 1)
    side = (1 - LEVEL) / 2  # of the interval that is printed
    return Effect(
        estimate=float(means.mean()),
        low=_above(means, side, is_last=is_last),
        high=-_above(-means, side, is_last=is_last),
        lower=_above(means, alpha, is_last=is_last),
        upper=-_above(-means, alpha / tests, is_last=is_last),
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
    """Whether cluster means [C] carry a PASS: by the bets alone, or at the last look by the template rule."""
    known = np.asarray(means, dtype=np.float64)
    if log_wealth(known, -margin) >= -np.log(SHARE * alpha):
        return True
    return bool(shows_margin(known, np.ones(len(known)), margin=margin, alpha=(1 - SHARE) * alpha))


def smallest_margin(rows: int, alpha: float) -> float:
    """The smallest loss that so many rows rule out at the last look where nothing changes."""
    return blind_spot(rows, (1 - SHARE) * alpha)


def decidable_churn(rows: int, margin: float, alpha: float, power: float = 0.8) -> float:
    """The share of answers that may change, as many for the better, so that the last look passes with this power."""
    reach = float(special.ndtri(power) - special.ndtri((1 - SHARE) * alpha))
    return min(1.0, rows * (margin / reach) ** 2)


def _above(means: Array, level: float, *, is_last: bool) -> float:
    """The lower bound of both parts of the level."""
    bound = betting_bound(means, SHARE * level)
    return max(bound, _fixed(means, (1 - SHARE) * level).lower) if is_last else bound


def _fixed(means: Array, level: float) -> Effect:
    """The fixed-sample inference of cluster means; those of several rows are no longer -1, 0 or 1."""
    return ess_tango(means, np.arange(len(means)), alpha=level, graded=bool(np.any(means % 1)))


def _pvalue(means: Array, *, is_last: bool) -> float:
    """One-sided against "the mean is 0 or less", by the part that shows more."""
    found = float(np.exp(min(0.0, -log_wealth(means, 0.0)))) / SHARE
    if is_last:
        found = min(found, (1 - _fixed(means, LEVEL).pvalue_drop) / (1 - SHARE))
    return min(1.0, found)


def _at_last(z: Array, clusters: npt.NDArray[np.int64]) -> Effect:
    return betting_effect(z, clusters, is_last=True)


STATISTIC = Statistic(
    betting_effect, oracle="tests/test_stats_betting.py::test_a_single_bet_is_that_of_confseq", of=_at_last
)
