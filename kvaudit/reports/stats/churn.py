"""Churn: the share of answers that changed. A drift near zero may be many losses and as many gains (McNemar 1947).

No statistic: counts and shares that describe a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Flips:
    """Shares of the answers; won - lost is the drift.

    ``rerun`` is the A/A churn, the disagreement of two answers of the same checkpoint (mean of both sides): only churn
    beyond it is change. None with a single sample.
    """

    lost: float
    won: float
    rerun: float | None = None

    @property
    def churn(self) -> float:
        """P(candidate's answer is not the reference's)."""
        return self.lost + self.won


def flips(reference: npt.ArrayLike, candidate: npt.ArrayLike, *, samples: int = 1) -> Flips:
    """Return the shares of answers that the candidate lost and won against the reference's of the same pair of seeds.

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
    """Return the flips between any draw of the reference and any draw of the candidate.

    Takes item means [...] in [0, 1] of ``samples`` 0/1 draws each.
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
