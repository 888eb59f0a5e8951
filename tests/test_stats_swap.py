"""The swap permutation against scipy's distances and an enumeration by hand."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from reports.stats.swap import swap_test


def arms(seed, clusters, items=4, shift=0.3):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(clusters), items)
    reference = rng.normal(size=len(labels))
    own = rng.normal(0, 0.3, clusters)[labels]
    return reference, reference + own + shift + rng.normal(0, 0.2, len(labels)), labels


def distance(statistic, x, y):
    return stats.energy_distance(x, y) ** 2 if statistic == "energy" else stats.ks_2samp(x, y).statistic


@pytest.mark.parametrize("statistic", ["energy", "ks"])
def test_every_swap_by_hand_gives_the_p_value(statistic):
    reference, candidate, labels = arms(0, 7)
    observed = distance(statistic, reference, candidate)
    reached = []
    for pattern in itertools.product([False, True], repeat=7):
        swapped = np.array(pattern)[labels]
        x, y = np.where(swapped, candidate, reference), np.where(swapped, reference, candidate)
        reached.append(distance(statistic, x, y) >= observed - 1e-12)
    found = swap_test(reference, candidate, labels, statistic=statistic)
    assert found.exact
    assert found.estimate == pytest.approx(observed, abs=1e-10)
    assert found.pvalue == pytest.approx(np.mean(reached), abs=1e-10)


@pytest.mark.parametrize("statistic", ["energy", "ks"])
@pytest.mark.parametrize("clusters", [9, 30])
def test_arms_labels_and_order_do_not_matter(statistic, clusters):
    reference, candidate, labels = arms(1, clusters, shift=0.1)
    found = swap_test(reference, candidate, labels, statistic=statistic)
    order = np.random.default_rng(0).permutation(len(labels))
    names = np.array([f"t{(label * 7) % 31}" for label in labels])
    for other in (
        swap_test(candidate, reference, labels, statistic=statistic),
        swap_test(reference[order], candidate[order], names[order], statistic=statistic),
    ):
        assert (other.estimate, other.pvalue) == pytest.approx((found.estimate, found.pvalue), abs=1e-10)
    assert found.exact is (clusters == 9)


def test_equal_arms_differ_by_nothing():
    reference, _, labels = arms(2, 20)
    found = swap_test(reference, reference, labels)
    assert (found.estimate, found.pvalue) == (0, 1)


def test_a_clear_shift_reaches_the_smallest_p_value():
    reference, candidate, labels = arms(3, 40, shift=3.0)
    assert swap_test(reference, candidate, labels, draws=499).pvalue == 1 / 500
    assert swap_test(reference, candidate, labels, draws=499, statistic="ks").pvalue == 1 / 500


def test_a_change_of_spread_without_a_change_of_mean_is_seen():
    rng = np.random.default_rng(4)
    reference = rng.normal(size=400)
    assert swap_test(reference, 3 * rng.normal(size=400), np.arange(400) // 8).pvalue < 0.01


def test_clustered_noise_is_rejected_no_more_than_5_percent_of_the_time():
    rng = np.random.default_rng(5)
    labels, rejected = np.repeat(np.arange(10), 6), 0
    for _ in range(300):
        drawn = rng.normal(size=(2, 10))[:, labels] * 0.7 + rng.normal(size=(2, 60)) * 0.7
        rejected += swap_test(*drawn, labels).pvalue <= 0.05
    assert rejected / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_too_few_clusters_and_holes_are_refused():
    reference, candidate, labels = arms(6, 5)
    with pytest.raises(AssertionError, match="needs 6 clusters"):
        swap_test(reference, candidate, labels)
    reference, candidate, labels = arms(6, 8)
    candidate[3] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        swap_test(reference, candidate, labels)
