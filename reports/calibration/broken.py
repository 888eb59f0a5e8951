"""Broken templates: a share of the clusters loses every item, the others flip a few at random.

What evicting a cache entry does: a template either depends on what was dropped, or it does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]


class BrokenTemplates(NamedTuple):
    """``broken`` share of the clusters; ``background`` share of the other answers that flip, as often up as down.

    Of ``samples`` answers to an item each flips by itself; those of a broken cluster are all lost.
    """

    broken: float
    background: float
    samples: int = 1

    @property
    def drift(self) -> float:
        """The true mean difference, exactly."""
        return -self.broken

    @property
    def discordance(self) -> float:
        """The share of answers that differ, exactly."""
        return self.broken + (1 - self.broken) * self.background

    def draw(self, rng: np.random.Generator, simulations: int, counts: npt.NDArray[np.int64]) -> _Floats:
        """Item differences [simulations, N] in order of cluster."""
        lost = np.repeat(rng.random((simulations, len(counts))) < self.broken, counts, axis=1)
        flips = np.zeros(lost.shape, dtype=np.float32)
        for _ in range(self.samples):
            value = rng.random(lost.shape, dtype=np.float32)
            flips += (value > 1 - self.background / 2).astype(np.float32) - (value < self.background / 2)
        return np.where(lost, np.float32(-1), flips / np.float32(self.samples)).astype(np.float32)
