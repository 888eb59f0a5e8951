"""The recipe claim: what training this way does, for paired seeds that stand for all that could have been drawn.

V = V_item + max(0, V_seed - V_noise). V_item is CR3 of the seed-averaged differences and V_seed = var(seed means)/S.
V_noise is the part of V_seed that appears although no seed is better than another, because each loses other items
(seed x item, summed inside templates); V_item holds it already. The degrees of freedom are Satterthwaite's of all three
estimates, also where the difference is cut at 0: those of the difference alone would be two-sided level .06 to .095 at
three seeds. With seeds that scatter by 4 pp and 100 templates or more, three seeds have .07 to .08 all the same. One is
the least: where V is next to nothing beside V_seed and V_noise, Satterthwaite's go to 0, and the interval of seeds that
all came out alike would be of any width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import Array, cr3_variance, many_totals, t_bounds, t_effect, totals
from kvaudit.reports.stats.effect import LEVEL, Bounds, Effect, Statistic

SEEDS_NEEDED = 3  # with two seeds the interval is too narrow (7.7 % false alarms at 5 % in simulation)
SEEDS_ADVISED = 5  # from five on, the level of a recipe's interval holds also with 100 templates and more


class Recipe(NamedTuple):
    """The variance of a recipe's mean and its degrees of freedom, each [...]."""

    variance: Array
    df: Array


class Spread(NamedTuple):
    """The standard deviation of the drift over training seeds with its two-sided 95 % interval, in score units."""

    low: float
    sd: float
    high: float


def recipe_effect(z: npt.ArrayLike, clusters: npt.ArrayLike, *, alpha: float = 0.05) -> Effect:
    """Effect of a training recipe from differences z [S, N] of S >= 3 paired seeds on the same N items."""
    values, counts = by_cluster(z, clusters)
    found, item = _recipes(values, counts)
    variance = float(found.variance)
    return t_effect(
        totals(values.mean(axis=0), np.repeat(np.arange(len(counts)), counts)),
        variance,
        df=float(found.df),
        alpha=alpha,
        method="CR3 + seed variance, t",
        source="V_item + max(0, V_seed - V_noise), Satterthwaite df",
        deff=variance / float(item) if item > 0 else 1.0,
    )


def many_recipe_effects(z: npt.NDArray[np.floating], counts: npt.ArrayLike, *, alpha: float) -> Bounds:
    """``recipe_effect`` of samples z [..., S, N] whose items stand in order of cluster, ``counts`` [C] in each."""
    found, _ = _recipes(z, counts)
    return t_bounds(z.mean(axis=(-2, -1), dtype=np.float64), found.variance, found.df, alpha=alpha)


def by_cluster(z: npt.ArrayLike, clusters: npt.ArrayLike) -> tuple[Array, npt.NDArray[np.int64]]:
    """Differences z [S, N] in order of their clusters [N], and the sizes [C] of those."""
    values = np.asarray(z, dtype=np.float64)
    assert values.ndim == 2, values.shape
    assert np.isfinite(values).all(), "an item difference is not finite"
    _, codes, counts = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    return values[:, np.argsort(codes, kind="stable")], counts.astype(np.int64)


def _recipes(z: npt.NDArray[np.floating], counts: npt.ArrayLike) -> tuple[Recipe, Array]:
    """The recipes' variances [...], and those of their items alone."""
    t = many_totals(z.mean(axis=-2), counts)
    item = cr3_variance(t.residuals, t.counts)
    return recipe_variance(item, z.mean(axis=-1), seed_noise(z, counts), len(t.counts)), item


def seed_noise(z: npt.NDArray[np.floating], counts: npt.ArrayLike) -> Array:
    """Variance [...] of one seed's mean that its items make (seed x item), from z [..., S, N] in order of cluster.

    CR3 over template totals of what a seed differs from the others: a whole template that flips in one seed is one
    event, not one for each of its items. It does not matter that a seed differs from the others in its mean.
    """
    seeds = z.shape[-2]
    own = many_totals(z - z.mean(axis=-2, keepdims=True), counts)  # sums [..., S, C]
    # the mean over S seeds was taken out, so S - 1 of the differences are free
    noise: Array = cr3_variance(own.residuals, own.counts).sum(axis=-1) / (seeds - 1)
    return noise


def recipe_variance(item: Array, seed_means: Array, noise: Array, clusters: int) -> Recipe:
    """Item variances [...], the means of seeds [..., S] and their ``seed_noise`` [...] joined.

    Without any variance the clusters' degrees of freedom stand.
    """
    seeds = seed_means.shape[-1]
    assert seeds >= SEEDS_NEEDED, f"a recipe claim needs {SEEDS_NEEDED} seeds"
    seed, noise = np.var(seed_means, axis=-1, ddof=1) / seeds, noise / seeds  # both of a mean over seeds, as item is
    total = item + np.maximum(0.0, seed - noise)
    # Satterthwaite: the square of each variance over its own degrees of freedom
    spread = item**2 / (clusters - 1) + seed**2 / (seeds - 1) + noise**2 / ((seeds - 1) * (clusters - 1))
    known = total > 0
    df = np.where(known, total**2 / np.where(known, spread, 1.0), clusters - 1.0)
    return Recipe(total, np.maximum(1.0, df))


def seed_spread(estimates: npt.ArrayLike, noise: float) -> Spread | None:
    """How far seeds with these drifts [S] truly lie apart: their variance less ``noise``; None below three seeds.

    The interval is the chi-square interval of the whole variance with S - 1 degrees of freedom, less the noise. That is
    taken as known, for it has (C - 1) times as many.
    """
    drifts = np.asarray(estimates, dtype=np.float64)
    df = len(drifts) - 1
    if len(drifts) < SEEDS_NEEDED:
        return None
    whole, tail = float(np.var(drifts, ddof=1)), (1 - LEVEL) / 2
    low, high = (df * whole / float(special.chdtri(df, p)) for p in (tail, 1 - tail))
    return Spread(*(float(np.sqrt(max(0.0, variance - noise))) for variance in (low, whole, high)))


STATISTIC = Statistic(
    recipe_effect,
    oracle="tests/test_stats_oracles.py::test_seeds_without_item_variance_are_the_t_test_of_seed_means",
    of=lambda z, clusters: recipe_effect(np.stack([z] * SEEDS_NEEDED), clusters),  # seeds that all came out the same
)
