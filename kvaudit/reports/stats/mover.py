"""MOVER (method of variance estimates recovery): an interval for a weighted sum of independent estimates.

The interval is made from those of the single estimates (Zou & Donner 2008, Statistics in Medicine 27:1693): each bound
follows from the distances between the estimates and their own bounds, so skewed parts keep their skew.
No statistic: a way to add intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class WeightedEstimate(NamedTuple):
    """One independent estimate with its interval and its weight in the sum."""

    weight: float
    estimate: float
    low: float
    high: float


class SumBounds(NamedTuple):
    """Many weighted sums [...] and their lower and upper bounds."""

    estimate: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True)
class Mover:
    """The weighted sum and its interval, at the level of the input intervals."""

    estimate: float
    low: float
    high: float
    method: str = "MOVER"
    source: str = "Zou & Donner 2008"


def mover(parts: Sequence[WeightedEstimate | tuple[float, float, float, float]]) -> Mover:
    """Return the interval of sum(weight * estimate) over independent parts (weight, estimate, low, high)."""
    assert parts, "a sum needs a part"
    weights, estimates, lows, highs = np.asarray(parts, dtype=np.float64).T
    bounds = mover_bounds(weights, estimates, lows, highs)
    return Mover(float(bounds.estimate), float(bounds.low), float(bounds.high))


def mover_bounds(
    weights: npt.ArrayLike, estimates: npt.ArrayLike, lows: npt.ArrayLike, highs: npt.ArrayLike
) -> SumBounds:
    """Return many weighted sums with their bounds; each sum is over P independent estimates.

    The arguments broadcast to [..., P] and describe the estimates; ``lows`` and ``highs`` are the estimates' own
    bounds.
    """
    w, point, low, high = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (weights, estimates, lows, highs))
    )
    assert np.all((low <= point + 1e-12) & (point <= high + 1e-12)), "an estimate lies outside its interval"
    ends = np.stack([w * low, w * high])  # a negative weight makes the upper bound the lower one
    total = (w * point).sum(axis=-1)
    # distances to the bounds add up like standard errors
    below = np.sqrt(((w * point - ends.min(axis=0)) ** 2).sum(axis=-1))
    above = np.sqrt(((ends.max(axis=0) - w * point) ** 2).sum(axis=-1))
    return SumBounds(total, total - below, total + above)
