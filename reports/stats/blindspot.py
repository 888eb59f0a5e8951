"""What a sample of templates cannot see: a failure confined to few templates may never be drawn.

If a share D of templates breaks totally, C independent templates miss all of them with probability (1-D)^C.
No statistic: two formulas about a number of clusters.
"""

from __future__ import annotations

import math


def clusters_required(margin: float, alpha: float) -> int:
    """C_min: fewest clusters with which a total failure of a share ``margin`` is missed at most ``alpha`` often."""
    assert 0 < margin < 1, margin
    assert 0 < alpha < 1, alpha
    return math.ceil(math.log(alpha) / math.log1p(-margin) - 1e-12)


def blind_spot(clusters: int, alpha: float) -> float:
    """Largest share of templates that could be totally broken and still be unsampled ``alpha`` of the time."""
    return 1.0 - float(alpha ** (1.0 / clusters)) if clusters > 0 else 1.0
