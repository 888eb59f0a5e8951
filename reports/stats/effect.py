"""The result of every statistic that has an interval.

No statistic: what one returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95  # of every two-sided interval that is printed


class Bounds(NamedTuple):
    """What an inference says about any number of samples at once, each field [...]; named as in ``Effect``."""

    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    lower: npt.NDArray[np.float64]
    upper: npt.NDArray[np.float64]
    pvalue: npt.NDArray[np.float64]
    pvalue_drop: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Effect:
    """A mean paired difference with its uncertainty, in score units (0.05 = 5 pp).

    ``low, high`` is the two-sided 95 % interval; ``lower, upper`` are the one-sided bounds at ``alpha`` that the gate
    reads. ``pvalue`` is two-sided against 0, ``pvalue_drop`` one-sided for "the mean is below 0". ``losses`` and
    ``gains`` are the summed negative and positive item differences; ``deff`` the design effect of the clusters.
    """

    estimate: float
    low: float
    high: float
    lower: float
    upper: float
    alpha: float
    pvalue: float
    pvalue_drop: float
    method: str
    source: str
    n_items: int
    n_clusters: int
    losses: float
    gains: float
    deff: float
    df: float
