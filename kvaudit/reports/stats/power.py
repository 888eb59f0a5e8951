"""The precision and power to plan with, for a paired comparison of scores in clusters.

Miller 2024, arXiv:2411.00640 (variance of a paired difference), times the design effect of the clusters (Kish 1965):

    detectable = (t_{1-alpha} + t_{power}) * sqrt(variance * deff / items).

Everything broadcasts over arrays. A ``drift`` below 0 is a loss, one above 0 a gain. ``df`` are clusters - 1. The
chance of a PASS is simulated (``verdict.chance``).
No statistic: formulas for planning, without data, and churn, the share of answers that changed: a drift near zero may
be many losses and as many gains (McNemar 1947).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Return the design effect 1 + (m - 1) * ICC of the paired difference for clusters of m items.

    If cluster sizes n_c vary, pass m = sum n_c^2 / N, N the number of items.
    """
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
    """Return the probability that the upper bound of the difference falls below 0 if the true drop is |drift|."""
    ratio = np.abs(drift) / standard_error(items, variance, deff=deff)
    power: Array = special.stdtr(df, ratio - special.stdtrit(df, 1 - alpha))
    return power


def minimal_detectable(error: npt.ArrayLike, *, df: float, alpha: float = 0.05, power: float = 0.8) -> Array:
    """Return the smallest true difference that is detected with probability ``power`` at this standard error."""
    quantiles = float(special.stdtrit(df, 1 - alpha) + special.stdtrit(df, power))
    detectable: Array = quantiles * np.asarray(error, dtype=np.float64)
    return detectable


def standard_error(items: npt.ArrayLike, variance: npt.ArrayLike, *, deff: npt.ArrayLike = 1.0) -> Array:
    """Return the standard error of a mean difference over ``items`` in clusters.

    ``variance`` is that of one item's difference, ``deff`` the design effect of the clusters.
    """
    error: Array = np.sqrt(np.asarray(variance, dtype=np.float64) * np.asarray(deff) / np.asarray(items))
    return error


@dataclass(frozen=True, slots=True)
class Flips:
    """The shares of answers that changed for the worse (lost) and for the better (won); won - lost is the drift.

    ``rerun`` is the A/A churn, the disagreement of two answers of the same checkpoint (mean of both sides): only churn
    beyond it is an effect. None with a single sample.
    """

    lost: float
    won: float
    rerun: float | None = None

    @property
    def churn(self) -> float:
        """The share of answers that differ: P(candidate's answer is not the reference's)."""
        return self.lost + self.won


def flips(reference: npt.ArrayLike, candidate: npt.ArrayLike, *, samples: int = 1) -> Flips:
    """Return the shares of answers that the candidate lost and won, each compared within a pair of seeds.

    Takes item means [S, N] in [0, 1] of ``samples`` draws each, a row per pair of seeds. Single draws are compared
    pairwise; of several draws, which have no order, every draw of one side is compared with every draw of the other.
    """
    old, new = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    assert old.shape == new.shape, (old.shape, new.shape)
    assert old.size, "flips need an item"
    if samples > 1:
        return draw_flips(old, new, samples=samples)
    return Flips(float(np.maximum(old - new, 0).mean()), float(np.maximum(new - old, 0).mean()))


def draw_flips(reference: npt.ArrayLike, candidate: npt.ArrayLike, *, samples: int = 1) -> Flips:
    """Return how often answers are lost (right under the reference, wrong under the candidate), and how often won.

    The shares are averages over all pairs of one sample of the reference and one of the candidate. Takes item means
    [...] in [0, 1] of ``samples`` 0/1 draws each.
    """
    old, new = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    assert old.shape == new.shape, (old.shape, new.shape)
    assert old.size, "flips need an item"
    # an item's mean is the chance of a draw, so a product is the chance of two draws that differ
    lost, won = float((old * (1 - new)).mean()), float(((1 - old) * new).mean())
    if samples == 1:
        return Flips(lost, won)
    # two draws of one item disagree with probability 2 p (1 - p); the mean of both sides cancels the 2
    rerun = float((old * (1 - old) + new * (1 - new)).mean()) * samples / (samples - 1)  # without bias
    return Flips(lost, won, rerun)
