"""Simulated answers of several candidates on the same items, and of several training seeds of one candidate.

Both are the probit model of ``probit`` with more arms; an answer is a single draw. Used by bench.calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from bench.calibration.probit import Floats, Probit


@dataclass(frozen=True)
class Family:
    """One cell per drift, all against the same reference; ``discordance`` is that of a cell without drift."""

    drifts: tuple[float, ...]
    discordance: float
    own_by_cluster: float = 0.0
    reference: float = 0.85

    def draw(self, rng: np.random.Generator, simulations: int, counts: npt.NDArray[np.int64]) -> Floats:
        """Draw item differences [simulations, K, N] in order of cluster."""
        s = Probit(0.0, self.discordance, self.own_by_cluster, reference=self.reference).shares
        shared = _latent(rng, (simulations, 1), counts, s.cluster, s.item)
        rates = self.reference + np.array([0.0, *self.drifts])
        # an answer is one draw, so its item's part and the draw's cannot be told apart
        own = _latent(rng, (simulations, len(rates)), counts, s.own_cluster, s.own_item + s.draw)
        desired = (shared + own < special.ndtri(rates).astype(np.float32)[:, None]).astype(np.float32)
        drift: Floats = desired[:, 1:] - desired[:, :1]
        return drift


@dataclass(frozen=True)
class Seeded:
    """Pairs of training runs for ``seeds``; the candidate's rate in each is normal around the reference's.

    Runs of an arm have common cluster and item effects; each adds its own draw.
    """

    seeds: int
    deviation: float
    discordance: float
    own_by_cluster: float = 0.0
    reference: float = 0.85

    def draw(self, rng: np.random.Generator, simulations: int, counts: npt.NDArray[np.int64]) -> Floats:
        """Draw item differences [simulations, S, N] in order of cluster; their mean is 0 over runs."""
        s = Probit(0.0, self.discordance, self.own_by_cluster, reference=self.reference).shares
        shared = _latent(rng, (simulations, 1), counts, s.cluster, s.item)
        moved = self.reference + self.deviation * rng.standard_normal((simulations, self.seeds, 1))
        answers = []
        for rate in (np.full_like(moved, self.reference), np.clip(moved, 0.001, 0.999)):
            arm = shared + _latent(rng, (simulations, 1), counts, s.own_cluster, s.own_item)
            run = _latent(rng, (simulations, self.seeds), counts, 0.0, s.draw)
            answers.append((arm + run < special.ndtri(rate).astype(np.float32)).astype(np.float32))
        drift: Floats = answers[1] - answers[0]
        return drift


def _latent(
    rng: np.random.Generator, shape: tuple[int, int], counts: npt.NDArray[np.int64], by_cluster: float, by_item: float
) -> Floats:
    """Draw a normal part [*shape, N] with these variances by cluster and by item."""
    cluster = np.float32(by_cluster**0.5) * rng.standard_normal((*shape, len(counts)), dtype=np.float32)
    item = np.float32(by_item**0.5) * rng.standard_normal((*shape, int(counts.sum())), dtype=np.float32)
    item += np.repeat(cluster, counts, axis=-1)
    return item
