"""Cluster-robust inference on a mean of item differences: CR3 with a t quantile.

Cameron & Miller 2015 (CR3 as the cluster jackknife). Variances and t intervals are computed for many samples at once,
which the calibration needs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.effect import LEVEL, Bounds, Effect, Statistic

Array = npt.NDArray[np.float64]


class Totals(NamedTuple):
    """Item differences summed by cluster, the input of a cluster-robust variance."""

    sums: Array  # [C]
    counts: Array  # [C] items
    residuals: Array  # [C] sums - counts * mean
    mean: float
    losses: float  # summed negative differences, as a positive number
    gains: float

    @property
    def items(self) -> int:
        """The number of items N."""
        return int(self.counts.sum())

    @property
    def clusters(self) -> int:
        """The number of clusters C."""
        return len(self.counts)


class ManyTotals(NamedTuple):
    """The ``Totals`` of many samples [...] with the same clusters, for computing all at once."""

    sums: Array  # [..., C]
    counts: Array  # [C] items, or [..., C] if they differ
    residuals: Array  # [..., C]
    mean: Array  # [...]
    losses: Array  # [...]
    gains: Array  # [...]


def totals(z: npt.ArrayLike, clusters: npt.ArrayLike) -> Totals:
    """Return cluster totals of item differences z [N], where ``clusters`` [N] names the cluster of each item.

    There must be two clusters or more, and all values must be finite.
    """
    values = np.asarray(z, dtype=np.float64)
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)  # [N], the cluster of every item
    assert values.ndim == 1, values.shape
    assert codes.shape == values.shape, (values.shape, codes.shape)
    assert np.isfinite(values).all(), "an item difference is not finite"
    counts: Array = np.bincount(codes).astype(np.float64)
    assert len(counts) >= 2, "inference needs two clusters"
    sums: Array = np.bincount(codes, weights=values).astype(np.float64)
    mean = float(sums.sum() / counts.sum())
    losses, gains = abs(float(values[values < 0].sum())), float(values[values > 0].sum())
    return Totals(sums, counts, sums - counts * mean, mean, losses, gains)


def many_totals(z: npt.NDArray[np.floating], counts: npt.ArrayLike) -> ManyTotals:
    """Return cluster totals of many samples z [..., N], whose items are in order of cluster.

    ``counts`` [C] are the numbers of items in the clusters.
    """
    sizes = np.asarray(counts, dtype=np.int64)
    assert z.shape[-1] == sizes.sum(), (z.shape, int(sizes.sum()))
    assert len(sizes) >= 2, "inference needs two clusters"
    sums: Array = np.add.reduceat(z, np.cumsum(sizes) - sizes, axis=-1).astype(np.float64)  # [..., C]
    net: Array = sums.sum(axis=-1)
    moved: Array = np.abs(z).sum(axis=-1, dtype=np.float64)  # losses + gains, as net is gains - losses
    mean: Array = net / sizes.sum()
    residuals: Array = sums - sizes * mean[..., None]
    return ManyTotals(sums, sizes.astype(np.float64), residuals, mean, (moved - net) / 2, (moved + net) / 2)


def cr3_variance(residuals: Array, counts: Array) -> Array:
    """Return CR3 variances [...] of item means, from residuals summed by cluster [..., C].

    ``counts`` [C] are the numbers of items in the clusters; a cluster may have none.
    """
    clusters = np.count_nonzero(counts, axis=-1)
    others = counts.sum(axis=-1, keepdims=True) - counts  # without a cluster the mean moves by e_c / (N - n_c)
    variance: Array = (clusters - 1) / clusters * np.sum((residuals / others) ** 2, axis=-1)
    return variance


def cr3(t: Totals) -> float:
    """Return the CR3 (cluster jackknife) variance of the item mean: (C-1)/C * sum (e_c / (N - n_c))^2.

    There are N items in C clusters; cluster c has n_c items, and e_c is the sum of their residuals.
    """
    return float(cr3_variance(t.residuals, t.counts))


def cr3_effect(z: npt.ArrayLike, clusters: npt.ArrayLike, *, alpha: float = 0.05) -> Effect:
    """Return the mean of item differences z [N] with a CR3 variance and a t quantile with C - 1 degrees of freedom.

    The differences may exceed [-1, 1], as those of interactions do.
    """
    t = totals(z, clusters)
    variance = cr3(t)
    # variance of the mean if all items were independent
    spread = float(np.var(np.asarray(z, dtype=np.float64))) / t.items
    deff = variance / spread if spread > 0 else 1.0
    return t_effect(
        t, variance, df=t.clusters - 1, alpha=alpha, method="CR3-t", source="Cameron & Miller 2015", deff=deff
    )


def t_effect(t: Totals, variance: float, *, df: float, alpha: float, method: str, source: str, deff: float) -> Effect:
    """Return the t interval of the item mean for a given variance and degrees of freedom.

    ``method``, ``source`` and ``deff`` (the design effect) are only stored in the result.
    """
    bounds = t_bounds(np.float64(t.mean), np.float64(variance), df, alpha=alpha)
    low, high, lower, upper, pvalue, pvalue_drop = (float(value) for value in bounds)
    return Effect(
        estimate=t.mean,
        low=low,
        high=high,
        lower=lower,
        upper=upper,
        alpha=alpha,
        pvalue=pvalue,
        pvalue_drop=pvalue_drop,
        method=method,
        source=source,
        n_items=t.items,
        n_clusters=t.clusters,
        losses=t.losses,
        gains=t.gains,
        deff=deff,
        df=float(df),
    )


def t_bounds(mean: npt.ArrayLike, variance: npt.ArrayLike, df: npt.ArrayLike, *, alpha: float) -> Bounds:
    """Return t intervals and p-values of means [...] with variances [...] and degrees of freedom [...].

    The one-sided bounds are at ``alpha``, the two-sided interval is at 95 %.
    """
    center: Array = np.asarray(mean, dtype=np.float64)
    error: Array = np.sqrt(np.asarray(variance, dtype=np.float64))
    # the printed interval, and the bounds of the gate
    two, one = (special.stdtrit(df, q) * error for q in (0.5 + LEVEL / 2, 1 - alpha))
    below = _drop_pvalues(center, error, df)
    pvalue = np.minimum(1.0, 2 * np.minimum(below, 1 - below))
    return Bounds(center - two, center + two, center - one, center + one, pvalue, below)


def _drop_pvalues(mean: Array, error: Array, df: npt.ArrayLike) -> Array:
    """Return P(T <= mean/error) for a t-distributed T with ``df`` degrees of freedom; 0, 1/2 or 1 for an error of 0."""
    spread = error > 0
    without = np.where(mean == 0, 0.5, (mean > 0).astype(np.float64))
    ratio = mean / np.where(spread, error, 1.0)
    return np.where(spread, special.stdtr(df, ratio), without)


STATISTIC = Statistic(cr3_effect, oracle="tests/test_stats.py::test_cr3_equals_statsmodels")
