"""A coefficient of a least-squares regression with controls and clustered errors.

The variance is the cluster jackknife of the whole regression (CR3: refitted without each cluster). As for every other
mean over C clusters, the t quantile has C - 1 degrees of freedom. For binary outcomes the coefficient is a difference
of shares (linear probability). It is an association, not a cause. Collinear controls are harmless; but if the controls
determine the variable itself, nothing can be estimated: check ``telling_clusters`` first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.clustered import t_effect, totals
from kvaudit.reports.stats.effect import Array, Effect, Statistic
from kvaudit.reports.stats.rule import effective_clusters

_NOTHING = 1e-9  # rounding error relative to a variable's spread, and to the largest eigenvalue


def regression_effect(
    y: npt.ArrayLike,
    x: npt.ArrayLike,
    controls: npt.ArrayLike,
    clusters: npt.ArrayLike,
    *,
    alpha: float = 0.05,
    df: float | None = None,
) -> Effect:
    """Return the change of outcomes y [N] per unit of x [N] at equal controls [N, K]; a constant is added.

    ``clusters`` [N] names the cluster of each row. ``df`` are the degrees of freedom of the t quantile. By default they
    are C - 1 for C clusters; pass fewer if only a few clusters are informative of x.
    """
    outcome, design = np.asarray(y, dtype=np.float64), _design(x, controls)
    t = totals(outcome, clusters)
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    grams = np.stack([design[codes == c].T @ design[codes == c] for c in range(t.clusters)])  # [C, K + 2, K + 2]
    moments = np.stack([design[codes == c].T @ outcome[codes == c] for c in range(t.clusters)])  # [C, K + 2]
    estimate = float(_solve(grams.sum(0), moments.sum(0))[-1])  # x is the last column
    without = _solve(grams.sum(0) - grams, moments.sum(0) - moments)[:, -1]  # [C]
    variance = jackknife_variance(without, estimate)
    return t_effect(
        t._replace(mean=estimate),
        variance,
        df=t.clusters - 1 if df is None else df,
        alpha=alpha,
        method="regression, CR3-t",
        source="Cameron & Miller 2015",
        deff=1.0,
    )


def jackknife_variance(without: npt.ArrayLike, estimate: float) -> float:
    """Return the CR3 variance, (C-1)/C * sum (without_c - estimate)^2.

    ``without`` [C] are the estimates that leave out one cluster each.
    """
    deviations = np.asarray(without, dtype=np.float64) - estimate
    return float((len(deviations) - 1) / len(deviations) * np.square(deviations).sum())


def telling_clusters(x: npt.ArrayLike, controls: npt.ArrayLike, clusters: npt.ArrayLike) -> float:
    """Return the effective number of clusters that determine x's coefficient: (sum h_c)^2 / sum h_c^2.

    h_c is the partial leverage of cluster c, its share of the variation of x that the controls do not explain. The
    result is 0 if x is determined by the controls, and little more than 1 if x differs in a single cluster only.
    """
    design = _design(x, controls)
    # [N], the residual of x after the controls
    residual = design[:, -1] - design[:, :-1] @ np.linalg.lstsq(design[:, :-1], design[:, -1], rcond=None)[0]
    if np.abs(residual).max() <= 1e-6 * max(float(np.ptp(design[:, -1])), _NOTHING):
        return 0.0
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    return effective_clusters(np.bincount(codes, weights=np.square(residual)))


def _design(x: npt.ArrayLike, controls: npt.ArrayLike) -> Array:
    """Return columns [N, K + 2]: a constant, the controls, and x last."""
    variable, others = np.asarray(x, dtype=np.float64), np.asarray(controls, dtype=np.float64)
    assert others.ndim == 2, others.shape
    assert len(others) == len(variable), (others.shape, variable.shape)
    assert np.isfinite(variable).all(), "a value of x is not finite"
    assert np.isfinite(others).all(), "a control is not finite"
    return np.column_stack([np.ones(len(variable)), others, variable])


def _solve(grams: Array, moments: Array) -> Array:
    """Return the minimum-norm solution [..., K] of the normal equations, ``grams`` (X'X) @ solution = ``moments``."""
    solution: Array = (np.linalg.pinv(grams, rcond=_NOTHING, hermitian=True) @ moments[..., None])[..., 0]
    return solution


def _of_differences(z: Array, clusters: npt.NDArray[np.int64]) -> Effect:
    """Return the regression of paired differences, so that tests can call it like every other statistic.

    Every item is one row at x = 0 with outcome 0, and one at x = 1 with its difference.
    """
    state = np.repeat([0.0, 1.0], len(z))
    return regression_effect(
        np.concatenate([np.zeros(len(z)), z]), state, np.zeros((2 * len(z), 0)), np.tile(clusters, 2)
    )


STATISTIC = Statistic(
    regression_effect,
    oracle="tests/test_stats_regression.py::test_a_coefficient_equals_statsmodels_with_crv3",
    of=_of_differences,
)
