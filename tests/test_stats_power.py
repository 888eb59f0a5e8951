"""Formulas of planning: what a size can find, and the t distribution's own power."""

import math

import pytest
from scipy import stats

from kvaudit.reports.stats.power import detection_power, difference_variance, minimal_detectable
from kvaudit.reports.verdict.sizes import Design, plan_sizes


def test_minimal_detectable_difference_is_the_sum_of_two_quantiles():
    wanted = (stats.t.ppf(0.95, 59) + stats.t.ppf(0.8, 59)) * 0.02
    assert minimal_detectable(0.02, df=59, alpha=0.05, power=0.8) == pytest.approx(wanted, abs=1e-10)
    normal = stats.norm.ppf(0.95) + stats.norm.ppf(0.8)
    assert minimal_detectable(1.0, df=math.inf, alpha=0.05, power=0.8) == pytest.approx(normal)


def test_power_is_near_that_of_the_paired_t_test():
    weights = pytest.importorskip("statsmodels.stats.power")
    exact = weights.TTestPower().power(0.3, 60, 0.05, alternative="larger")
    assert detection_power(0.3, 1 / math.sqrt(60), df=59, alpha=0.05) == pytest.approx(exact, abs=0.005)


def test_a_drop_that_can_be_found_is_found_with_the_power_it_was_computed_for():
    drop = minimal_detectable(0.017, df=79, alpha=0.05, power=0.8)
    assert detection_power(drop, 0.017, df=79, alpha=0.05) == pytest.approx(0.8)


def test_variance_of_a_binary_difference():
    assert difference_variance(0.1, drift=-0.05) == pytest.approx(0.0975)
    assert difference_variance(0.1, drift=0.0) == 0.1


def test_design_effect_widens_the_standard_error():
    sizes = plan_sizes(Design(margin=0.05, discordance=0.1, clusters=28, items_per_cluster=5, correlation=0.1))
    assert sizes.deff == pytest.approx(1.4)
    assert sizes.error == pytest.approx(math.sqrt(0.1 * 1.4 / 140))


def test_a_drift_is_no_larger_than_the_share_of_items_that_differ():
    with pytest.raises(AssertionError, match="at least the drift"):
        difference_variance(0.01, drift=-0.02)
