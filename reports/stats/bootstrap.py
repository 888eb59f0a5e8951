"""Percentile cluster bootstrap of a mean difference, for display: a picture of the spread, never a gate.

Davison & Hinkley 1997, section 3.8. With few clusters or one-sided losses it covers too little (false passes up to 13 %
at 5 % in simulation), which is why the gate reads another interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.stats.clustered import totals
from reports.stats.effect import LEVEL

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A mean difference with the percentiles of its resamples; for display only."""

    estimate: float
    low: float
    high: float
    draws: int
    level: float
    n_items: int
    n_clusters: int
    method: str = "percentile cluster bootstrap (display only)"
    source: str = "Davison & Hinkley 1997"


def cluster_bootstrap(
    z: npt.ArrayLike, clusters: npt.ArrayLike, *, draws: int = 2000, seed: int = 0, level: float = LEVEL
) -> Bootstrap:
    """Percentile interval of the mean of item differences z [N] when whole clusters [N] are drawn again."""
    assert 0 < level < 1, level
    t = totals(z, clusters)
    order = np.lexsort([t.sums.round(12), t.counts])  # so that labels do not meet other draws
    means = resampled_means(t.sums[order], t.counts[order], draws=draws, rng=np.random.default_rng(seed))
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return Bootstrap(t.mean, float(low), float(high), draws, level, t.items, t.clusters)


def resampled_means(sums: Array, counts: Array, *, draws: int, rng: np.random.Generator) -> Array:
    """Means [..., B] of resampled clusters with sums [..., C] and sizes [C]; the draws are common to all samples."""
    clusters = len(counts)
    times = rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=draws).astype(np.float64)  # [B, C]
    means: Array = sums @ times.T / (times @ counts)
    return means
