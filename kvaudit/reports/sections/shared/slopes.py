"""A slope whose interval is never of no width: what curves over budgets and lengths, and probes, compute with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.effect import Array, Effect
from kvaudit.reports.stats.slope import dose_weights, slope_effect
from kvaudit.reports.stats.tango import ess_tango


def slope_effect(
    table: Array, x: Sequence[float], clusters: npt.NDArray[np.int64], *, alpha: float, reach: float
) -> Effect:
    """Change per doubling of values [D, N] that span ``reach``, CR3-t.

    Where every item agrees there is no spread to go by, and a zero width would be a lie: ESS-Tango over all slopes
    that such values can have.
    """
    effect = slope_effect(table, x, clusters, alpha=alpha)
    if effect.high > effect.low:
        return effect
    weights = np.asarray(dose_weights(x))  # [D]
    # the weights sum to 0: values that span ``reach`` move the slope by half of their sizes at most
    steepest = reach * float(np.abs(weights).sum()) / 2
    return ess_tango(weights @ table, clusters, alpha=alpha, scale=steepest)
