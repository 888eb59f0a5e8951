"""How sure it is that a rate is above nothing: the lower bound of Wilson's score interval for clustered items.

Wilson 1927, JASA 22:209, at the cluster-robust effective sample size and with a t quantile, as in ``tango``.
No statistic: the bound of one arm's rate, without a pair.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.stats.clustered import totals
from reports.stats.tango import deff_floor, design_effect


def rate_lower(scores: npt.ArrayLike, clusters: npt.ArrayLike, *, samples: int = 1, alpha: float = 0.05) -> float:
    """One-sided lower bound of a mean of item scores [N] in [0, 1], averaged over ``samples`` draws per item."""
    values = np.asarray(scores, dtype=np.float64)
    t = totals(values, clusters)
    n = t.items / design_effect(t, floor=deff_floor(values, samples))
    square = float(special.stdtrit(t.clusters - 1, 1 - alpha)) ** 2
    middle = t.mean + square / (2 * n)
    spread = math.sqrt(square * (t.mean * (1 - t.mean) / n + square / (4 * n**2)))
    return max(0.0, (middle - spread) / (1 + square / n))
