"""Dose slopes: the change of a score with the logarithm of a dose, which is a cache budget or a context length.

The slope is a contrast of item means with weights (x - mean) / sum (x - mean)^2, so it is tested like every other
contrast: CR3 with t_{C-1} (Cameron & Miller 2015). The isotonic curve (Barlow et al. 1972) is drawn, never tested.

Wilcoxon's signed-rank test shows whether pairs differ in one direction. Under the null a difference and its negative
are equally likely, and so are all patterns of signs over the ranks. These patterns are counted exactly, also with ties;
for many pairs a normal distribution approximates them. Ranks are used because a few answers change a log-prob by nats
and all others by thousandths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.effect import Array, Effect, Statistic
from kvaudit.reports.stats.tango import ess_tango

_MOST_EXACT = 200  # pairs: the exact test takes a tenth of a second, and its time grows with the third power


def dose_weights(x: npt.ArrayLike) -> Array:
    """Return weights [D] for scores at doses x [D]: the sum of weight times score is the least-squares slope."""
    doses = np.asarray(x, dtype=np.float64)
    assert doses.ndim == 1, doses.shape
    centred = doses - doses.mean()
    spread = float(centred @ centred)
    assert spread > 0, "a slope needs two different doses"
    weights: Array = centred / spread
    return weights


def slope_effect(
    scores: npt.ArrayLike,
    x: npt.ArrayLike,
    clusters: npt.ArrayLike,
    *,
    alpha: float = 0.05,
    reach: float | None = None,
) -> Effect:
    """Return the slope of item scores [D, N] over doses x [D], per unit of x (per doubling if x is log2).

    A difference of two checkpoints' slopes is the slope of their difference: pass candidate - reference. If every item
    has the same slope, the CR3 interval has width 0. Then, if ``reach`` (the width of the range of scores) is given,
    Tango's interval at the effective sample size is returned instead. Its scale spans all slopes that scores in such a
    range can have.
    """
    values = np.asarray(scores, dtype=np.float64)
    weights = dose_weights(x)
    assert values.ndim == 2, values.shape
    assert len(values) == len(weights), (values.shape, len(weights))
    effect = replace(cr3_effect(weights @ values, clusters, alpha=alpha), method="dose slope, CR3-t")
    if reach is None or effect.high > effect.low:
        return effect
    # the weights sum to 0, so scores that span ``reach`` move the slope by at most half of their total size
    steepest = reach * float(np.abs(weights).sum()) / 2
    return ess_tango(weights @ values, clusters, alpha=alpha, scale=steepest)


def isotonic(x: npt.ArrayLike, y: npt.ArrayLike, *, increasing: bool) -> tuple[float, ...]:
    """Return a monotone curve fitted to rates y [D] at doses x [D], with one point per distinct dose, in their order.

    Equal doses are averaged first.
    """
    from scipy import optimize  # slow to import, and few reports need it

    doses, rates = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    assert doses.shape == rates.shape, (doses.shape, rates.shape)
    _, codes, counts = np.unique(doses, return_inverse=True, return_counts=True)
    means = np.bincount(codes, weights=rates) / counts  # [distinct doses]
    return tuple(optimize.isotonic_regression(means, weights=counts, increasing=increasing).x.tolist())


STATISTIC = Statistic(
    slope_effect,
    oracle="tests/test_stats_slope.py::test_slope_contrast_equals_statsmodels_with_crv3",
    # the whole difference between two doses
    of=lambda z, clusters: slope_effect(np.stack([np.zeros_like(z), z]), (0.0, 1.0), clusters),
)


def signed_rank_above(differences: npt.ArrayLike) -> float:
    """Return the one-sided p-value of Wilcoxon's signed-rank test for differences [N] that lie above 0.

    Differences of 0 are left out; if no others remain, it is 1. It is exact for up to ``_MOST_EXACT`` differences; for
    more it comes from a normal distribution, with a continuity correction.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if not len(values):
        return 1.0
    _, place, counts = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    # twice the midrank, a whole number: the first plus the last rank of a group of ties
    ranks = (2 * np.cumsum(counts) - counts + 1)[place]
    positive = ranks[values > 0].sum()
    if len(values) > _MOST_EXACT:
        half_step = np.gcd.reduce(ranks) / 2  # of the possible sums, for the continuity correction
        spread = np.sqrt(np.sum(np.square(ranks, dtype=np.float64))) / 2  # floats: whole numbers would overflow
        return float(special.ndtr((ranks.sum() / 2 - positive + half_step) / spread))
    chances = np.ones(1)  # chances of every sum of the positive ranks
    for rank in ranks:
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return float(min(1.0, chances[positive:].sum()))
