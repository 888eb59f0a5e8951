"""Whether two paired samples of a real-valued score differ in distribution: swaps of the arms inside whole clusters.

Energy distance (Szekely & Rizzo 2013) and Kolmogorov-Smirnov distance, referred to the patterns of swaps that are as
likely as the observed one when the arms are exchangeable. Tests that take the values as independent reject far too
often with clustered ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from reports.stats.signflip import FEWEST_CLUSTERS, drop_pvalues, signs

Array = npt.NDArray[np.float64]
BLOCK = 4_000_000  # differences of distribution functions held at a time


@dataclass(frozen=True, slots=True)
class SwapTest:
    """A distance between the arms and its permutation p-value; the distance cannot be negative."""

    estimate: float
    pvalue: float
    draws: int
    exact: bool
    n_items: int
    n_clusters: int
    method: str
    source: str


def swap_test(
    reference: npt.ArrayLike,
    candidate: npt.ArrayLike,
    clusters: npt.ArrayLike,
    *,
    statistic: Literal["energy", "ks"] = "energy",
    draws: int = 999,
    seed: int = 0,
) -> SwapTest:
    """Permutation test on paired values [M] in clusters [M]; every swap up to 13 clusters, ``draws`` beyond.

    ``energy`` is 2 * integral of (F - G)^2, ``ks`` the largest |F - G|.
    """
    steps, gaps = _distribution_steps(reference, candidate, clusters)
    turned, apart = _canonical(steps), steps.sum(axis=0)
    patterns, exact = signs(len(steps), draws, seed)
    if statistic == "energy":
        observed = float(2 * apart**2 @ gaps)
        swapped = 2 * ((patterns @ ((turned * gaps) @ turned.T)) * patterns).sum(axis=1)
    else:
        observed, swapped = float(np.abs(apart).max()), _largest_gaps(patterns, turned)
    return SwapTest(
        estimate=observed,
        pvalue=float(drop_pvalues(-observed, -swapped, exact=exact)),
        draws=len(swapped),
        exact=exact,
        n_items=np.size(reference),
        n_clusters=len(steps),
        method=f"cluster swap permutation, {'energy' if statistic == 'energy' else 'Kolmogorov-Smirnov'} distance",
        source="Szekely & Rizzo 2013" if statistic == "energy" else "Kolmogorov-Smirnov",
    )


def _distribution_steps(
    reference: npt.ArrayLike, candidate: npt.ArrayLike, clusters: npt.ArrayLike
) -> tuple[Array, Array]:
    """Each cluster's part [C, P] of F - G at the distinct values, and the widths [P] up to the next value."""
    old, new = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    assert old.ndim == 1, old.shape
    assert old.shape == new.shape == codes.shape, (old.shape, new.shape, codes.shape)
    assert np.isfinite(old).all(), "a value is not finite"
    assert np.isfinite(new).all(), "a value is not finite"
    count = int(codes.max()) + 1
    assert count >= FEWEST_CLUSTERS, f"a swap test needs {FEWEST_CLUSTERS} clusters"
    points, ranks = np.unique(np.concatenate([old, new]), return_inverse=True)
    steps = np.zeros((count, len(points)))
    np.add.at(steps, (codes, ranks[: len(old)]), 1 / len(old))
    np.add.at(steps, (codes, ranks[len(old) :]), -1 / len(old))
    return np.cumsum(steps, axis=1), np.diff(points, append=points[-1])


def _canonical(steps: Array) -> Array:
    """Clusters turned and ordered by their values: neither labels nor the order of the arms meet other draws.

    Turning a cluster only renames its swaps.
    """
    lean = (steps @ np.arange(1.0, steps.shape[1] + 1)).round(9)
    turned = steps * np.where(lean < 0, -1.0, 1.0)[:, None]
    order = np.lexsort([turned.sum(axis=1).round(9), np.abs(steps).sum(axis=1).round(9), np.abs(lean)])
    return turned[order]


def _largest_gaps(patterns: Array, steps: Array) -> Array:
    """Largest |F - G| [B] under every pattern of swaps."""
    rows = max(1, BLOCK // steps.shape[1])
    parts = [np.abs(patterns[i : i + rows] @ steps).max(axis=1) for i in range(0, len(patterns), rows)]
    return np.concatenate(parts)
