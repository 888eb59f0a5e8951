"""How many times as often: the ratio of two paired rates in clusters, with an interval that holds at zero counts.

Tang, Tang & Chan 2003, Statistics in Medicine 22:1217 (score interval of a paired ratio; the statistic is that of Nam &
Blackwelder 2002, 21:689). A ratio is theta where the events of one side less theta times those of the other are 0 in
the mean: a difference again, so the clusters come in as they do for ``tango``. At every theta the sample and its counts
are divided by the design effect of that very difference, CR3 over the variance of independent items, and the quantile
is t with C - 1. The composition is this project's, chosen by simulation against Fieller's interval with CR3, the log
ratio with a t quantile, the cluster bootstrap, and the score at one design effect for all theta (docs/results/gate.md).
Nothing on the reference's side leaves the ratio without an upper end, nothing on either side without a lower one too.
No statistic: it takes both sides, where those take their difference.
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
_LARGEST = 1e6  # a ratio beyond it has no end
_STEPS = 60  # halvings of the logarithm


class Events(NamedTuple):
    """Events of paired items [...], summed, and their totals [..., C] over clusters of ``counts`` [C] items.

    ``both`` happened on both sides, ``before`` on the reference's alone, ``after`` on the candidate's alone; of items
    averaged over draws the parts of each. ``floor`` [...] is the least design effect (``tango.deff_floors``).
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
    """How many times as often something happens: two-sided 95 % interval and one-sided bounds at ``alpha``.

    Without an event of the reference there is no ``estimate``; what has no upper end is infinite.
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
    """Events of items [..., N] in [0, 1] that stand in order of cluster, ``counts`` [C] in each."""
    both = np.minimum(reference, candidate).sum(axis=-1, dtype=np.float64)
    starts = np.cumsum(counts) - counts  # [C], where each cluster begins
    own, other = (np.add.reduceat(side, starts, axis=-1).astype(np.float64) for side in (reference, candidate))
    before, after = own.sum(axis=-1) - both, other.sum(axis=-1) - both
    return Events(both, before, after, own, other, counts.astype(np.float64), np.broadcast_to(floor, both.shape))


def tang_scores(both: Array, before: Array, after: Array, n: Array | float, theta: Array | float) -> Array:
    """Score statistics [...] of H0: candidate = theta * reference; positive where the data lie above theta.

    The discordant share under H0 is its maximum likelihood value, the larger root of a quadratic. Z(1) is McNemar's.
    """
    # a p^2 + b p + c = 0, where p is the share that happens with the reference alone
    a = n * (1 + theta)
    b = (both + before) * theta**2 - (both + after + 2 * before)
    some = both + before + after
    c = before * (1 - theta) * some / n
    alone = (np.sqrt(np.maximum(b * b - 4 * a * c, 0.0)) - b) / (2 * a)  # of the reference
    discordant = ((1 + theta) * alone + (theta - 1) * some / n) / theta
    top, variance = both + after - theta * (both + before), n * theta * discordant
    known = variance > 1e-15 * n  # otherwise nothing but rounding
    score = top / np.sqrt(np.where(known, variance, 1.0))
    return np.where(known, score, np.where(top == 0, 0.0, np.copysign(np.inf, top)))


def ess_scores(e: Events, theta: Array | float) -> Array:
    """Score statistics [...] at the effective sample size of ``theta``."""
    deff = _design_effects(e, theta)
    n = float(e.counts.sum())
    return tang_scores(e.both / deff, e.before / deff, e.after / deff, n / deff, theta)


def _design_effects(e: Events, theta: Array | float) -> Array:
    """CR3 over the variance of independent items, of candidate - theta * reference."""
    n, times = float(e.counts.sum()), np.asarray(theta, dtype=np.float64)
    totals = e.candidate - times[..., None] * e.reference  # [..., C]
    mean = totals.sum(axis=-1) / n
    variance = cr3_variance(totals - e.counts * mean[..., None], e.counts)
    # squares of candidate - theta * reference, by where the event happened
    squares = times**2 * e.before + e.after + (1 - times) ** 2 * e.both
    binomial = (squares - n * mean**2) / n**2  # variance of the mean, were all items independent
    known = binomial > 1e-15
    assumed = 1 + (float(np.sum(e.counts**2)) / n - 1) * PSEUDO_ICC
    return np.where(known, np.maximum(variance / np.where(known, binomial, 1.0), e.floor), assumed)


def is_below(e: Events, limit: float, *, alpha: float) -> npt.NDArray[np.bool_]:
    """Whether the one-sided upper bound lies below ``limit``: one test, no interval."""
    known = e.both + e.before > 0
    return known & (ess_scores(e, limit) < -float(special.stdtrit(len(e.counts) - 1, 1 - alpha)))


def times_of(e: Events, *, alpha: float) -> Times:
    """The ratio of one sample, with its interval."""
    df, old, new = len(e.counts) - 1, float(e.both + e.before), float(e.both + e.after)
    two, one = (float(special.stdtrit(df, q)) for q in (0.5 + LEVEL / 2, 1 - alpha))
    estimate = new / old if old > 0 else None
    low, lower = (_end(e, quantile, estimate, upper=False) for quantile in (two, one))
    high, upper = (_end(e, -quantile, estimate, upper=True) for quantile in (two, one))
    return Times(estimate, low, high, lower, upper, alpha)


def _end(e: Events, quantile: float, estimate: float | None, *, upper: bool) -> float:
    """The ratio furthest from the estimate whose score does not reach the quantile, to a millionth of itself."""
    if upper and estimate is None:
        return np.inf
    if not upper and (estimate == 0 or (estimate is None and float(e.after) == 0)):
        return 0.0
    # from the estimate outwards to an end of the scale, which is beyond every ratio of interest
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
    """The first ratio, as uncertain as all readings of the same answers together."""
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
    """The template rule of a ratio: whether event totals [..., C] rule out that it is ``limit``, weighted both ways.

    A template that nobody saw may have all its events on the candidate's side, and none on the reference's.
    """
    above = limit * np.asarray(reference, dtype=np.float64) - np.asarray(candidate, dtype=np.float64)
    sizes = np.asarray(counts, dtype=np.float64)
    return shows_above(above, sizes, worst=1.0, wanted=chi_square_limit(len(sizes), alpha))


def points_of(limit: float, rate: npt.ArrayLike) -> Array:
    """What a limit allows in score units, at most all, beside a reference at which it happens at this rate [...]."""
    share = np.asarray(rate, dtype=np.float64)
    points: Array = np.minimum((limit - 1) * share, 1 - share)
    return points
