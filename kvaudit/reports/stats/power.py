"""The precision and power to plan with, for a paired comparison of scores in clusters.

Miller 2024, arXiv:2411.00640 (variance of a paired difference), times the design effect of the clusters (Kish 1965):

    detectable = (t_{1-alpha} + t_{power}) * error, where error = sqrt(variance * deff / items).

The t quantiles have C - 1 degrees of freedom (``df``) for C clusters. The chance of a PASS is simulated
(``verdict.chance``). The file also computes churn, the share of answers that changed: a drift near zero may be many
losses and as many gains (McNemar 1947).
No statistic: formulas for planning, without data, and churn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special


def difference_variance(discordance: float, *, drift: float) -> float:
    """Return the variance of an item's paired difference of single answers.

    ``discordance`` is the share of pairs that differ, at least |drift|.
    """
    assert 0 < discordance <= 1, discordance
    assert abs(drift) <= discordance, "the discordance is at least the drift"
    return discordance - drift**2


def detection_power(drop: float, error: float, *, df: float, alpha: float) -> float:
    """Return the probability that the upper bound of the difference is below 0 if the true loss is ``drop``.

    ``error`` is the standard error of the difference.
    """
    return float(special.stdtr(df, drop / error - special.stdtrit(df, 1 - alpha)))


def minimal_detectable(error: float, *, df: float, alpha: float, power: float) -> float:
    """Return the smallest true difference that is detected with probability ``power`` at this standard error."""
    return float(special.stdtrit(df, 1 - alpha) + special.stdtrit(df, power)) * error


@dataclass(frozen=True, slots=True)
class Flips:
    """The shares of answers that changed for the worse (lost) and for the better (won); won - lost is the drift.

    ``rerun`` is the A/A churn, how often two answers of one checkpoint differ (mean of both sides): only churn beyond
    it is an effect. It is None if there is only one sample.
    """

    lost: float
    won: float
    rerun: float | None = None

    @property
    def churn(self) -> float:
        """The share of answers that differ: P(candidate's answer is not the reference's)."""
        return self.lost + self.won


def flips(reference: npt.ArrayLike, candidate: npt.ArrayLike, *, samples: int = 1) -> Flips:
    """Return the shares of answers that the candidate lost and won, compared within pairs of seeds.

    Takes item means [S, N] in [0, 1], one row for each pair of seeds; an item has ``samples`` answers on either side.
    One answer is compared with the one of the other side; of several, each with each of the other side, since they have
    no order.
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
