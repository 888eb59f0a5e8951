"""A coefficient of a least-squares regression with clustered errors: what a value goes with, its controls being equal.

The cluster jackknife of the whole regression (CR3: the fit is made again without each cluster) with t_{C-1}, as for
every other clustered mean; of yes-or-no outcomes the coefficient is a difference of shares (linear probability). It
says what goes together and not what causes what. Controls that follow from one another are harmless; where the
variable follows from them, there is nothing to estimate: ask ``telling_clusters`` first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.clustered import t_effect, totals
from kvaudit.reports.stats.effect import Array, Effect, Statistic
from kvaudit.reports.stats.rule import effective_clusters

_NOTHING = 1e-9  # of a variable's spread, and of the largest eigenvalue: what rounding leaves


def regression_effect(
    y: npt.ArrayLike,
    x: npt.ArrayLike,
    controls: npt.ArrayLike,
    clusters: npt.ArrayLike,
    *,
    alpha: float = 0.05,
    df: float | None = None,
) -> Effect:
    """Change of outcomes y [N] per unit of x [N] at equal controls [N, K], a constant among them by itself.

    ``df`` of the t quantile are C - 1 unless fewer are given, as where few clusters tell of x.
    """
    outcome, design = np.asarray(y, dtype=np.float64), _design(x, controls)
    t = totals(outcome, clusters)
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    grams = np.stack([design[codes == c].T @ design[codes == c] for c in range(t.clusters)])  # [C, K + 2, K + 2]
    moments = np.stack([design[codes == c].T @ outcome[codes == c] for c in range(t.clusters)])  # [C, K + 2]
    estimate = float(_solved(grams.sum(0), moments.sum(0))[-1])  # x is the last column
    without = _solved(grams.sum(0) - grams, moments.sum(0) - moments)[:, -1]  # [C]
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
    """CR3 of an estimate from those without each cluster [C]: (C-1)/C * sum (without_c - estimate)^2."""
    apart = np.asarray(without, dtype=np.float64) - estimate
    return float((len(apart) - 1) / len(apart) * np.square(apart).sum())


def telling_clusters(x: npt.ArrayLike, controls: npt.ArrayLike, clusters: npt.ArrayLike) -> float:
    """How many clusters of one weight tell as much of x's coefficient: (sum h_c)^2 / sum h_c^2, h_c partial leverages.

    0 where x follows from the controls; one cluster that alone has another x is worth little more than one.
    """
    design = _design(x, controls)
    # [N], what of x the controls do not tell
    rest = design[:, -1] - design[:, :-1] @ np.linalg.lstsq(design[:, :-1], design[:, -1], rcond=None)[0]
    if np.abs(rest).max() <= 1e-6 * max(float(np.ptp(design[:, -1])), _NOTHING):
        return 0.0
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    return effective_clusters(np.bincount(codes, weights=np.square(rest)))


def _design(x: npt.ArrayLike, controls: npt.ArrayLike) -> Array:
    """Columns [N, K + 2]: a constant, the controls, and x last."""
    variable, others = np.asarray(x, dtype=np.float64), np.asarray(controls, dtype=np.float64)
    assert others.ndim == 2, others.shape
    assert len(others) == len(variable), (others.shape, variable.shape)
    assert np.isfinite(variable).all(), "a value of x is not finite"
    assert np.isfinite(others).all(), "a control is not finite"
    return np.column_stack([np.ones(len(variable)), others, variable])


def _solved(grams: Array, moments: Array) -> Array:
    """The coefficients [..., K] of normal equations, those of least length where several fit."""
    found: Array = (np.linalg.pinv(grams, rcond=_NOTHING, hermitian=True) @ moments[..., None])[..., 0]
    return found


def _of_two_states(z: Array, clusters: npt.NDArray[np.int64]) -> Effect:
    """Of differences alone: every item once at x = 0 without any, and once at x = 1 with its own."""
    state = np.repeat([0.0, 1.0], len(z))
    return regression_effect(
        np.concatenate([np.zeros(len(z)), z]), state, np.zeros((2 * len(z), 0)), np.tile(clusters, 2)
    )


STATISTIC = Statistic(
    regression_effect,
    oracle="tests/test_stats_regression.py::test_a_coefficient_equals_statsmodels_with_crv3",
    of=_of_two_states,
)
