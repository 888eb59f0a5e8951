"""Clopper-Pearson: the exact interval of one proportion.

Clopper & Pearson 1934, Biometrika 26:404, through quantiles of the beta distribution.
No statistic: the interval of one unpaired share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.effect import LEVEL, Array


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share with its exact two-sided interval; without trials the estimate is None and the interval [0, 1]."""

    estimate: float | None
    low: float
    high: float
    successes: float  # whole numbers, or weighted ones (Korn & Graubard 1998, Survey Methodology 24:193)
    trials: float
    level: float
    method: str = "Clopper-Pearson"
    source: str = "Clopper & Pearson 1934"


class ExactBounds(NamedTuple):
    """Bounds of many proportions."""

    low: Array
    high: Array


def clopper_pearson(successes: float, trials: float, *, level: float = LEVEL) -> Proportion:
    """Return the exact interval of a proportion of independent trials."""
    low, high = clopper_pearson_bounds(successes, trials, level=level)
    return Proportion(successes / trials if trials else None, float(low), float(high), successes, trials, level)


def clopper_pearson_bounds(successes: npt.ArrayLike, trials: npt.ArrayLike, *, level: float = LEVEL) -> ExactBounds:
    """Return the exact bounds of many proportions [...]."""
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    assert 0 < level < 1, level
    assert np.all((k >= 0) & (k <= n)), (successes, trials)
    tail = (1 - level) / 2
    # betaincinv needs positive shapes; the ends of the scale are set explicitly
    low = np.where(k > 0, special.betaincinv(np.where(k > 0, k, 1), n - k + 1, tail), 0.0)
    high = np.where(k < n, special.betaincinv(k + 1, np.where(k < n, n - k, 1), 1 - tail), 1.0)
    return ExactBounds(low, high)
