"""The recipe claim: item variance and training-seed variance added, for paired seeds.

V = V_item + V_seed, V_item = CR3 of the seed-averaged differences, V_seed = var(seed means)/S, Satterthwaite degrees of
freedom. Slightly conservative: the seed-by-item part is counted twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reports.stats.clustered import Array, ManyTotals, cr3, cr3_variance, many_totals, t_bounds, t_effect, totals
from reports.stats.effect import Bounds, Effect, Statistic

SEEDS_NEEDED = 3  # with two seeds the interval is too narrow (7.7 % false alarms at 5 % in simulation)


class Recipe(NamedTuple):
    """The variance of a recipe's mean and its degrees of freedom, each [...]."""

    variance: Array
    df: Array


def recipe_effect(z: npt.ArrayLike, clusters: npt.ArrayLike, *, alpha: float = 0.05) -> Effect:
    """Effect of a training recipe from differences z [S, N] of S >= 3 paired seeds on the same N items."""
    values = np.asarray(z, dtype=np.float64)
    assert values.ndim == 2, values.shape
    t = totals(values.mean(axis=0), clusters)
    item = cr3(t)
    found = recipe_variance(np.array(item), values.mean(axis=1), t.clusters)
    return t_effect(
        t,
        float(found.variance),
        df=float(found.df),
        alpha=alpha,
        method="CR3 + seed variance, t",
        source="V_item + V_seed, Satterthwaite df",
        deff=float(found.variance) / item if item > 0 else 1.0,
    )


def many_recipe_effects(z: npt.NDArray[np.floating], counts: npt.ArrayLike, *, alpha: float) -> Bounds:
    """``recipe_effect`` of samples z [..., S, N] whose items stand in order of cluster, ``counts`` [C] in each."""
    t: ManyTotals = many_totals(z.mean(axis=-2), counts)
    found = recipe_variance(cr3_variance(t.residuals, t.counts), z.mean(axis=-1), len(t.counts))
    return t_bounds(t.mean, found.variance, found.df, alpha=alpha)


def recipe_variance(item: Array, seed_means: Array, clusters: int) -> Recipe:
    """Item variances [...] and the means of seeds [..., S] joined; without any variance the clusters' df stand."""
    seeds = seed_means.shape[-1]
    assert seeds >= SEEDS_NEEDED, f"a recipe claim needs {SEEDS_NEEDED} seeds"
    seed = np.var(seed_means, axis=-1, ddof=1) / seeds
    total = item + seed
    spread = item**2 / (clusters - 1) + seed**2 / (seeds - 1)
    known = spread > 0
    df = np.where(known, total**2 / np.where(known, spread, 1.0), clusters - 1.0)
    return Recipe(total, df)


STATISTIC = Statistic(
    recipe_effect,
    oracle="tests/test_stats_oracles.py::test_seeds_without_item_variance_are_the_t_test_of_seed_means",
    of=lambda z, clusters: recipe_effect(np.stack([z] * SEEDS_NEEDED), clusters),  # seeds that all came out the same
)
