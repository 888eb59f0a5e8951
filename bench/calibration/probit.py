"""A probit model of two arms on the same items, with exact rates, discordance and cluster correlation.

Each answer has a latent value of variance 1: a part common to both arms (by cluster and item) and a part of its arm (by
cluster, item and draw). An answer is desired if the value lies below the normal quantile of the arm's rate. The
bivariate normal distribution function gives the parameters exactly. Used by bench.calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)


def both_below(h: float, k: float, correlation: float) -> float:
    """Return P(X < h, Y < k) of standard normals, integrated over the correlation (Drezner & Wesolowsky 1990)."""
    top = float(np.arcsin(np.clip(correlation, -1.0, 1.0)))
    angle: npt.NDArray[np.float64] = top * (_NODES + 1) / 2  # from 0 to arcsin of the correlation
    exponent = -(h * h + k * k - 2 * h * k * np.sin(angle)) / (2 * np.cos(angle) ** 2)
    area = top / 2 * float(np.sum(_WEIGHTS * np.exp(exponent))) / (2 * np.pi)
    return float(special.ndtr(h) * special.ndtr(k)) + area


def correlation_for(h: float, k: float, both: float) -> float:
    """Return the correlation in [0, 1) with P(X < h, Y < k) = ``both``; raises if there is none."""
    assert both_below(h, k, 0.0) <= both <= both_below(h, k, 0.999999), (h, k, both)
    from scipy import optimize  # slow to import, and a report asks for no rate of ours

    return float(optimize.brentq(lambda r: both_below(h, k, r) - both, 0.0, 0.999999, xtol=1e-12))


Floats = npt.NDArray[np.float32]
SHARED_BY_CLUSTER = 0.3  # of what the arms share
OWN_BY_ITEM = 0.5  # of an arm's own part that is not its clusters': the rest is drawn anew for every sample


class Shares(NamedTuple):
    """Variances of the parts of the latent value; they sum to 1."""

    cluster: float
    item: float
    own_cluster: float
    own_item: float
    draw: float


@dataclass(frozen=True)
class Probit:
    """Two arms: reference rate, drift (candidate - reference), share of differing draws, draws averaged per item.

    ``own_by_cluster`` is the share of an arm's own part that its clusters have in common; it sets ``icc``.
    """

    drift: float
    discordance: float
    own_by_cluster: float = 0.0
    samples: int = 1
    reference: float = 0.85

    @cached_property
    def cuts(self) -> tuple[float, float]:
        """The latent values below which the reference's and the candidate's answers are desired."""
        return float(special.ndtri(self.reference)), float(special.ndtri(self.reference + self.drift))

    @cached_property
    def shares(self) -> Shares:
        """The variances that give the discordance exactly."""
        # P(both desired): both rates, less the pairs that differ, halved
        shared = correlation_for(*self.cuts, (2 * self.reference + self.drift - self.discordance) / 2)
        own = (1 - shared) * (1 - self.own_by_cluster)
        return Shares(
            cluster=shared * SHARED_BY_CLUSTER,
            item=shared * (1 - SHARED_BY_CLUSTER),
            own_cluster=(1 - shared) * self.own_by_cluster,
            own_item=own * OWN_BY_ITEM,
            draw=own * (1 - OWN_BY_ITEM),
        )

    @cached_property
    def icc(self) -> float:
        """The exact intra-cluster correlation of the item differences, averaged over the draws."""
        s = self.shares
        between = self._covariance(s.cluster + s.own_cluster, s.cluster)
        again = self._covariance(1 - s.draw, s.cluster + s.item)
        single = self.discordance - self.drift**2
        return between / (single / self.samples + again * (1 - 1 / self.samples))

    def _covariance(self, same_arm: float, other_arm: float) -> float:
        """Return the covariance of two differences with these latent correlations within and between the arms."""
        low, high = self.cuts
        one, two = self.reference, self.reference + self.drift
        within = both_below(low, low, same_arm) - one**2 + both_below(high, high, same_arm) - two**2
        return within - 2 * (both_below(low, high, other_arm) - one * two)

    def draw(self, rng: np.random.Generator, simulations: int, counts: npt.NDArray[np.int64]) -> Floats:
        """Draw item differences [simulations, N] in order of cluster, averaged over the draws."""
        reference, candidate = self.answers(rng, simulations, counts)
        return candidate - reference

    def answers(self, rng: np.random.Generator, simulations: int, counts: npt.NDArray[np.int64]) -> list[Floats]:
        """Draw mean answers [simulations, N] of the reference and of the candidate."""
        s, shape = self.shares, (simulations, int(counts.sum()))
        by_cluster = rng.standard_normal((3, simulations, len(counts)), dtype=np.float32)
        shared = np.float32(s.item**0.5) * rng.standard_normal(shape, dtype=np.float32)
        levels = np.float32(s.cluster**0.5) * by_cluster[2] + np.float32(s.own_cluster**0.5) * by_cluster[:2]
        known = (shared + np.repeat(level, counts, axis=1) for level in levels)
        return [self._answers(rng, part, cut) for part, cut in zip(known, self.cuts, strict=True)]

    def _answers(self, rng: np.random.Generator, known: Floats, cut: float) -> Floats:
        """Draw mean answers of one arm, given the part of the latent values that both arms share."""
        s = self.shares
        if self.samples == 1:
            noise = np.float32((s.own_item + s.draw) ** 0.5) * rng.standard_normal(known.shape, dtype=np.float32)
            return (known + noise < np.float32(cut)).astype(np.float32)
        item = known + np.float32(s.own_item**0.5) * rng.standard_normal(known.shape, dtype=np.float32)
        chance = special.ndtr((np.float32(cut) - item) / np.float32(s.draw**0.5))  # of each draw, given its item
        desired = np.zeros(known.shape, dtype=np.float32)
        for _ in range(self.samples):
            desired += rng.random(known.shape, dtype=np.float32) < chance
        return desired / np.float32(self.samples)
