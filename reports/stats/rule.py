"""The rule of one gated cell, for any number of cells at once: what the gate decides and the calibration simulates.

Non-inferiority within a declared margin, three-valued: Piaggio et al. 2012, JAMA 308:2594, and C_min of ``blindspot``.
No statistic: what bounds come to.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from reports.stats.blindspot import clusters_required


class Call(IntEnum):
    """What bounds say. ``CLUSTERS`` would pass, were it not for too few clusters: the data cannot tell."""

    PASS = 0
    PASS_NOTED = 1  # a drop is detectable, and within the margin
    FAIL = 2
    INCONCLUSIVE = 3
    CLUSTERS = 4


def calls(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    pvalue_drop: npt.ArrayLike,
    *,
    clusters: int,
    margin: float,
    alpha: float,
) -> npt.NDArray[np.int8]:
    """The ``Call`` of cells [...] from their one-sided bounds at ``alpha`` and p-values adjusted for the family."""
    within, below = np.asarray(lower) > -margin, np.asarray(upper) < 0
    failed = ~within & below & (np.asarray(pvalue_drop) < alpha)
    passed = np.where(below, Call.PASS_NOTED, Call.PASS)
    if clusters < clusters_required(margin, alpha):
        passed = np.full_like(passed, Call.CLUSTERS)
    return np.where(within, passed, np.where(failed, Call.FAIL, Call.INCONCLUSIVE)).astype(np.int8)
