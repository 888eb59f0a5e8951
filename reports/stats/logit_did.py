"""A difference in differences on the logit scale, as a sensitivity: near 0 or 1 the two scales can disagree in sign.

Each cell's marginal rate goes through the logit, and the contrast of the logits gets the variance of the cluster
jackknife (Efron & Stein 1981). This is the estimate of a saturated GEE with an independence working correlation (Liang
& Zeger 1986) but for half a success and half a failure added to every cell (Haldane 1956, Anscombe 1956), which keep
rates of 0 and 1 finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.stats.effect import LEVEL

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogitContrast:
    """A contrast of marginal logits in log odds (nats); ``contrast`` is the same contrast of the rates."""

    estimate: float
    low: float
    high: float
    pvalue: float
    error: float
    contrast: float
    level: float
    n_items: int
    n_clusters: int
    method: str = "marginal logits, cluster jackknife (sensitivity)"
    source: str = "Liang & Zeger 1986; Efron & Stein 1981"

    @property
    def ceiling_driven(self) -> bool:
        """Whether the two scales point to opposite sides."""
        return abs(self.contrast) > 1e-12 and self.estimate * self.contrast < 0


def logit_did(
    candidate: npt.ArrayLike,
    candidate_dense: npt.ArrayLike,
    reference: npt.ArrayLike,
    reference_dense: npt.ArrayLike,
    clusters: npt.ArrayLike,
    *,
    level: float = LEVEL,
) -> LogitContrast:
    """Serving sensitivity of the candidate minus that of the reference, from item means [N] in [0, 1]."""
    cells = np.stack(
        [np.asarray(c, dtype=np.float64) for c in (candidate, candidate_dense, reference, reference_dense)]
    )
    return logit_contrast(cells, (1.0, -1.0, -1.0, 1.0), clusters, level=level)


def logit_contrast(
    scores: npt.ArrayLike, weights: npt.ArrayLike, clusters: npt.ArrayLike, *, level: float = LEVEL
) -> LogitContrast:
    """Weighted sum of the marginal logits of M cells, scores [M, N] in [0, 1], weights [M], clusters [N]."""
    values, w = np.asarray(scores, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    assert values.ndim == 2, values.shape
    assert values.shape == (len(w), len(codes)), (values.shape, len(w), len(codes))
    assert np.all((values >= 0) & (values <= 1)), "item means lie in [0, 1]"
    counts = np.bincount(codes).astype(np.float64)
    assert len(counts) >= 2, "inference needs two clusters"
    sums = np.stack([np.bincount(codes, weights=row) for row in values])  # [M, C]
    items, whole = len(codes), sums.sum(axis=1)
    estimate = float(w @ _logit(whole, items))
    without = w @ _logit(whole[:, None] - sums, items - counts)  # [C]
    clusters_seen = len(counts)
    error = float(np.sqrt((clusters_seen - 1) / clusters_seen * np.sum((without - estimate) ** 2)))
    half = float(special.stdtrit(clusters_seen - 1, 0.5 + level / 2)) * error
    return LogitContrast(
        estimate=estimate,
        low=estimate - half,
        high=estimate + half,
        pvalue=float(2 * special.stdtr(clusters_seen - 1, -abs(estimate) / error)) if error > 0 else 1.0,
        error=error,
        contrast=float(w @ values.mean(axis=1)),
        level=level,
        n_items=items,
        n_clusters=clusters_seen,
    )


def _logit(successes: Array, items: Array | float) -> Array:
    logits: Array = np.log((successes + 0.5) / (items - successes + 0.5))
    return logits
