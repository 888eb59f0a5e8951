"""The recipe claim: the effect of a way of training, from paired seeds as a sample of all possible seeds.

The variance is V = V_item + max(0, V_seed - V_noise). V_item is CR3 of the seed-averaged differences, and V_seed =
var(seed means)/S. V_noise is the part of V_seed that arises without better or worse seeds, because each loses other
items (seed x item, summed by template); V_item includes it already. The degrees of freedom are Satterthwaite's for all
three estimates, even if V_seed - V_noise is cut at 0. Those of V_seed - V_noise alone would give a two-sided level of
.06 to .095 at three seeds. With seeds that scatter by 4 pp and 100 templates or more, the level at three seeds is still
.07 to .08. If V is tiny compared with V_seed and V_noise, Satterthwaite's degrees of freedom go to 0, and the interval
could get any width; so there is always at least one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import Array, cr3_variance, many_totals, t_bounds, t_effect, totals
from kvaudit.reports.stats.effect import LEVEL, Bounds, Effect, Statistic

SEEDS_NEEDED = 3  # with two seeds the interval is too narrow (7.7 % false alarms at 5 % in simulation)
SEEDS_ADVISED = 5  # with five seeds or more the level also holds for 100 templates and more


class Recipe(NamedTuple):
    """The variance of a recipe's mean drift over all possible training seeds, and its degrees of freedom [...]."""

    variance: Array
    df: Array


class Spread(NamedTuple):
    """The standard deviation of the drift over training seeds with its two-sided 95 % interval, in score units."""

    low: float
    sd: float
    high: float


def recipe_effect(z: npt.ArrayLike, clusters: npt.ArrayLike, *, alpha: float = 0.05) -> Effect:
    """Return the effect of a training recipe from differences z [S, N] of S >= 3 paired seeds on the same N items."""
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
    """Return the effects of many training recipes at once, each from differences z [..., S, N] of S paired seeds.

    Items are in order of cluster, ``counts`` [C] in each. Each effect is what ``recipe_effect`` returns for the same
    seeds.
    """
    found, _ = _recipes(z, counts)
    return t_bounds(z.mean(axis=(-2, -1), dtype=np.float64), found.variance, found.df, alpha=alpha)


def by_cluster(z: npt.ArrayLike, clusters: npt.ArrayLike) -> tuple[Array, npt.NDArray[np.int64]]:
    """Return differences z [S, N] in order of their clusters [N], and the sizes [C] of the clusters."""
    values = np.asarray(z, dtype=np.float64)
    assert values.ndim == 2, values.shape
    assert np.isfinite(values).all(), "an item difference is not finite"
    _, codes, counts = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    return values[:, np.argsort(codes, kind="stable")], counts.astype(np.int64)


def _recipes(z: npt.NDArray[np.floating], counts: npt.ArrayLike) -> tuple[Recipe, Array]:
    """Return the variances of the recipes' mean drifts [...], and the part of each that is due to items alone."""
    t = many_totals(z.mean(axis=-2), counts)
    item = cr3_variance(t.residuals, t.counts)
    return recipe_variance(item, z.mean(axis=-1), seed_noise(z, counts), len(t.counts)), item


def seed_noise(z: npt.NDArray[np.floating], counts: npt.ArrayLike) -> Array:
    """Return the variance [...] of a seed's mean that is due to its items (seed x item), from z [..., S, N].

    The N items are in order of cluster, ``counts`` [C] in each. The variance is CR3 over template totals of each seed's
    difference from the mean of all seeds: so a template that flips in one seed counts as one event, not once per item.
    Differences between the seeds' means do not change it.
    """
    seeds = z.shape[-2]
    own = many_totals(z - z.mean(axis=-2, keepdims=True), counts)  # sums [..., S, C]
    # the mean over S seeds was subtracted, which leaves S - 1 degrees of freedom
    noise: Array = cr3_variance(own.residuals, own.counts).sum(axis=-1) / (seeds - 1)
    return noise


def recipe_variance(item: Array, seed_means: Array, noise: Array, clusters: int) -> Recipe:
    """Return the variance of a training recipe's drift, with its degrees of freedom.

    ``item`` [...] is the variance of the mean drift due to items. ``seed_means`` [..., S] are the drifts of the seeds.
    ``noise`` [...] is the result of ``seed_noise``. If nothing varies, the degrees of freedom are ``clusters`` - 1.
    """
    seeds = seed_means.shape[-1]
    assert seeds >= SEEDS_NEEDED, f"a recipe claim needs {SEEDS_NEEDED} seeds"
    seed, noise = np.var(seed_means, axis=-1, ddof=1) / seeds, noise / seeds  # of a mean over seeds, like ``item``
    total = item + np.maximum(0.0, seed - noise)
    # Satterthwaite: the square of each variance over its degrees of freedom
    spread = item**2 / (clusters - 1) + seed**2 / (seeds - 1) + noise**2 / ((seeds - 1) * (clusters - 1))
    known = total > 0
    df = np.where(known, total**2 / np.where(known, spread, 1.0), clusters - 1.0)
    return Recipe(total, np.maximum(1.0, df))


def seed_spread(estimates: npt.ArrayLike, noise: float) -> Spread | None:
    """Return how far training seeds truly differ, from their drifts ``estimates`` [S]; None below three seeds.

    The variance is that of the drifts minus ``noise``, the part due to items. The interval is the chi-square interval
    of the whole variance with S - 1 degrees of freedom, minus the noise, which is treated as known because it has many
    more degrees of freedom.
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
    of=lambda z, clusters: recipe_effect(np.stack([z] * SEEDS_NEEDED), clusters),  # equal seeds
)
