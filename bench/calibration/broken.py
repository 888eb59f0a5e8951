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

    Of ``samples`` answers to an item each flips by itself; those of a lost item are all lost. A broken cluster loses
    ``depth`` of its items, drawn at random; ``repaired`` clusters gain all of theirs. ``by_size``: a cluster breaks as
    often as it is large; below 1 ``among`` is the share of clusters, the largest, that can break at all. ``graded``: a
    lost item loses its score, uniform on [0, 1], and the others move by as little as ``background``, a standard
    deviation then.
    """

    broken: float
    background: float
    samples: int = 1
    depth: float = 1.0
    repaired: float = 0.0
    by_size: bool = False
    among: float = 1.0
    graded: bool = False

    @property
    def drift(self) -> float:
        """The true mean difference, exactly."""
        return self.repaired - self.broken * self.depth * (0.5 if self.graded else 1.0)

    @property
    def discordance(self) -> float:
        """The share of answers that differ, exactly."""
        moved = self.broken * self.depth + self.repaired
        return moved + (1 - moved) * self.background

    @property
    def name(self) -> str:
        """What differs from the plainest model."""
        words = (
            f"broken={self.broken:g} background={self.background:g}",
            f"k={self.samples}" if self.samples > 1 else "",
            f"depth={self.depth:g}" if self.depth < 1 else "",
            f"repaired={self.repaired:g}" if self.repaired else "",
            "larger break more" if self.by_size else "",
            f"only the largest {self.among:g} break" if self.among < 1 else "",
            "graded" if self.graded else "",
        )
        return " ".join(word for word in words if word)

    def draw(self, rng: np.random.Generator, simulations: int, counts: npt.NDArray[np.int64]) -> _Floats:
        """Item differences [simulations, N] in order of cluster."""
        # scaled so that, by items, ``broken`` is lost in the mean either way
        chance = self._chance(counts)
        fate = rng.random((simulations, len(counts)))
        lost = np.repeat(fate < chance, counts, axis=1)
        if self.depth < 1:
            lost &= rng.random(lost.shape, dtype=np.float32) < self.depth
        moved = self._background(rng, lost.shape)
        if self.repaired:
            # the other end of the same number: no cluster both breaks and is repaired
            moved = np.where(np.repeat(fate > 1 - self.repaired, counts, axis=1), np.float32(1), moved)
        gone = -rng.random(lost.shape, dtype=np.float32) if self.graded else np.float32(-1)
        return np.where(lost, gone, moved).astype(np.float32)

    def _chance(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """How often each cluster [C] breaks, so that ``broken`` of the items are expected to."""
        share = counts.astype(np.float64) if self.by_size else np.ones(len(counts))
        if self.among < 1:
            largest = np.argsort(-counts, kind="stable")[: max(1, round(self.among * len(counts)))]
            share = np.where(np.isin(np.arange(len(counts)), largest), share, 0.0)
        chance: npt.NDArray[np.float64] = self.broken * share * counts.sum() / np.sum(share * counts)
        return chance

    def _background(self, rng: np.random.Generator, shape: tuple[int, ...]) -> _Floats:
        """What moves without any reason, averaged over the samples."""
        if self.graded:
            noise: _Floats = rng.standard_normal(shape, dtype=np.float32) * np.float32(self.background)
            return np.clip(noise, -1, 1)
        flips: _Floats = np.zeros(shape, dtype=np.float32)
        for _ in range(self.samples):
            value = rng.random(shape, dtype=np.float32)
            flips += (value > 1 - self.background / 2).astype(np.float32) - (value < self.background / 2)
        return flips / np.float32(self.samples)
