"""Wilcoxon's signed-rank test, exact with ties: whether pairs differ in one direction.

Under the null a pair's difference is as likely as its negative, so every pattern of signs over the ranks is as likely
as the one observed. Ranks, since a few answers that part ways move a log-prob by nats and all others by thousandths:
one such pair must not outweigh sixty.

No statistic: it tells two sizes of moves apart, and has no estimate of a drift.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def signed_rank_above(differences: npt.ArrayLike) -> float:
    """One-sided p-value that the differences [N] lie above 0; pairs without a difference are left out, none gives 1."""
    found = np.asarray(differences, dtype=np.float64)
    found = found[found != 0]
    if not len(found):
        return 1.0
    _, place, counts = np.unique(np.abs(found), return_inverse=True, return_counts=True)
    # twice the midrank, a whole number: of ties the first and the last rank of their group added up
    ranks = (2 * np.cumsum(counts) - counts + 1)[place]
    chances = np.ones(1)  # of every sum of the ranks that have a plus
    for rank in ranks:
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return float(min(1.0, chances[ranks[found > 0].sum() :].sum()))
