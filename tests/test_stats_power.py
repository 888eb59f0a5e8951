"""Formulas of planning: what a size can find, and the t distribution's own power."""

import math

import numpy as np
import pytest
from scipy import stats

from kvaudit.reports.stats.power import (
    detection_power,
    difference_variance,
    icc_design_effect,
    minimal_detectable,
    standard_error,
)


def test_minimal_detectable_difference_is_the_sum_of_two_quantiles():
    wanted = (stats.t.ppf(0.95, 59) + stats.t.ppf(0.8, 59)) * 0.02
    assert float(minimal_detectable(0.02, df=59)) == pytest.approx(wanted, abs=1e-10)
    assert float(minimal_detectable(1.0, df=math.inf)) == pytest.approx(stats.norm.ppf(0.95) + stats.norm.ppf(0.8))


def test_power_is_near_that_of_the_paired_t_test():
    weights = pytest.importorskip("statsmodels.stats.power")
    exact = weights.TTestPower().power(0.3, 60, 0.05, alternative="larger")
    assert float(detection_power(60, -0.3, 1.0, df=59)) == pytest.approx(exact, abs=0.005)


def test_a_drop_that_can_be_found_is_found_with_the_power_it_was_computed_for():
    drop = minimal_detectable(standard_error(400, 0.1, deff=1.2), df=79)
    assert float(detection_power(400, drop, 0.1, deff=1.2, df=79)) == pytest.approx(0.8)


def test_variance_of_a_binary_difference():
    assert float(difference_variance(0.1, drift=-0.05)) == pytest.approx(0.0975)
    assert float(difference_variance(0.1)) == 0.1


def test_design_effect_widens_the_standard_error():
    assert float(icc_design_effect(0.1, 5)) == pytest.approx(1.4)
    assert float(standard_error(140, 0.1, deff=1.4)) == pytest.approx(math.sqrt(0.001))


def test_grids_broadcast():
    grid = detection_power(np.array([[100], [300]]), np.array([0.03, 0.05, 0.1]), 0.1, deff=1.2, df=59)
    assert grid.shape == (2, 3)
    assert grid[1, 1] == pytest.approx(float(detection_power(300, 0.05, 0.1, deff=1.2, df=59)))


def test_a_drift_is_no_larger_than_the_share_of_items_that_differ():
    with pytest.raises(AssertionError, match="at least the drift"):
        difference_variance(0.01, drift=-0.02)
