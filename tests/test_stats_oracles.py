"""The statistics of the gate against other programs and against the definitions they abbreviate."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from kvaudit.reports.stats.clustered import cr3, cr3_effect, totals
from kvaudit.reports.stats.seeds import recipe_effect
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS, max_t_groups, sign_flip
from kvaudit.reports.stats.tango import ess_tango, ess_tango_bounds, tango_interval, tango_z


def test_ess_tango_at_design_effect_one_is_tangos_published_interval():
    counts = (np.float64(2), np.float64(12), np.float64(50), np.float64(1.0))
    found = ess_tango_bounds(*counts, df=math.inf, alpha=0.025)
    assert (round(float(found.low), 4), round(float(found.high), 4)) == (0.0611, 0.3447)
    assert (float(found.lower), float(found.upper)) == pytest.approx((float(found.low), float(found.high)), abs=1e-10)


def test_clusters_that_agree_too_well_leave_plain_tango_at_the_t_quantile():
    # every one of five clusters holds the same mixture, so the CR3 variance is 0 and the floor of 1 decides
    z, labels = np.tile([-1.0, 1.0, 1.0, 0, 0, 0, 0, 0, 0, 0], 5), np.repeat(np.arange(5), 10)
    found = ess_tango(z, labels)
    assert found.deff == 1.0
    assert (found.low, found.high) == pytest.approx(tango_interval(5, 10, 50, stats.t.ppf(0.975, 4)), abs=1e-10)


@pytest.mark.parametrize("delta", [-0.3, -0.05, 0.02, 0.2])
def test_tango_score_maximises_the_likelihood_under_the_null(delta):
    losses, gains, n = 2, 12, 50

    def minus_log_likelihood(loss):
        gain = loss + delta
        return -(losses * math.log(loss) + gains * math.log(gain) + (n - losses - gains) * math.log(1 - loss - gain))

    ends = max(0.0, -delta) + 1e-9, (1 - delta) / 2 - 1e-9
    loss = optimize.minimize_scalar(minus_log_likelihood, bounds=ends, method="bounded", options={"xatol": 1e-12}).x
    variance = n * (2 * loss + delta - delta**2)
    assert tango_z(losses, gains, n, delta) == pytest.approx(
        (gains - losses - n * delta) / math.sqrt(variance), abs=1e-5
    )


def test_cr3_is_the_delete_one_cluster_jackknife():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(11), rng.integers(1, 8, 11))
    z = rng.normal(size=len(labels))
    clusters = 11
    # pseudo-means without a cluster, about the mean of all: (C-1)/C * sum (theta_c - theta)^2
    without = np.array([z[labels != c].mean() for c in range(clusters)])
    wanted = (clusters - 1) / clusters * np.sum((without - z.mean()) ** 2)
    assert cr3(totals(z, labels)) == pytest.approx(wanted, abs=1e-10)


def test_equal_clusters_make_cr3_the_t_test_of_cluster_means():
    z = np.random.default_rng(1).normal(size=(20, 3))
    wanted = stats.ttest_1samp(z.mean(axis=1), 0)
    found = cr3_effect(z.ravel(), np.repeat(np.arange(20), 3))
    assert found.pvalue == pytest.approx(wanted.pvalue, abs=1e-10)
    assert (found.low, found.high) == pytest.approx(tuple(wanted.confidence_interval()), abs=1e-10)


def test_seeds_without_item_variance_are_the_t_test_of_seed_means():
    means = np.array([-0.04, -0.01, -0.06, 0.02])
    found = recipe_effect(np.repeat(means[:, None], 30, axis=1), np.arange(30) // 3)
    wanted = stats.ttest_1samp(means, 0)
    assert (found.low, found.high) == pytest.approx(tuple(wanted.confidence_interval()), abs=1e-10)
    assert found.pvalue == pytest.approx(wanted.pvalue, abs=1e-10)


@pytest.mark.parametrize("copies", [2, 8])
def test_copies_of_samples_change_no_statistic(copies):
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(12), 5)
    z = rng.choice([-1.0, 0.0, 1.0], 60, p=[0.2, 0.7, 0.1])
    averaged = np.mean([z] * copies, axis=0)
    assert ess_tango(averaged, labels, samples=copies) == ess_tango(z, labels)
    assert sign_flip(averaged, labels) == sign_flip(z, labels)
    assert cr3_effect(averaged, labels) == cr3_effect(z, labels)
    assert recipe_effect([averaged] * 3, labels) == recipe_effect([z] * 3, labels)


@st.composite
def differences(draw):
    """Item differences in [-1, 1], averages of up to four draws, in 6 to 20 clusters of uneven size."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=FEWEST_CLUSTERS, max_size=20))
    samples = draw(st.integers(1, 4))
    steps = draw(st.lists(st.integers(-samples, samples), min_size=sum(sizes), max_size=sum(sizes)))
    return np.array(steps) / samples, np.repeat(np.arange(len(sizes)), sizes), samples


@settings(max_examples=20, deadline=None)
@given(differences())
def test_any_differences_give_finite_ordered_results(case):
    z, labels, samples = case
    for effect in (ess_tango(z, labels, samples=samples), cr3_effect(z, labels)):
        assert effect.low <= effect.estimate <= effect.high
        assert 0 <= effect.pvalue <= 1
        assert 0 <= effect.pvalue_drop <= 1
    assert ess_tango(z, labels, samples=samples).low < ess_tango(z, labels, samples=samples).high
    flip = sign_flip(z, labels, draws=99)
    assert 0 < flip.pvalue <= 1
    family = max_t_groups([(np.stack([z, -z, z * 0]), labels)], draws=99)
    assert all(0 < p <= 1 for p in family.pvalues)
    assert family.pvalues[0] >= flip.pvalue_drop


def test_one_lost_draw_of_thousands_does_not_make_the_drift_well_known():
    clusters = np.arange(300) // 5
    widths = []
    for differing in range(9):
        z = np.zeros(300)
        z[7 * np.arange(differing)] = -1 / 8
        found = ess_tango(z, clusters, samples=8)
        widths.append(found.high - found.low)
        assert found.deff >= 1 / max(differing, 1)
    assert widths[1] > 0.7 * widths[0]
    assert all(earlier < 2.5 * later for earlier, later in pairwise(widths))
    assert ess_tango(z, clusters, samples=8).deff == pytest.approx(1 / 8, rel=0.01)
