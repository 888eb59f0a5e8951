"""Wilcoxon's signed-rank test, exact with ties: whether pairs differ in one direction.

Under the null a difference and its negative are equally likely, so all patterns of signs over the ranks are. Ranks are
used because a few answers change a log-prob by nats and all others by thousandths: one such pair must not outweigh
sixty.
No statistic: it has no estimate of a drift.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def signed_rank_above(differences: npt.ArrayLike) -> float:
    """Return the one-sided p-value that differences [N] lie above 0; zeros are left out, without others it is 1."""
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if not len(values):
        return 1.0
    _, place, counts = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    # twice the midrank, a whole number: the first plus the last rank of a group of ties
    ranks = (2 * np.cumsum(counts) - counts + 1)[place]
    chances = np.ones(1)  # chances of every sum of the positive ranks
    for rank in ranks:
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return float(min(1.0, chances[ranks[values > 0].sum() :].sum()))
