"""How many clusters would decide an inconclusive cell.

No statistic: a forecast from a result.
"""

from __future__ import annotations

import math

from reports.stats.blindspot import clusters_required
from reports.stats.effect import Effect


def clusters_to_decide(effect: Effect, margin: float) -> int | None:
    """Clusters that would bring the one-sided lower bound to -margin if the estimate stayed where it is.

    The half-width shrinks with the root of the clusters: C * (half-width / (estimate + margin))^2, at least C_min.
    None when the estimate itself is at or below the margin: more data are unlikely to pass.
    """
    room = effect.estimate + margin
    if room <= 0:
        return None
    half = effect.estimate - effect.lower
    wanted = math.ceil(effect.n_clusters * (half / room) ** 2)
    return max(wanted, clusters_required(margin, effect.alpha))
