"""When a cell passes: the three-valued rule, the templates a PASS takes, and a sequence of doses.

Non-inferiority within a declared margin is PASS, FAIL or INCONCLUSIVE (Piaggio et al. 2012, JAMA 308:2594); the
calibration simulates what the gate decides, by the same functions. If a share D of templates breaks totally, C
independent templates miss all of them with probability (1-D)^C, so a PASS takes C_min templates. Doses are tested in
a fixed order from the mildest, until the first that fails: no level is spent, however well a later dose looks (Maurer,
Hothorn & Lehmacher 1995).
No statistic: what bounds come to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt


def clusters_required(margin: float, alpha: float) -> int:
    """C_min: fewest clusters with which a total failure of a share ``margin`` is missed at most ``alpha`` often."""
    assert 0 < margin < 1, margin
    assert 0 < alpha < 1, alpha
    return math.ceil(math.log(alpha) / math.log1p(-margin) - 1e-12)  # a whole number, but for rounding, stays that


def effective_clusters(counts: npt.ArrayLike) -> float:
    """N^2 / sum n_c^2: how many clusters of one size say as much as clusters of ``counts`` [C] items (Kish 1965)."""
    sizes = np.asarray(counts, dtype=np.float64)
    return float(sizes.sum() ** 2 / np.square(sizes).sum())


def blind_spot(clusters: float, alpha: float) -> float:
    """Largest share of templates that could be totally broken and still be unsampled ``alpha`` of the time."""
    return 1.0 - float(alpha ** (1.0 / clusters)) if clusters > 0 else 1.0


class Call(IntEnum):
    """What bounds say. The last three would pass by their interval, were it not for the templates: they cannot tell."""

    PASS = 0
    PASS_NOTED = 1  # a drop is detectable in the family, and within the margin
    FAIL = 2
    INCONCLUSIVE = 3
    CLUSTERS = 4  # fewer than C_min
    UNEVEN = 5  # one holds too many of the items
    TEMPLATES = 6  # weighted otherwise, with one more that lost everything, they allow a loss of the margin


def calls(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    pvalue_drop: npt.ArrayLike,
    *,
    clusters: float,
    uneven: bool,
    shown: npt.ArrayLike,
    margin: float,
    alpha: float,
) -> npt.NDArray[np.int8]:
    """The ``Call`` of cells [...] from their one-sided bounds at ``alpha`` and p-values adjusted for the family.

    ``clusters`` are ``effective_clusters``: where large templates break more often, few of them carry the loss.
    ``shown`` [...] is the template rule's word (``stats.templates``); a drop is one only where the family's p-value
    says so, in a PASS as in a FAIL.
    """
    within = np.asarray(lower) > -margin
    dropped = (np.asarray(upper) < 0) & (np.asarray(pvalue_drop) < alpha)
    passed = np.where(np.asarray(shown), np.where(dropped, Call.PASS_NOTED, Call.PASS), Call.TEMPLATES)
    # the last reason that holds is the one that is named
    if uneven:
        passed = np.full_like(passed, Call.UNEVEN)
    if clusters < clusters_required(margin, alpha) - 1e-9:
        passed = np.full_like(passed, Call.CLUSTERS)
    # templates hold back what would pass alone: a loss that is shown needs none of their rules
    return np.where(within, passed, np.where(dropped, Call.FAIL, Call.INCONCLUSIVE)).astype(np.int8)


def fixed_sequence(passes: Sequence[bool]) -> int | None:
    """Index of the last cleared dose, mildest first (largest budget or shortest context); None when the first fails."""
    count = int(cleared(np.asarray(passes, dtype=np.bool_)))
    return count - 1 if count else None


def cleared(passes: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many doses are cleared in each of many sequences [..., D]."""
    count: npt.NDArray[np.int64] = np.cumprod(passes, axis=-1, dtype=np.int64).sum(axis=-1)
    return count
