"""Power formulas: the planning table, each function the inverse of the others, and the t distribution's own power."""

import math

import numpy as np
import pytest
from scipy import stats

from reports.stats.power import (
    design_effect,
    detection_power,
    difference_variance,
    items_needed,
    minimal_detectable,
    power,
    smallest_margin,
    standard_error,
)


@pytest.mark.parametrize(
    ("margin", "items"),
    [(0.05, [174, 347, 693]), (0.03, [481, 962, 1924]), (0.02, [1082, 2164, 4328]), (0.10, [44, 87, 174])],
)
def test_planning_table_at_design_effect_1_4(margin, items):
    assert items_needed(margin, difference_variance([0.05, 0.10, 0.20]), deff=1.4).tolist() == items


def test_300_items_in_60_clusters_pass_with_power_80():
    found = power(300, 0.05, difference_variance(0.10), deff=1.2)
    assert round(float(found), 2) == 0.80


def test_every_function_inverts_the_others():
    variance = difference_variance(0.12, drift=0.01, samples=4, sampling_share=0.5)
    options = {"deff": 1.3, "drift": -0.01, "alpha": 0.025, "df": 71.0}
    reached = float(power(500, 0.04, variance, **options))
    assert smallest_margin(500, variance, power=reached, **options) == pytest.approx(0.04, abs=1e-9)
    assert int(items_needed(0.04, variance, power=reached, **options)) == 500


def test_needed_items_are_the_fewest():
    variance = difference_variance(0.1)
    items = int(items_needed(0.05, variance))
    assert power(items, 0.05, variance) >= 0.8 > power(items - 1, 0.05, variance)


def test_minimal_detectable_difference_is_the_sum_of_two_quantiles():
    wanted = (stats.t.ppf(0.95, 59) + stats.t.ppf(0.8, 59)) * 0.02
    assert float(minimal_detectable(0.02, df=59)) == pytest.approx(wanted, abs=1e-10)
    assert float(minimal_detectable(1.0, df=math.inf)) == pytest.approx(stats.norm.ppf(0.95) + stats.norm.ppf(0.8))


def test_power_is_near_that_of_the_paired_t_test():
    weights = pytest.importorskip("statsmodels.stats.power")
    exact = weights.TTestPower().power(0.3, 60, 0.05, alternative="larger")
    assert float(power(60, 0.3, 1.0, df=59)) == pytest.approx(exact, abs=0.005)


def test_a_drift_at_the_margin_passes_alpha_of_the_time():
    assert float(power(300, 0.05, 0.1, drift=-0.05)) == pytest.approx(0.05, abs=1e-10)
    assert float(power(300, 0.05, 0.1, drift=-0.08)) < 0.01


def test_detection_mirrors_non_inferiority():
    assert detection_power(400, -0.05, 0.1) == power(400, 0.05, 0.1)


def test_variance_of_a_binary_difference_and_what_samples_take_off_it():
    assert float(difference_variance(0.1, drift=-0.05)) == pytest.approx(0.0975)
    assert float(difference_variance(0.1, samples=4, sampling_share=0.4)) == pytest.approx(0.1 * (0.6 + 0.1))
    assert float(difference_variance(0.1, samples=4)) == 0.1


def test_design_effect_widens_the_standard_error():
    assert float(design_effect(0.1, 5)) == pytest.approx(1.4)
    assert float(standard_error(140, 0.1, deff=1.4)) == pytest.approx(math.sqrt(0.001))


def test_grids_broadcast():
    grid = power(np.array([[100], [300]]), np.array([0.03, 0.05, 0.1]), 0.1, deff=1.2)
    assert grid.shape == (2, 3)
    assert grid[1, 1] == pytest.approx(float(power(300, 0.05, 0.1, deff=1.2)))


@pytest.mark.parametrize("margin", [1e-8, 1e-105, 1e-200, 5e-324])
def test_a_size_beyond_all_numbers_is_a_very_large_one(margin):
    assert items_needed(margin, 0.1) > 10**12


def test_a_gain_adds_to_the_room_and_a_loss_takes_from_it():
    assert float(power(300, 0.05, 0.1, drift=0.01)) == pytest.approx(float(power(300, 0.06, 0.1)))
    assert float(power(300, 0.05, 0.1, drift=-0.01)) == pytest.approx(float(power(300, 0.04, 0.1)))
    assert items_needed(0.05, 0.1, drift=0.05) == items_needed(0.1, 0.1)
    assert float(smallest_margin(300, 0.1, drift=0.5)) == 0


def test_a_drift_is_no_larger_than_the_share_of_items_that_differ():
    with pytest.raises(AssertionError, match="at least the drift"):
        difference_variance(0.01, drift=-0.02)


def test_a_drift_beyond_the_margin_has_no_sample_size():
    with pytest.raises(AssertionError, match="no number of items"):
        items_needed(0.05, 0.1, drift=-0.05)
