"""Dose slopes against statsmodels, isotonic curves by hand."""

import numpy as np
import pytest
from scipy import stats

from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.slope import dose_weights, isotonic, slope_effect


def scores(seed, doses, clusters=14):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(clusters), rng.integers(1, 6, clusters))
    rate = np.clip(0.8 + rng.normal(0, 0.15, clusters)[labels], 0, 1) - 0.05 * np.arange(doses)[:, None]
    return (rng.random((doses, len(labels))) < rate).astype(float), labels


def test_weights_of_three_doublings():
    assert dose_weights([9, 10, 11]) == pytest.approx([-0.5, 0, 0.5])
    x = np.log2([128, 512, 700, 4096])
    assert dose_weights(x).sum() == pytest.approx(0, abs=1e-12)
    assert dose_weights(x) @ x == pytest.approx(1, abs=1e-12)


def test_slope_contrast_equals_statsmodels_with_crv3():
    sm = pytest.importorskip("statsmodels.api")
    values, labels = scores(0, 4)
    x = np.array([7.0, 8.0, 9.5, 12.0])
    item = [float(np.polyfit(x, column, 1)[0]) for column in values.T]  # least squares inside every item
    fit = sm.OLS(item, np.ones(len(item))).fit(cov_type="cluster-crv3", cov_kwds={"groups": labels}, use_t=True)
    found = slope_effect(values, x, labels)
    assert found.estimate == pytest.approx(float(fit.params[0]), abs=1e-10)
    assert (found.low, found.high) == pytest.approx(tuple(fit.conf_int()[0]), abs=1e-10)
    assert found.pvalue == pytest.approx(float(fit.pvalues[0]), abs=1e-10)


def test_slope_of_the_pooled_rates_is_the_mean_of_the_item_slopes():
    values, labels = scores(1, 5)
    x = [1.0, 2.0, 3.0, 5.0, 6.0]
    assert slope_effect(values, x, labels).estimate == pytest.approx(
        stats.linregress(x, values.mean(axis=1)).slope, abs=1e-12
    )


def test_two_doses_are_a_difference():
    values, labels = scores(2, 2)
    found, plain = slope_effect(values, [3.0, 4.0], labels), cr3_effect(values[1] - values[0], labels)
    assert (found.estimate, found.low, found.pvalue) == pytest.approx((plain.estimate, plain.low, plain.pvalue))


def test_the_order_of_doses_changes_no_slope():
    values, labels = scores(3, 3)
    x = np.array([1.0, 2.0, 4.0])
    a, b = slope_effect(values, x, labels), slope_effect(values[::-1], x[::-1], labels)
    assert (a.estimate, a.low) == pytest.approx((b.estimate, b.low), abs=1e-12)


def test_one_dose_has_no_slope():
    with pytest.raises(AssertionError, match="two different doses"):
        dose_weights([5.0, 5.0])


def test_isotonic_pools_adjacent_violators():
    assert isotonic([3, 1, 2, 4], [0.2, 0.1, 0.6, 0.9], increasing=True) == pytest.approx((0.1, 0.4, 0.4, 0.9))
    assert isotonic([1, 2, 3], [0.5, 0.7, 0.1], increasing=False) == pytest.approx((0.6, 0.6, 0.1))


def test_isotonic_averages_equal_doses():
    assert isotonic([1, 1, 2], [0.0, 0.5, 0.8], increasing=True) == pytest.approx((0.25, 0.8))
