"""Churn: the share of items that changed. A drift near zero may be many losses and as many gains.

No statistic: counts and shares that describe a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.effect import Array


@dataclass(frozen=True, slots=True)
class Churn:
    """Shares of the items; gains - losses is the drift, by item means and by draws.

    ``losses, gains, churn`` sum the negative and positive changes of item means. ``draw_*`` compare one draw with one
    draw; ``rerun_churn`` is the disagreement of two draws of the same checkpoint (mean of both arms), so only
    draw_churn beyond it is change; None with a single sample.
    """

    losses: float
    gains: float
    churn: float
    draw_losses: float
    draw_gains: float
    draw_churn: float
    rerun_churn: float | None
    n_items: int
    samples: int
    method: str = "churn"
    source: str = "McNemar 1947"


@dataclass(frozen=True, slots=True)
class Flips:
    """Shares of the answers; won - lost is the drift.

    ``rerun`` is the A/A churn: the disagreement of two answers of the same checkpoint, mean of both sides; None with a
    single sample.
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
    if samples == 1:
        return Flips(float(np.maximum(old - new, 0).mean()), float(np.maximum(new - old, 0).mean()))
    # an item's mean is the chance of a draw, so a product is the chance of two draws that differ
    return Flips(float((old * (1 - new)).mean()), float(((1 - old) * new).mean()), _rerun(old, new, samples))


def _rerun(old: Array, new: Array, samples: int) -> float:
    """Return the unbiased share of pairs of draws that disagree within an item, mean of both sides."""
    # two draws of one item disagree with probability 2 p (1 - p); the mean of both sides cancels the 2
    return float((old * (1 - old) + new * (1 - new)).mean()) * samples / (samples - 1)


def churn_of(reference: npt.ArrayLike, candidate: npt.ArrayLike, *, samples: int = 1) -> Churn:
    """Return the churn between item means [N] in [0, 1] of ``samples`` 0/1 draws each."""
    old, new = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    assert old.shape == new.shape, (old.shape, new.shape)
    assert old.size, "churn needs an item"
    assert np.all((old >= 0) & (old <= 1) & (new >= 0) & (new <= 1)), "item means lie in [0, 1]"
    losses, gains = float(np.maximum(old - new, 0).mean()), float(np.maximum(new - old, 0).mean())
    lost, won = float((old * (1 - new)).mean()), float(((1 - old) * new).mean())
    rerun = _rerun(old, new, samples) if samples > 1 else None
    return Churn(losses, gains, losses + gains, lost, won, lost + won, rerun, old.size, samples)
