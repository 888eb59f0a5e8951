"""Tango's score interval for a paired difference, plain and at the cluster-robust effective sample size.

Tango 1998, Statistics in Medicine 17:891 (score interval). ESS-Tango divides the sample and both discordant counts by
the design effect and uses t_{C-1} quantiles; this combination is the project's own, checked by simulation
(``bench.calibration``). Functions for one sample wrap those for many. The lower bound of a rate is Wilson's score
interval (1927, JASA 22:209) at the same effective size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import Array, ManyTotals, Totals, cr3, cr3_variance, many_totals, totals
from kvaudit.reports.stats.effect import LEVEL, Bounds, Effect, Statistic

GRADED_FLOOR = 0.001
PSEUDO_ICC = 0.1  # intra-cluster correlation assumed without discordant items
SOURCE = "Tango 1998 at the CR3 effective sample size"
_STEPS = 100  # a limit: a dozen usually suffice, and bisection needs 50
_PRECISION = 1e-13  # of the score at the quantile, or of the bound


class Interval(NamedTuple):
    """The lower and the upper bound of a difference of proportions."""

    low: float
    high: float


def tango_z(losses: float, gains: float, n: float, delta: float) -> float:
    """Return the score statistic of H0: (gains - losses)/n = delta; positive if the data lie above delta.

    Z(0) is McNemar's (gains - losses)/sqrt(gains + losses).
    """
    return float(tango_scores(np.array(losses), np.array(gains), np.array(n), delta))


def tango_scores(losses: Array, gains: Array, n: Array, delta: Array | float) -> Array:
    """Return Tango's score statistics of H0: (gains - losses) / n = delta, in the arguments' common shape.

    Of ``n`` pairs, ``losses`` and ``gains`` are those that changed.
    ``twice`` in the body is twice the loss probability's maximum likelihood value under H0.
    """
    net = gains - losses
    product = delta * (1 - delta)
    b = (2 * n - net) * delta - losses - gains
    # q solves 2 n q^2 + b q = losses * delta * (1 - delta); this is 2 q (Tango 1998)
    twice = (np.sqrt(np.maximum(b * b + 8 * n * losses * product, 0.0)) - b) / (2 * n)
    top = net - n * delta
    variance = n * (twice + product)
    known = variance > 0
    score = top / np.sqrt(np.where(known, variance, 1.0))
    return np.where(known, score, np.where(top == 0, 0.0, np.copysign(np.inf, top)))


def tango_interval(losses: float, gains: float, n: float, quantile: float) -> Interval:
    """Return Tango's interval of (gains - losses) / n, the difference of two proportions.

    At its ends the score statistic is +quantile (low end) and -quantile (high end).
    """
    low, high = tango_bounds(np.array(losses), np.array(gains), np.array(n), np.array([quantile, -quantile]))
    return Interval(float(low), float(high))


def tango_bounds(losses: Array, gains: Array, n: Array, targets: Array) -> Array:
    """Return the deltas [T, ...], hypothetical differences, at which the score statistic equals ``targets`` [T].

    If the statistic never equals a target, the delta is -1 or 1. The statistic falls with delta and is 0 at the
    estimate. So targets above 0 give lower bounds, and targets below 0 upper ones.
    """
    estimate = (gains - losses) / n
    wanted = np.reshape(targets, (-1,) + (1,) * np.ndim(estimate))
    shape = np.broadcast_shapes(wanted.shape, np.shape(estimate))
    # a lower bound lies between -1 and the estimate, an upper one between that and 1
    left = np.broadcast_to(np.where(wanted > 0, -1.0, estimate), shape).copy()
    right = np.broadcast_to(np.where(wanted > 0, estimate, 1.0), shape).copy()
    return _root(losses, gains, n, wanted, left, right)


def _root(losses: Array, gains: Array, n: Array, wanted: Array, left: Array, right: Array) -> Array:
    """Return the deltas (hypothetical differences) in [left, right] at which the score statistic equals ``wanted``.

    They are found by false position (Dowell & Jarratt 1971, Illinois).
    """
    cap = 4 * np.abs(wanted)  # near the ends of the scale the score diverges, which would slow false position down

    def excess(delta: Array) -> Array:
        capped: Array = np.clip(tango_scores(losses, gains, n, delta) - wanted, -cap, cap)
        return capped

    # just inside, because at an end the score may have no variance
    gap = 1e-12
    ends, empty = (left, right), right - left <= 2 * gap
    at_left, at_right = (excess(np.where(empty, end, end + inward)) for end, inward in ((left, gap), (right, -gap)))
    above, below, was_above = at_left, at_right, np.full(left.shape, np.nan)
    guess = (left + right) / 2
    for _ in range(_STEPS):
        value = excess(guess)
        if np.all((np.abs(value) <= _PRECISION) | (right - left <= _PRECISION)):
            break
        is_above = value > 0
        weight = np.where(is_above == was_above, 0.5, 1.0)  # an end that stays twice counts half
        above, below = np.where(is_above, value, above * weight), np.where(is_above, below * weight, value)
        left, right = np.where(is_above, guess, left), np.where(is_above, right, guess)
        was_above, span = is_above.astype(np.float64), above - below
        guess = np.where(span > 0, (right * above - left * below) / np.where(span > 0, span, 1.0), left)
        # bisect if rounding put the guess on an end or outside
        guess = np.where((guess > left) & (guess < right), guess, (left + right) / 2)
    # an estimate at the end of the scale is its own bound; a score that never reaches its target has the bound at the
    # end of its side
    outer = np.where(np.abs(ends[0]) == 1, ends[0], ends[1])
    inside = np.where(at_left <= 0, ends[0], np.where(at_right >= 0, ends[1], guess))
    return np.where(empty, outer, inside)


def ess_tango(
    z: npt.ArrayLike,
    clusters: npt.ArrayLike,
    *,
    samples: int = 1,
    alpha: float = 0.05,
    scale: float = 1.0,
    graded: bool = False,
) -> Effect:
    """Return the interval of item differences z [N] in [-scale, scale], by Tango's score at the effective sample size.

    Each difference is averaged over ``samples`` draws, so it is a real number; the summed losses and gains replace the
    discordant counts. Draws are 0 or 1 unless ``graded``: see ``deff_floors``.
    """
    values = np.asarray(z, dtype=np.float64) / scale
    assert np.abs(values).max(initial=0) <= 1 + 1e-9, "differences lie in [-scale, scale]"
    t = totals(values, clusters)
    deff = design_effect(t, floor=deff_floor(values, samples, graded=graded))
    bounds = ess_tango_bounds(
        np.array(t.losses), np.array(t.gains), t.items, np.array(deff), df=t.clusters - 1, alpha=alpha
    )
    low, high, lower, upper, pvalue, pvalue_drop = (float(value) for value in bounds)
    return Effect(
        estimate=t.mean * scale,
        low=low * scale,
        high=high * scale,
        lower=lower * scale,
        upper=upper * scale,
        alpha=alpha,
        pvalue=pvalue,
        pvalue_drop=pvalue_drop,
        method="ESS-Tango",
        source=SOURCE,
        n_items=t.items,
        n_clusters=t.clusters,
        losses=t.losses * scale,
        gains=t.gains * scale,
        deff=deff,
        df=float(t.clusters - 1),
    )


def many_ess_tango(
    z: npt.NDArray[np.floating], counts: npt.ArrayLike, *, samples: int = 1, alpha: float, graded: bool = False
) -> Bounds:
    """Return Tango's score bounds of many samples z [..., N] in [-1, 1], at their effective sample sizes (ESS).

    Items are in order of cluster, with ``counts`` [C] items in each. Items of a cluster may resemble each other, which
    makes the effective size smaller than N.
    """
    t = many_totals(z, counts)
    deff = design_effects(t, cr3_variance(t.residuals, t.counts), floor=deff_floors(z, samples, graded=graded))
    return ess_tango_bounds(t.losses, t.gains, float(t.counts.sum()), deff, df=len(t.counts) - 1, alpha=alpha)


def ess_tango_bounds(losses: Array, gains: Array, items: float, deff: Array, *, df: float, alpha: float) -> Bounds:
    """Return the bounds of samples of ``items`` items from their losses, gains and design effects [...].

    They are Tango's at the effective sample size (ESS), with a t quantile of ``df`` degrees of freedom.
    """
    b, c, n = losses / deff, gains / deff, items / deff  # effective numbers of independent items
    two, one = (float(special.stdtrit(df, q)) for q in (0.5 + LEVEL / 2, 1 - alpha))
    low, high, lower, upper = tango_bounds(b, c, n, np.array([two, -two, one, -one]))
    at_zero = tango_scores(b, c, n, 0.0)
    below = special.stdtr(df, at_zero)
    return Bounds(low, high, lower, upper, 2 * special.stdtr(df, -np.abs(at_zero)), below)


def design_effect(t: Totals, *, floor: float) -> float:
    """Return the design effect of one sample; see ``design_effects``."""
    return float(_design_effects(np.array(t.losses), np.array(t.gains), t.counts, np.array(cr3(t)), floor))


def design_effects(t: ManyTotals, variance: Array, *, floor: npt.ArrayLike) -> Array:
    """Return design effects [...], CR3 variances divided by paired binomial variances, but at least ``floor`` [...].

    Where the binomial variance is 0 (no discordance, or all items lost or gained), a correlation of ``PSEUDO_ICC``
    within clusters is assumed: 1 + (m* - 1) * 0.1, m* = sum n_c^2 / N.
    """
    return _design_effects(t.losses, t.gains, t.counts, variance, floor)


def _design_effects(losses: Array, gains: Array, counts: Array, variance: Array, floor: npt.ArrayLike) -> Array:
    n = counts.sum(axis=-1)
    binomial = (losses + gains - (gains - losses) ** 2 / n) / n**2  # variance of the mean if items were independent
    known = binomial > 1e-15
    assumed = 1 + (np.sum(counts**2, axis=-1) / n - 1) * PSEUDO_ICC
    return np.where(known, np.maximum(variance / np.where(known, binomial, 1.0), floor), assumed)


def deff_floor(values: npt.NDArray[np.floating], samples: int, *, graded: bool = False) -> float:
    """Return the least design effect that the interval of one sample [N] assumes; ``deff_floors`` gives the reasons."""
    return float(deff_floors(values, samples, graded=graded))


def deff_floors(values: npt.NDArray[np.floating], samples: int, *, graded: bool = False) -> Array:
    """Return the least design effect that an interval may assume, for each set of N item means in ``values`` [..., N].

    A value is an item's mean difference over k = ``samples`` draws. With one draw the least effect is 1. With k draws
    it is the larger of 1/k and 1/m, where m is the number of items with a difference. But if every value is a whole
    number, all k draws may be copies of one; copies tell no more than one draw, so the least effect is 1. ``graded``
    scores are not only 0 and 1 and vary less than a binomial of the same mean. A least effect of 1 would make their
    intervals several times too wide, so theirs is close to 0.
    """
    if graded:
        return np.full(values.shape[:-1], GRADED_FLOOR)
    if samples == 1:
        return np.ones(values.shape[:-1])
    whole = np.all(np.abs(values - np.round(values)) < 1e-9, axis=-1)
    differing = np.count_nonzero(np.abs(values) > 1e-9, axis=-1)
    return np.where(whole, 1.0, 1.0 / np.clip(differing, 1, samples))


STATISTIC = Statistic(
    ess_tango,
    oracle="tests/test_stats.py::test_one_item_per_cluster_with_deff_one_is_plain_tango_at_a_t_quantile",
)


def rate_lower(
    scores: npt.ArrayLike, clusters: npt.ArrayLike, *, samples: int = 1, alpha: float = 0.05, graded: bool = False
) -> float:
    """Return the one-sided lower bound of the mean of item scores [N] in [0, 1].

    Each score averages ``samples`` draws, which are 0 or 1 unless ``graded``.
    """
    values = np.asarray(scores, dtype=np.float64)
    t = totals(values, clusters)
    n = t.items / design_effect(t, floor=deff_floor(values, samples, graded=graded))  # effective number of items
    square = float(special.stdtrit(t.clusters - 1, 1 - alpha)) ** 2
    middle = t.mean + square / (2 * n)
    spread = math.sqrt(square * (t.mean * (1 - t.mean) / n + square / (4 * n**2)))
    return max(0.0, (middle - spread) / (1 + square / n))
