"""Power and size of a non-inferiority comparison of paired scores in clusters.

Miller 2024, arXiv:2411.00640 (variance of a paired difference with repeated samples), times the design effect of the
clusters (Kish 1965). Every function solves the same equation for another unknown,

    (t_{1-alpha} + t_{power}) * sqrt(variance * deff / items) = margin + drift,

and broadcasts over arrays. A ``drift`` below 0 is a loss, one above 0 a gain. ``df`` are clusters - 1, infinite (normal
quantiles) for planning without a number of them.
No statistic: formulas for planning, without data.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]


def difference_variance(
    discordance: npt.ArrayLike, *, drift: npt.ArrayLike = 0.0, samples: npt.ArrayLike = 1, sampling_share: float = 0.0
) -> Array:
    """Variance of an item's paired difference, averaged over ``samples`` draws.

    ``discordance`` is the share of single-draw pairs that differ, at least |drift|: nothing is lost or gained where
    the arms agree. ``sampling_share`` is the part of the variance that is decoding noise and shrinks with the samples
    (0 for greedy decoding: more samples buy nothing).
    """
    assert 0 <= sampling_share <= 1, sampling_share
    share = np.asarray(discordance, dtype=np.float64)
    assert np.all((share > 0) & (share <= 1) & (share >= np.abs(drift))), "the discordance is at least the drift"
    single = share - np.square(drift)
    variance: Array = single * (1 - sampling_share + sampling_share / np.asarray(samples, dtype=np.float64))
    return variance


def design_effect(icc: npt.ArrayLike, cluster_size: npt.ArrayLike) -> Array:
    """1 + (m - 1) * ICC of the paired difference; m = sum n_c^2 / N when sizes vary."""
    effect: Array = 1 + (np.asarray(cluster_size, dtype=np.float64) - 1) * np.asarray(icc, dtype=np.float64)
    return effect


def items_needed(
    margin: npt.ArrayLike,
    variance: npt.ArrayLike,
    *,
    deff: npt.ArrayLike = 1.0,
    drift: npt.ArrayLike = 0.0,
    alpha: float = 0.05,
    power: float = 0.8,
    df: float = math.inf,
) -> npt.NDArray[np.int64]:
    """Fewest items with which a true ``drift`` passes a margin with probability ``power``; 2^62 stands for any more."""
    spread = _quantiles(alpha, power, df) * np.sqrt(np.asarray(variance) * np.asarray(deff))
    with np.errstate(over="ignore"):  # next to no room
        wanted = np.minimum((spread / _room(margin, drift)) ** 2 - 1e-9, 2.0**62)
    items: npt.NDArray[np.int64] = np.ceil(wanted).astype(np.int64)
    return items


def power(
    items: npt.ArrayLike,
    margin: npt.ArrayLike,
    variance: npt.ArrayLike,
    *,
    deff: npt.ArrayLike = 1.0,
    drift: npt.ArrayLike = 0.0,
    alpha: float = 0.05,
    df: float = math.inf,
) -> Array:
    """Probability that the lower bound clears the margin at a true ``drift``; < alpha beyond the margin."""
    room = np.asarray(margin, dtype=np.float64) + np.asarray(drift, dtype=np.float64)
    passed: Array = special.stdtr(
        df, room / standard_error(items, variance, deff=deff) - special.stdtrit(df, 1 - alpha)
    )
    return passed


def detection_power(
    items: npt.ArrayLike,
    drift: npt.ArrayLike,
    variance: npt.ArrayLike,
    *,
    deff: npt.ArrayLike = 1.0,
    alpha: float = 0.05,
    df: float = math.inf,
) -> Array:
    """Probability that the upper bound falls below 0 at a true drop of |drift|."""
    return power(items, np.abs(drift), variance, deff=deff, alpha=alpha, df=df)  # a mirrored PASS, without a drift


def smallest_margin(
    items: npt.ArrayLike,
    variance: npt.ArrayLike,
    *,
    deff: npt.ArrayLike = 1.0,
    drift: npt.ArrayLike = 0.0,
    alpha: float = 0.05,
    power: float = 0.8,
    df: float = math.inf,
) -> Array:
    """Smallest margin that a true ``drift`` passes with probability ``power``; 0 where a gain passes any."""
    wanted = minimal_detectable(standard_error(items, variance, deff=deff), df=df, alpha=alpha, power=power)
    margin: Array = np.maximum(0.0, wanted - np.asarray(drift, dtype=np.float64))
    return margin


def minimal_detectable(error: npt.ArrayLike, *, df: float, alpha: float = 0.05, power: float = 0.8) -> Array:
    """MDE: smallest true difference from the tested value found with probability ``power`` at this standard error."""
    detectable: Array = _quantiles(alpha, power, df) * np.asarray(error, dtype=np.float64)
    return detectable


def standard_error(items: npt.ArrayLike, variance: npt.ArrayLike, *, deff: npt.ArrayLike = 1.0) -> Array:
    """Standard error of a mean difference over ``items`` in clusters."""
    error: Array = np.sqrt(np.asarray(variance, dtype=np.float64) * np.asarray(deff) / np.asarray(items))
    return error


def _room(margin: npt.ArrayLike, drift: npt.ArrayLike) -> Array:
    room: Array = np.asarray(margin, dtype=np.float64) + np.asarray(drift, dtype=np.float64)
    assert np.all(room > 0), "no number of items passes a drop at or beyond the margin"
    return room


def _quantiles(alpha: float, power: float, df: float) -> float:
    assert 0 < alpha < 1, alpha
    assert 0 < power < 1, power
    return float(special.stdtrit(df, 1 - alpha) + special.stdtrit(df, power))
