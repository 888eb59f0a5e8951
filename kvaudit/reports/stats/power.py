"""The planned width of a paired comparison of scores in clusters.

Miller 2024, arXiv:2411.00640 (variance of a paired difference), times the design effect of the clusters (Kish 1965):

    detectable = (t_{1-alpha} + t_{power}) * sqrt(variance * deff / items).

Everything broadcasts over arrays. A ``drift`` below 0 is a loss, one above 0 a gain. ``df`` are clusters - 1. The
chance of a PASS is simulated (``verdict.chance``).
No statistic: formulas for planning, without data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.effect import Array


def difference_variance(discordance: npt.ArrayLike, *, drift: npt.ArrayLike = 0.0) -> Array:
    """Return the variance of an item's paired difference of single answers.

    ``discordance`` is the share of pairs that differ, at least |drift|.
    """
    share = np.asarray(discordance, dtype=np.float64)
    assert np.all((share > 0) & (share <= 1) & (share >= np.abs(drift))), "the discordance is at least the drift"
    variance: Array = share - np.square(drift)
    return variance


def icc_design_effect(icc: npt.ArrayLike, cluster_size: npt.ArrayLike) -> Array:
    """Return 1 + (m - 1) * ICC of the paired difference; m = sum n_c^2 / N if sizes vary."""
    effect: Array = 1 + (np.asarray(cluster_size, dtype=np.float64) - 1) * np.asarray(icc, dtype=np.float64)
    return effect


def detection_power(
    items: npt.ArrayLike,
    drift: npt.ArrayLike,
    variance: npt.ArrayLike,
    *,
    deff: npt.ArrayLike = 1.0,
    alpha: float = 0.05,
    df: float,
) -> Array:
    """Return the probability that the upper bound falls below 0 at a true drop of |drift|."""
    ratio = np.abs(drift) / standard_error(items, variance, deff=deff)
    power: Array = special.stdtr(df, ratio - special.stdtrit(df, 1 - alpha))
    return power


def minimal_detectable(error: npt.ArrayLike, *, df: float, alpha: float = 0.05, power: float = 0.8) -> Array:
    """Return the smallest true difference that is detected with probability ``power`` at this standard error."""
    quantiles = float(special.stdtrit(df, 1 - alpha) + special.stdtrit(df, power))
    detectable: Array = quantiles * np.asarray(error, dtype=np.float64)
    return detectable


def standard_error(items: npt.ArrayLike, variance: npt.ArrayLike, *, deff: npt.ArrayLike = 1.0) -> Array:
    """Return the standard error of a mean difference over ``items`` in clusters."""
    error: Array = np.sqrt(np.asarray(variance, dtype=np.float64) * np.asarray(deff) / np.asarray(items))
    return error
