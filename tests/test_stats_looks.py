"""Repeated looks: published boundaries, simulated levels, and the wager by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from reports.stats.looks import STAKES, alpha_per_look, monitor, pocock_alpha, wagers


def test_bonferroni_splits_alpha():
    assert alpha_per_look(0.05, 4) == 0.0125
    assert alpha_per_look(0.05, 1) == 0.05


@pytest.mark.parametrize(("looks", "boundary"), [(1, 1.645), (2, 1.875), (3, 1.992), (4, 2.067), (5, 2.122)])
def test_pocock_boundaries_at_one_sided_5_percent(looks, boundary):
    # Jennison & Turnbull 2000, table 2.1, two-sided .10
    assert stats.norm.isf(pocock_alpha(0.05, looks)) == pytest.approx(boundary, abs=1e-3)


@pytest.mark.parametrize(("looks", "boundary"), [(2, 2.178), (3, 2.289), (5, 2.413)])
def test_pocock_boundaries_at_one_sided_2_5_percent(looks, boundary):
    assert stats.norm.isf(pocock_alpha(0.025, looks)) == pytest.approx(boundary, abs=1e-3)


def test_two_pocock_looks_are_the_bivariate_normal_of_scipy():
    c = stats.norm.isf(pocock_alpha(0.05, 2))
    inside = stats.multivariate_normal(cov=[[1, 0.5**0.5], [0.5**0.5, 1]]).cdf([c, c])
    assert 1 - inside == pytest.approx(0.05, abs=1e-7)


def test_pocock_spends_more_than_bonferroni_and_less_than_alpha():
    assert alpha_per_look(0.05, 3) < pocock_alpha(0.05, 3) < 0.05


def test_wealth_by_hand():
    z, clusters = np.array([0.0, 1.0, -1.0]), np.array([0, 0, 1])
    found = monitor(z, clusters, margin=0.05, largest=2)
    first, second = 1.1 / 1.9, -0.95 / 1.9
    wanted = np.mean([(1 + s * first) * (1 + s * second) for s in STAKES])
    assert found.wealth == pytest.approx(wanted, abs=1e-12)
    assert found.largest_wealth == pytest.approx(np.mean([1 + s * first for s in STAKES]), abs=1e-12)
    assert found.pvalue == pytest.approx(1 / found.largest_wealth, abs=1e-12)
    assert (found.passed, found.clusters_to_pass) == (False, None)


def test_a_cluster_lost_entirely_costs_all_that_was_staked():
    found = wagers(np.array([-4.0]), np.array([4.0]), margin=0.05, largest=4)
    assert np.exp(found.log_wealth[0]) == pytest.approx(np.mean([1 - s for s in STAKES]), abs=1e-12)


def test_clusters_count_in_the_order_of_their_first_item():
    z, names = np.array([0.0, -1.0, 0.0, 0.0]), np.array(["z", "a", "z", "m"])
    found = monitor(z, names, margin=0.1, largest=2)
    by_hand = wagers(np.array([0.0, -1.0, 0.0]), np.array([2.0, 1.0, 1.0]), margin=0.1, largest=2)
    assert found.wealth == pytest.approx(math.exp(by_hand.log_wealth[-1]), abs=1e-12)
    assert found.largest_wealth == pytest.approx(math.exp(by_hand.log_wealth.max()), abs=1e-12)


def test_the_wager_passes_equal_arms_and_says_when():
    found = monitor(np.zeros(600), np.arange(600) // 5, margin=0.05, largest=5)
    step = 0.05 / 0.95
    needed = next(c for c in range(1, 121) if np.mean([(1 + s * step) ** c for s in STAKES]) >= 20)
    assert (found.passed, found.clusters_to_pass) == (True, needed)


def test_wealth_grows_past_what_a_float_holds_without_overflow():
    found = wagers(np.ones((2, 5000)), np.ones(5000), margin=0.5, largest=1)
    assert found.first.tolist() == [3, 3]  # (1.3^3 + 1.9^3 + 2.8^3 + 3.85^3) / 4 = 22.0
    assert np.isfinite(found.log_wealth).all()


def test_the_wager_seldom_passes_at_the_margin_however_often_one_looks():
    rng = np.random.default_rng(5)
    sums = rng.binomial(5, 0.05, size=(4000, 200)) * -1.0
    found = wagers(sums, np.full(200, 5.0), margin=0.05, largest=5)
    assert found.log_wealth.shape == (4000, 200)
    assert np.mean(found.passed) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
    assert np.all((found.first > 0) == found.passed)


def test_a_cluster_beyond_the_declared_size_is_refused():
    with pytest.raises(AssertionError, match="larger than declared"):
        monitor(np.zeros(6), np.zeros(6), margin=0.05, largest=5)
