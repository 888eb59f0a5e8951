"""The ratio of two paired rates in clusters, with an interval that is valid at zero counts.

Tang, Tang & Chan 2003, Statistics in Medicine 22:1217 (score interval of a paired ratio; the statistic is that of Nam &
Blackwelder 2002, 21:689). The ratio is theta if the difference "events of one side minus theta times events of the
other side" has a mean of 0. Clusters are treated as in ``tango``: at every theta the sample and its counts are divided
by the design effect of this difference (CR3 over the variance of independent items), and the t quantile has C - 1
degrees of freedom. The combination is this project's own. It was chosen by simulation against Fieller's interval with
CR3, the log ratio with a t quantile, the cluster bootstrap, and the score with the same design effect at every theta
(docs/results/gate.md). If the reference has no events, the ratio has no upper end; if neither side has any, it has no
lower end either.
No statistic: it takes both sides, not their difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import cr3_variance
from kvaudit.reports.stats.effect import LEVEL, Array
from kvaudit.reports.stats.rule import chi_square_limit, shows_above
from kvaudit.reports.stats.tango import PSEUDO_ICC

SOURCE = "Tang, Tang & Chan 2003 at the CR3 effective sample size"
_LARGEST = 1e6  # larger upper ends are infinite
_STEPS = 60  # bisection steps on the logarithm


class Events(NamedTuple):
    """How often an event happened on paired items, in total [...] and by cluster [..., C].

    ``both`` counts the items on which it happened with reference and candidate, ``before`` with the reference only,
    ``after`` with the candidate only; an item that averages several draws counts as a fraction. ``reference`` and
    ``candidate`` are the totals of each side by cluster, ``counts`` [C] the items of each cluster. ``floor`` [...] is
    the least design effect to assume (``tango.deff_floors``).
    """

    both: Array
    before: Array
    after: Array
    reference: Array  # [..., C]
    candidate: Array  # [..., C]
    counts: Array  # [C]
    floor: Array


@dataclass(frozen=True, slots=True)
class Times:
    """The ratio of two rates of an event: two-sided 95 % interval and one-sided bounds at ``alpha``.

    ``estimate`` is None if the event never happened with the reference; an upper end that does not exist is infinite.
    """

    estimate: float | None
    low: float
    high: float
    lower: float
    upper: float
    alpha: float
    method: str = "ESS-Tang"
    source: str = SOURCE


def events_of(reference: Array, candidate: Array, counts: npt.NDArray[np.int64], floor: npt.ArrayLike = 1.0) -> Events:
    """Count an unwanted event on both sides, given its rates [..., N] on the items, from 0 to 1.

    The items are in order of cluster; ``counts`` [C] are the numbers of items in each cluster. ``floor`` is the least
    design effect to assume, see ``Events``.
    """
    both = np.minimum(reference, candidate).sum(axis=-1, dtype=np.float64)
    starts = np.cumsum(counts) - counts  # [C], the first item of each cluster
    own, other = (np.add.reduceat(side, starts, axis=-1).astype(np.float64) for side in (reference, candidate))
    before, after = own.sum(axis=-1) - both, other.sum(axis=-1) - both
    return Events(both, before, after, own, other, counts.astype(np.float64), np.broadcast_to(floor, both.shape))


def tang_scores(both: Array, before: Array, after: Array, n: Array | float, theta: Array | float) -> Array:
    """Return score statistics [...] of H0: candidate = theta * reference; positive if the data lie above theta.

    ``n`` is the number of items. ``both`` of them have the event on both sides, ``before`` with the reference only,
    ``after`` with the candidate only. The discordant share under H0 is its maximum likelihood value, the larger root of
    a quadratic. At theta = 1 the statistic is McNemar's.
    """
    # a p^2 + b p + c = 0, where p is the share of events of the reference only
    a = n * (1 + theta)
    b = (both + before) * theta**2 - (both + after + 2 * before)
    some = both + before + after
    c = before * (1 - theta) * some / n
    alone = (np.sqrt(np.maximum(b * b - 4 * a * c, 0.0)) - b) / (2 * a)  # p
    discordant = ((1 + theta) * alone + (theta - 1) * some / n) / theta
    top, variance = both + after - theta * (both + before), n * theta * discordant
    known = variance > 1e-15 * n  # below that it is rounding error
    score = top / np.sqrt(np.where(known, variance, 1.0))
    return np.where(known, score, np.where(top == 0, 0.0, np.copysign(np.inf, top)))


def ess_scores(e: Events, theta: Array | float) -> Array:
    """Return score statistics [...] of H0: candidate = theta * reference; positive if the data lie above theta.

    They are computed like ``tang_scores``, but all counts are first divided by the design effect, since items of a
    cluster are not independent.
    """
    deff = _design_effects(e, theta)
    n = float(e.counts.sum())
    return tang_scores(e.both / deff, e.before / deff, e.after / deff, n / deff, theta)


def _design_effects(e: Events, theta: Array | float) -> Array:
    """Return the design effects [...] of candidate - theta * reference.

    These are its variance with clusters (CR3), divided by the variance that independent items would have.
    """
    n, times = float(e.counts.sum()), np.asarray(theta, dtype=np.float64)
    totals = e.candidate - times[..., None] * e.reference  # [..., C]
    mean = totals.sum(axis=-1) / n
    variance = cr3_variance(totals - e.counts * mean[..., None], e.counts)
    # squares of candidate - theta * reference, by where the event happened
    squares = times**2 * e.before + e.after + (1 - times) ** 2 * e.both
    binomial = (squares - n * mean**2) / n**2  # variance of the mean if all items were independent
    known = binomial > 1e-15
    assumed = 1 + (float(np.sum(e.counts**2)) / n - 1) * PSEUDO_ICC
    return np.where(known, np.maximum(variance / np.where(known, binomial, 1.0), e.floor), assumed)


def is_below(e: Events, limit: float, *, alpha: float) -> npt.NDArray[np.bool_]:
    """Return whether the upper bound of the ratio of rates (candidate to reference), one-sided, lies below ``limit``.

    This is a test at the limit itself, which needs no interval.
    """
    known = e.both + e.before > 0
    return known & (ess_scores(e, limit) < -float(special.stdtrit(len(e.counts) - 1, 1 - alpha)))


def times_of(e: Events, *, alpha: float) -> Times:
    """Return how many times as often the event happens with the candidate as with the reference, with its interval.

    ``e`` holds the counts of one sample, ``alpha`` is the level of the one-sided bounds.
    """
    df, old, new = len(e.counts) - 1, float(e.both + e.before), float(e.both + e.after)
    two, one = (float(special.stdtrit(df, q)) for q in (0.5 + LEVEL / 2, 1 - alpha))
    estimate = new / old if old > 0 else None
    low, lower = (_end(e, quantile, estimate, upper=False) for quantile in (two, one))
    high, upper = (_end(e, -quantile, estimate, upper=True) for quantile in (two, one))
    return Times(estimate, low, high, lower, upper, alpha)


def _end(e: Events, quantile: float, estimate: float | None, *, upper: bool) -> float:
    """Return one end of a ratio's interval: the ratio at which the score statistic reaches the quantile.

    It is found to a relative precision of 1e-6.
    """
    if upper and estimate is None:
        return np.inf
    if not upper and (estimate == 0 or (estimate is None and float(e.after) == 0)):
        return 0.0
    # search between the estimate and a ratio that is larger, or smaller, than any of interest
    inner, outer = (estimate or 1 / _LARGEST, _LARGEST) if upper else (estimate or _LARGEST, 1 / _LARGEST)

    def reaches(theta: float) -> bool:
        score = float(ess_scores(e, np.float64(theta)))
        return score < quantile if upper else score > quantile

    if not reaches(outer):
        return np.inf if upper else 0.0
    near, far = np.log(inner), np.log(outer)
    for _ in range(_STEPS):
        middle = (near + far) / 2
        near, far = (near, middle) if reaches(float(np.exp(middle))) else (middle, far)
    return float(np.exp(far))


def widest(every: Sequence[Times]) -> Times:
    """Return the first of several ratios, with its interval and bounds widened to include those of all others."""
    return Times(
        every[0].estimate,
        min(t.low for t in every),
        max(t.high for t in every),
        min(t.lower for t in every),
        max(t.upper for t in every),
        every[0].alpha,
    )


def shows_ratio(
    reference: Array, candidate: Array, counts: npt.ArrayLike, *, limit: float, alpha: float
) -> npt.NDArray[np.bool_]:
    """Return whether a few broken templates cannot hide a ratio of ``limit`` (the template rule, ``stats.rule``).

    ``reference`` and ``candidate`` [..., C] are the numbers of events on each side by cluster, ``counts`` [C] the
    numbers of items. The ratio must be ruled out twice: with clusters weighted by their items, and with equal weights.
    It is assumed that an unseen template may have the event on all items with the candidate and on none with the
    reference.
    """
    above = limit * np.asarray(reference, dtype=np.float64) - np.asarray(candidate, dtype=np.float64)
    sizes = np.asarray(counts, dtype=np.float64)
    return shows_above(above, sizes, worst=1.0, wanted=chi_square_limit(len(sizes), alpha))


def points_of(limit: float, rate: npt.ArrayLike) -> Array:
    """Return by how much the candidate's rate of an unwanted event may exceed the reference's ``rate`` [...].

    ``limit`` is the largest allowed ratio of the two rates, candidate to reference: with a limit of 1.1 a rate of 0.20
    may rise by 0.02. No rate rises above 1.
    """
    share = np.asarray(rate, dtype=np.float64)
    points: Array = np.minimum((limit - 1) * share, 1 - share)
    return points
