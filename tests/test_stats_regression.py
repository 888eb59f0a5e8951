"""The clustered regression against statsmodels, and where it has nothing to say."""

import numpy as np
import pytest

from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.regression import regression_effect, telling_clusters


def drawn(seed, clusters=15):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(clusters), rng.integers(2, 9, clusters))
    controls = np.column_stack([labels % 2, rng.normal(size=len(labels))]).astype(float)
    x = rng.random(len(labels)) + 0.3 * controls[:, 0]
    y = (rng.random(len(labels)) < 0.2 + 0.4 * x).astype(float) + 0.2 * rng.normal(size=clusters)[labels]
    return y, x, controls, labels


@pytest.mark.parametrize("seed", range(3))
def test_a_coefficient_equals_statsmodels_with_crv3(seed):
    sm = pytest.importorskip("statsmodels.api")
    y, x, controls, labels = drawn(seed)
    design = np.column_stack([np.ones(len(x)), controls, x])
    fit = sm.OLS(y, design).fit(cov_type="cluster-crv3", cov_kwds={"groups": labels}, use_t=True)
    found = regression_effect(y, x, controls, labels)
    assert found.estimate == pytest.approx(float(fit.params[-1]), abs=1e-9)
    assert (found.low, found.high) == pytest.approx(tuple(fit.conf_int()[-1]), abs=1e-9)
    assert found.pvalue == pytest.approx(float(fit.pvalues[-1]), abs=1e-9)
    assert found.df == 14


def test_copies_of_a_control_change_nothing():
    y, x, controls, labels = drawn(4)
    one = regression_effect(y, x, controls, labels)
    two = regression_effect(y, x, np.column_stack([controls, controls[:, :1], 1 - controls[:, :1]]), labels)
    assert (one.estimate, one.low, one.high) == pytest.approx((two.estimate, two.low, two.high), abs=1e-8)


def test_two_groups_without_controls_are_a_difference_of_means():
    y, _, _, labels = drawn(5)
    group = (np.arange(len(y)) % 3 == 0).astype(float)
    found = regression_effect(y, group, np.zeros((len(y), 0)), labels)
    assert found.estimate == pytest.approx(y[group == 1].mean() - y[group == 0].mean(), abs=1e-12)


def test_all_of_a_cluster_at_once_is_the_jackknife_of_the_mean():
    rng = np.random.default_rng(6)
    z, labels = rng.normal(size=40), np.arange(40) // 4
    twice, state = np.concatenate([np.zeros(40), z]), np.repeat([0.0, 1.0], 40)
    found, mean = regression_effect(twice, state, np.zeros((80, 0)), np.tile(labels, 2)), cr3_effect(z, labels)
    assert (found.estimate, found.low, found.high) == pytest.approx((mean.estimate, mean.low, mean.high), abs=1e-12)


def test_what_follows_from_the_controls_is_told_by_no_cluster():
    _, x, controls, labels = drawn(7)
    assert telling_clusters(2 * controls[:, 0] + 1, controls, labels) == 0
    assert telling_clusters(np.ones(len(x)), controls, labels) == 0
    assert 8 < telling_clusters(x, controls, labels) <= 15


def test_one_cluster_that_differs_tells_as_much_as_one():
    labels, none = np.arange(60) // 4, np.zeros((60, 0))
    assert telling_clusters((labels == 3).astype(float), none, labels) == pytest.approx(1.148, abs=1e-3)
    assert telling_clusters(np.arange(60) % 2 * 1.0, none, labels) == pytest.approx(15)
