"""Studentised cluster sign-flip test of a mean difference of 0, and its max-T version over many cells.

Under the null a cluster's summed difference and its negative are equally likely, and so are all patterns of signs. The
CR3 t statistic is flipped instead of the mean, which keeps the level with unequal clusters (Canay, Santos & Shaikh
2021). For an intercept it equals the Rademacher wild cluster bootstrap with the null imposed (Cameron, Gelbach & Miller
2008). Max-T flips all cells with one sign vector (Westfall & Young 1993; step-down: Romano & Wolf 2005), so the
family-wise error holds under any dependence of the cells. Holm's step-down adjustment (1979) is used if signs cannot be
flipped together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.effect import Statistic

Array = npt.NDArray[np.float64]

FEWEST_CLUSTERS = 6  # with five, no pattern of signs has a two-sided p below .0625
EXHAUSTIVE_CLUSTERS = 13  # 2^13 patterns are fewer than the random draws
BLOCK = 4_000_000  # signs in memory at a time
SOURCE = "Canay, Santos & Shaikh 2021"


@dataclass(frozen=True, slots=True)
class SignFlip:
    """A mean difference with its sign-flip p-values: ``pvalue`` two-sided, ``pvalue_drop`` for a mean below 0."""

    estimate: float
    statistic: float
    pvalue: float
    pvalue_drop: float
    draws: int
    exact: bool
    n_items: int
    n_clusters: int
    method: str = "cluster sign-flip, CR3-t"
    source: str = SOURCE


@dataclass(frozen=True, slots=True)
class MaxT:
    """Family-wise adjusted one-sided p-values of a drop, one per cell, in the order given."""

    estimates: tuple[float, ...]
    statistics: tuple[float, ...]
    pvalues: tuple[float, ...]
    draws: int
    exact: bool
    step_down: bool
    method: str = "max-T by joint cluster sign-flip"
    source: str = "Westfall & Young 1993; Romano & Wolf 2005"


class Signs(NamedTuple):
    """Patterns [B, C] of one sign, 1 or -1, for each cluster; ``exact`` is whether they are all possible patterns."""

    patterns: Array
    exact: bool


class Moments(NamedTuple):
    """Means [..., B] of cells under B sign patterns, and their CR3 variances [..., B].

    ``scale`` [..., 1] is the weighted sum of squares. A variance that is tiny compared with it is only rounding error.
    """

    mean: Array
    variance: Array
    scale: Array


class _Cells(NamedTuple):
    """The differences of K cells that have the same items, summed by cluster.

    ``turned`` are the same sums with the sign of each cluster chosen so that its first sum other than 0 is positive.
    """

    sums: Array  # [K, C]
    counts: Array  # [C]
    turned: Array  # [K, C]


def sign_flip(z: npt.ArrayLike, clusters: npt.ArrayLike, *, draws: int = 9999, seed: int = 0) -> SignFlip:
    """Test whether item differences z [N] have a mean of 0, by flipping the signs of whole clusters.

    All patterns of signs are used for up to 13 clusters, else ``draws`` random ones. There must be six clusters or more
    (asserted): the gate calls data with fewer INVALID before it tests them.
    """
    cells = _cells(np.asarray(z, dtype=np.float64)[None], clusters)
    observed = studentised(cells.sums, cells.counts)[0]
    flipped, exact = _flip(cells, draws, seed, stream=0, exhaustive=True)
    return SignFlip(
        estimate=float(cells.sums.sum() / cells.counts.sum()),
        statistic=float(observed),
        pvalue=float(two_sided_pvalues(observed, flipped[0], exact=exact)),
        pvalue_drop=float(drop_pvalues(observed, flipped[0], exact=exact)),
        draws=flipped.shape[-1],
        exact=exact,
        n_items=int(cells.counts.sum()),
        n_clusters=len(cells.counts),
    )


def max_t_groups(
    groups: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]], *, draws: int = 9999, seed: int = 0, step_down: bool = True
) -> MaxT:
    """Compute max-T over the cells of several groups, each with its own items: (z [K_g, N_g], clusters [N_g]).

    The cells of a group share their sign vectors; groups have no cluster in common and are flipped independently.
    ``step_down`` and single-step are explained in ``max_t_pvalues``.
    """
    assert groups, "a family needs a cell"
    panels = [_cells(np.atleast_2d(np.asarray(z, dtype=np.float64)), clusters) for z, clusters in groups]
    # for several panels the patterns would multiply, so they are drawn at random
    flips = [_flip(p, draws, seed, stream=g, exhaustive=len(panels) == 1) for g, p in enumerate(panels)]
    exact = flips[0][1]
    observed = np.concatenate([studentised(p.sums, p.counts) for p in panels])
    flipped = np.concatenate([statistics for statistics, _ in flips])
    return MaxT(
        estimates=tuple(float(m) for p in panels for m in p.sums.sum(axis=-1) / p.counts.sum()),
        statistics=tuple(float(t) for t in observed),
        pvalues=tuple(float(p) for p in max_t_pvalues(observed, flipped, exact=exact, step_down=step_down)),
        draws=flipped.shape[-1],
        exact=exact,
        step_down=step_down,
    )


def signs(clusters: int, draws: int, seed: int | Sequence[int]) -> Signs:
    """Return patterns [B, C] of ``clusters`` signs.

    For up to 13 clusters they are all possible patterns, otherwise ``draws`` random ones.
    """
    if clusters <= EXHAUSTIVE_CLUSTERS:
        # [2^C, C]: bit c in the number of a pattern is the sign of cluster c
        bits: Array = (np.arange(2**clusters)[:, None] >> np.arange(clusters) & 1).astype(np.float64)
        return Signs(1 - 2 * bits, True)
    return Signs(random_signs(np.random.default_rng(seed), draws, clusters), False)


def random_signs(rng: np.random.Generator, draws: int, clusters: int) -> Array:
    """Draw random patterns [B, C] of one sign, 1 or -1, for each cluster."""
    patterns: Array = rng.integers(0, 2, size=(draws, clusters)).astype(np.float64)
    return 2 * patterns - 1


def studentised(sums: Array, counts: Array) -> Array:
    """Return CR3 t statistics [...] of cluster sums [..., C] with cluster sizes [..., C]; 0 if nothing differs."""
    total = counts.sum(axis=-1)
    mean = sums.sum(axis=-1) / total
    weights = (total[..., None] - counts) ** -2.0  # [..., C], weights of the squared residuals in CR3
    clusters = counts.shape[-1]
    variance = (clusters - 1) / clusters * (weights * (sums - counts * mean[..., None]) ** 2).sum(axis=-1)
    return _ratio(mean, variance, (weights * sums**2).sum(axis=-1))


def flip_statistics(sums: Array, counts: Array, patterns: Array) -> Array:
    """Return CR3 t statistics [..., K, B] of cluster sums [..., K, C] under sign patterns [B, C] common to all K cells.

    ``counts`` are the numbers of items in the clusters, [C] or in a shape that broadcasts against ``sums``.
    """
    return _ratio(*flip_moments(sums, counts, patterns))


def flip_moments(sums: Array, counts: Array, patterns: Array) -> Moments:
    """Return the mean and the CR3 (cluster-robust) variance of each of K cells under every sign pattern, in one suite.

    ``sums`` [..., K, C] are the differences of each cell summed by cluster, ``counts`` ([C], or broadcast) the items of
    each cluster, ``patterns`` [B, C] the signs. Moments of several suites add up. A flip does not change the squared
    sums, so the variance of every pattern follows from two matrix products.
    """
    total = counts.sum(axis=-1, keepdims=True)
    weights = (total - counts) ** -2.0
    mean = sums @ patterns.T / total  # [..., K, B]
    squares = (weights * sums**2).sum(axis=-1, keepdims=True)
    cross = (weights * counts * sums) @ patterns.T
    clusters = counts.shape[-1]
    # sum of w (sign * s - n * mean)^2, multiplied out
    spread = squares - 2 * mean * cross + mean**2 * (weights * counts**2).sum(axis=-1, keepdims=True)
    return Moments(mean, np.maximum((clusters - 1) / clusters * spread, 0.0), squares)


def two_sided_pvalues(observed: npt.ArrayLike, flipped: Array, *, exact: bool) -> Array:
    """Return two-sided p-values [...] of observed t statistics [...].

    ``flipped`` [..., B] are the statistics under B patterns of changed signs; ``exact`` is whether these are all
    possible patterns.
    """
    return _share(np.abs(flipped), np.abs(np.asarray(observed)), exact)


def drop_pvalues(observed: npt.ArrayLike, flipped: Array, *, exact: bool) -> Array:
    """Return one-sided p-values [...] for a mean below 0; the arguments are as in ``two_sided_pvalues``."""
    return _share(-flipped, -np.asarray(observed), exact)


def max_t_pvalues(observed: Array, flipped: Array, *, exact: bool, step_down: bool = True) -> Array:
    """Return one-sided p-values [..., K] of a drop in K cells, adjusted together.

    ``observed`` [..., K] are the t statistics, ``flipped`` [..., K, B] those under B patterns of changed signs, the
    same in all cells; ``exact`` is whether these are all possible patterns. Single-step compares each cell with the
    lowest statistic of all K cells. Step-down compares it with the lowest of its own and of all less extreme cells.
    """
    order = np.argsort(observed, axis=-1)
    ranked = np.take_along_axis(observed, order, axis=-1)
    if step_down:
        # accumulated from the least extreme cell on: each gets the lowest of itself and of all less extreme cells
        lowest = np.take_along_axis(flipped, order[..., None], axis=-2)[..., ::-1, :]
        lowest = np.minimum.accumulate(lowest, axis=-2)[..., ::-1, :]
    else:
        lowest = flipped.min(axis=-2, keepdims=True)
    # step-down: no cell has a smaller p-value than a more extreme one
    adjusted = np.maximum.accumulate(drop_pvalues(ranked, lowest, exact=exact), axis=-1)
    unranked: Array = np.take_along_axis(adjusted, np.argsort(order, axis=-1), axis=-1)
    return unranked


def _share(flipped: Array, observed: Array, exact: bool) -> Array:
    """Return the share of sign patterns whose statistic is at least as large as the observed one.

    Unless the patterns are all possible ones (``exact``), the observed one is counted as one more pattern.
    """
    slack = 1e-9 * np.maximum(1.0, np.abs(observed))  # rounding must not break ties
    limit = observed - np.where(np.isfinite(slack), slack, 0.0)  # inf - inf is no limit
    reached = (flipped >= limit[..., None]).sum(axis=-1)
    share: Array = reached / flipped.shape[-1] if exact else (1 + reached) / (flipped.shape[-1] + 1)
    return share


def _ratio(mean: Array, variance: Array, scale: Array) -> Array:
    """Return mean / sqrt(variance); infinite where the variance is only rounding error compared with ``scale``."""
    flat = variance <= 1e-12 * scale
    t = mean / np.sqrt(np.where(flat, 1.0, variance))
    return np.where(flat, np.copysign(np.where(mean == 0, 0.0, np.inf), mean), t)


def _cells(z: Array, clusters: npt.ArrayLike) -> _Cells:
    """Return cluster sums in an order that depends on the values only, not on labels or the order of items.

    For ``turned`` the sign of each cluster is chosen so that its first sum other than 0 is positive. This only permutes
    the sign patterns; without it the random draws would change if reference and candidate were swapped.
    """
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    assert z.ndim == 2, z.shape
    assert codes.shape == z.shape[1:], (codes.shape, z.shape)
    assert np.isfinite(z).all(), "an item difference is not finite"
    counts: Array = np.bincount(codes).astype(np.float64)
    assert len(counts) >= FEWEST_CLUSTERS, f"a sign-flip test needs {FEWEST_CLUSTERS} clusters"
    sums: Array = np.stack([np.bincount(codes, weights=row) for row in z])  # [K, C]
    rounded = sums.round(12)  # the order of items may change the last bits, which must not change the sorting
    # [C], the first nonzero cell
    first = np.take_along_axis(rounded, (rounded != 0).argmax(axis=0)[None], axis=0)[0]
    turn = np.where(first < 0, -1.0, 1.0)
    # lexsort sorts by its last key first: sizes, then turned sums cell by cell, then the original sums
    order = np.lexsort([*rounded[::-1], *(rounded * turn)[::-1], counts])
    return _Cells(sums[:, order], counts[order], (sums * turn)[:, order])


def _flip(cells: _Cells, draws: int, seed: int, *, stream: int, exhaustive: bool) -> tuple[Array, bool]:
    """Return the t statistics [K, B] of K cells under B sign patterns, and whether these are all possible patterns.

    If ``exhaustive`` is set and clusters are few, all patterns are used. Otherwise there are ``draws`` random ones,
    which ``seed`` and ``stream`` determine.
    """
    clusters = len(cells.counts)
    if exhaustive and clusters <= EXHAUSTIVE_CLUSTERS:
        return flip_statistics(cells.turned, cells.counts, signs(clusters, draws, 0).patterns), True
    rng = np.random.default_rng([seed, stream])
    rows = max(1, BLOCK // clusters)
    blocks = [min(rows, draws - start) for start in range(0, draws, rows)]
    parts = [flip_statistics(cells.turned, cells.counts, random_signs(rng, block, clusters)) for block in blocks]
    return np.concatenate(parts, axis=-1), False


STATISTIC = Statistic(
    sign_flip,
    oracle="tests/test_stats_signflip.py::test_exhaustive_sign_flip_is_the_permutation_test_of_scipy",
)


def holm(pvalues: Sequence[float]) -> tuple[float, ...]:
    """Return Holm-adjusted p-values in the given order; they are valid under any dependence of the tests."""
    order = sorted(range(len(pvalues)), key=lambda i: pvalues[i])
    adjusted = [0.0] * len(pvalues)
    running = 0.0
    for rank, index in enumerate(order):
        # the smallest of m is multiplied by m, the next by m - 1; the result must not decrease
        running = max(running, min(1.0, (len(pvalues) - rank) * pvalues[index]))
        adjusted[index] = running
    return tuple(adjusted)
