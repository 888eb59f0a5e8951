"""Where the losses lie: a drift spread over all templates and one that broke a single template share a mean.

Gini 1912, over clusters, of the losses per cluster.
No statistic: descriptive, nothing is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HALF = 0.5


@dataclass(frozen=True, slots=True)
class ClusterLoss:
    """One cluster: ``share`` of all losses, ``rate`` of its own items lost; losses and gains in items."""

    label: str
    items: int
    losses: float
    gains: float
    share: float
    rate: float


@dataclass(frozen=True, slots=True)
class Concentration:
    """Losses by cluster, worst first.

    ``gini`` is 0 when every cluster loses alike and near 1 when one loses all; ``carrying_half`` the fewest clusters
    with at least half of the losses. ``dominant`` holds the cluster with more than half of all losses, if there is one;
    ``broken`` those that lost more than half of their own items.
    """

    losses: float
    gini: float
    carrying_half: int
    dominant: tuple[str, ...]
    broken: tuple[str, ...]
    clusters: tuple[ClusterLoss, ...]
    method: str = "losses per cluster, Gini"
    source: str = "Gini 1912"


def concentration(z: npt.ArrayLike, clusters: npt.ArrayLike) -> Concentration:
    """Concentration of the losses among item differences z [N] in clusters [N]."""
    values = np.asarray(z, dtype=np.float64)
    labels, codes = np.unique(np.asarray(clusters), return_inverse=True)
    assert codes.shape == values.shape, (codes.shape, values.shape)
    assert np.isfinite(values).all(), "an item difference is not finite"
    items = np.bincount(codes)
    losses = np.bincount(codes, weights=np.maximum(-values, 0.0))
    gains = np.bincount(codes, weights=np.maximum(values, 0.0))
    total = float(losses.sum())
    order = np.lexsort([np.arange(len(labels)), -losses])
    rows = tuple(
        ClusterLoss(
            label=str(labels[c]),
            items=int(items[c]),
            losses=float(losses[c]),
            gains=float(gains[c]),
            share=float(losses[c]) / total if total else 0.0,
            rate=float(losses[c] / items[c]),
        )
        for c in order
    )
    running = np.cumsum(losses[order])
    return Concentration(
        losses=total,
        gini=gini(losses),
        carrying_half=int(np.searchsorted(running, total * HALF * (1 - 1e-12)) + 1) if total else 0,
        dominant=tuple(row.label for row in rows if row.share > HALF),
        broken=tuple(row.label for row in rows if row.rate > HALF),
        clusters=rows,
    )


def gini(values: npt.ArrayLike) -> float:
    """Gini coefficient of values [C] that are not negative; 0 when all are 0."""
    x = np.sort(np.asarray(values, dtype=np.float64))
    assert np.all(x >= 0), "losses are not negative"
    total = float(x.sum())
    if total == 0:
        return 0.0
    ranks = np.arange(1, len(x) + 1)
    return float((2 * ranks - len(x) - 1) @ x / (len(x) * total))
