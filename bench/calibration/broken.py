"""Broken templates: a share of the clusters loses every item, and other answers flip at random.

This models evictions: a template either depends on an evicted entry, or it does not. Used by bench.calibration.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]


class BrokenTemplates(NamedTuple):
    """A model in which ``broken`` of the clusters break and ``background`` of the other answers flip, half of them up.
    Each of the ``samples`` answers to an item flips independently; those of a lost item are all lost. A broken cluster
    loses a random share ``depth`` of its items; ``repaired`` clusters gain all of theirs. ``by_size``: a cluster's
    chance to break is proportional to its size; below 1 ``among`` is the share of clusters, the largest, that can
    break. ``graded``: a lost item loses its score, uniform on [0, 1], and other scores move with the standard deviation
    ``background``.
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
        """The exact true mean difference."""
        return self.repaired - self.broken * self.depth * (0.5 if self.graded else 1.0)

    @property
    def discordance(self) -> float:
        """The exact share of answers that differ."""
        moved = self.broken * self.depth + self.repaired
        return moved + (1 - moved) * self.background

    @property
    def name(self) -> str:
        """The parameters that differ from the simplest model."""
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
        """Draw item differences [simulations, N] in order of cluster."""
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
        """Return each cluster's chance [C] to break, so that the expected share of lost items is ``broken``."""
        share = counts.astype(np.float64) if self.by_size else np.ones(len(counts))
        if self.among < 1:
            largest = np.argsort(-counts, kind="stable")[: max(1, round(self.among * len(counts)))]
            share = np.where(np.isin(np.arange(len(counts)), largest), share, 0.0)
        chance: npt.NDArray[np.float64] = self.broken * share * counts.sum() / np.sum(share * counts)
        return chance

    def _background(self, rng: np.random.Generator, shape: tuple[int, ...]) -> _Floats:
        """Draw random flips, averaged over the samples."""
        if self.graded:
            noise: _Floats = rng.standard_normal(shape, dtype=np.float32) * np.float32(self.background)
            return np.clip(noise, -1, 1)
        flips: _Floats = np.zeros(shape, dtype=np.float32)
        for _ in range(self.samples):
            value = rng.random(shape, dtype=np.float32)
            flips += (value > 1 - self.background / 2).astype(np.float32) - (value < self.background / 2)
        return flips / np.float32(self.samples)
