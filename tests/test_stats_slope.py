"""Dose slopes against statsmodels, isotonic curves by hand, the logit contrast against a GEE."""

import math

import numpy as np
import pytest
from scipy import special, stats

from reports.stats.clustered import cr3_effect
from reports.stats.logit_did import logit_contrast, logit_did
from reports.stats.slope import dose_weights, isotonic, slope_effect


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


def test_swapped_arms_flip_the_difference_of_slopes_and_reversed_doses_do_not():
    (one, labels), (two, _) = scores(3, 3), scores(4, 3)
    two = two[:, np.arange(one.shape[1]) % two.shape[1]]
    x = np.array([1.0, 2.0, 4.0])
    a, b = slope_effect(one - two, x, labels), slope_effect(two - one, x, labels)
    assert (a.estimate, a.low, a.high) == pytest.approx((-b.estimate, -b.high, -b.low), abs=1e-12)
    c = slope_effect((one - two)[::-1], x[::-1], labels)
    assert (a.estimate, a.low) == pytest.approx((c.estimate, c.low), abs=1e-12)


def test_one_dose_has_no_slope():
    with pytest.raises(AssertionError, match="two different doses"):
        dose_weights([5.0, 5.0])


def test_isotonic_pools_adjacent_violators():
    found = isotonic([3, 1, 2, 4], [0.2, 0.1, 0.6, 0.9])
    assert found.x == (1, 2, 3, 4)
    assert found.fitted == pytest.approx((0.1, 0.4, 0.4, 0.9))
    assert isotonic([1, 2, 3], [0.1, 0.6, 0.2], [1, 1, 3]).fitted == pytest.approx((0.1, 0.3, 0.3))
    assert isotonic([1, 2, 3], [0.5, 0.7, 0.1], increasing=False).fitted == pytest.approx((0.6, 0.6, 0.1))


def test_isotonic_averages_equal_doses():
    found = isotonic([1, 1, 2], [0.0, 1.0, 0.8], [3, 1, 1])
    assert (found.x, found.fitted) == ((1, 2), pytest.approx((0.25, 0.8)))


def test_logit_did_is_the_log_odds_ratio_with_half_a_count_added():
    values, labels = scores(5, 4)
    n, s = values.shape[1], values.sum(axis=1)
    logits = np.log((s + 0.5) / (n - s + 0.5))
    found = logit_did(*values, labels)
    assert found.estimate == pytest.approx(logits[0] - logits[1] - logits[2] + logits[3], abs=1e-12)
    m = values.mean(axis=1)
    assert found.contrast == pytest.approx(m[0] - m[1] - m[2] + m[3], abs=1e-12)


def test_logit_contrast_is_the_jackknife_over_clusters():
    values, labels = scores(6, 2)

    def logit_gap(keep):
        n, s = keep.sum(), values[:, keep].sum(axis=1)
        return float(np.diff(np.log((s + 0.5) / (n - s + 0.5)))[0])

    whole = logit_gap(labels >= 0)
    parts = np.array([logit_gap(labels != c) for c in np.unique(labels)])
    error = math.sqrt((len(parts) - 1) / len(parts) * np.sum((parts - whole) ** 2))
    found = logit_contrast(values, [-1, 1], labels)
    assert (found.estimate, found.error) == pytest.approx((whole, error), abs=1e-12)
    assert found.high == pytest.approx(whole + stats.t.ppf(0.975, len(parts) - 1) * error, abs=1e-10)
    assert found.pvalue == pytest.approx(2 * stats.t.sf(abs(whole) / error, len(parts) - 1), abs=1e-10)


def test_logit_contrast_is_near_a_generalised_estimating_equation():
    sm = pytest.importorskip("statsmodels.api")
    values, labels = scores(7, 4, clusters=120)
    long = values.ravel()
    arm, served = np.repeat([1, 1, 0, 0], values.shape[1]), np.repeat([1, 0, 1, 0], values.shape[1])
    design = np.column_stack([np.ones(len(long)), arm, served, arm * served])
    fit = sm.GEE(long, design, groups=np.tile(labels, 4), family=sm.families.Binomial()).fit(cov_type="bias_reduced")
    found = logit_did(*values, labels)
    assert found.estimate == pytest.approx(float(fit.params[3]), abs=0.02)
    assert found.error == pytest.approx(float(fit.bse[3]), rel=0.05)


def test_logit_scale_turns_the_sign_near_the_ceiling():
    def cell(rate):
        return (np.arange(200) < round(rate * 200)).astype(float)

    clusters = np.arange(200) % 40
    found = logit_did(cell(0.95), cell(0.99), cell(0.55), cell(0.60), clusters)
    assert found.contrast == pytest.approx(0.01, abs=1e-12)
    assert found.estimate < 0
    assert found.ceiling_driven
    assert not logit_did(cell(0.80), cell(0.90), cell(0.88), cell(0.90), clusters).ceiling_driven
    assert not logit_did(cell(0.95), cell(0.99), cell(0.56), cell(0.60), clusters).ceiling_driven


def test_rates_of_zero_and_one_stay_finite():
    found = logit_did(np.zeros(20), np.ones(20), np.ones(20), np.ones(20), np.arange(20) // 2)
    assert found.estimate == pytest.approx(-2 * math.log(41), abs=1e-12)
    assert math.isfinite(found.low)
    assert special.expit(found.estimate) < 0.01


def test_swapping_the_arms_flips_the_logit_contrast():
    values, labels = scores(8, 4)
    one, two = logit_did(*values, labels), logit_did(*values[[2, 3, 0, 1]], labels)
    assert (one.estimate, one.low, one.high) == pytest.approx((-two.estimate, -two.high, -two.low), abs=1e-12)
