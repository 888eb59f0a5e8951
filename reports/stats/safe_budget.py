"""The safe budget: non-inferiority tested in a fixed sequence from the mildest dose, until the first that fails.

Maurer, Hothorn & Lehmacher 1995: hypotheses tested in an order fixed beforehand need no adjustment, as long as the
first failure ends the sequence, however well a later dose looks.
No statistic: an order of decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def fixed_sequence(passes: Sequence[bool]) -> int | None:
    """Index of the last cleared dose, mildest first (largest budget or shortest context); None when the first fails."""
    count = int(cleared(np.asarray(passes, dtype=np.bool_)))
    return count - 1 if count else None


def cleared(passes: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many doses are cleared in each of many sequences [..., D]."""
    count: npt.NDArray[np.int64] = np.cumprod(passes, axis=-1, dtype=np.int64).sum(axis=-1)
    return count
