"""Sign-flip and max-T against scipy's permutation test, enumeration by hand and their own symmetries."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from kvaudit.reports.stats.clustered import cr3, totals
from kvaudit.reports.stats.signflip import (
    drop_pvalues,
    flip_moments,
    flip_statistics,
    max_t_groups,
    max_t_pvalues,
    sign_flip,
    signs,
    studentised,
    two_sided_pvalues,
)


def uneven(seed, clusters, cells=1):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(clusters), rng.integers(1, 7, clusters))
    z = rng.normal(-0.1, 0.4, (cells, len(labels))) + rng.normal(0, 0.2, (cells, clusters))[:, labels]
    return z, labels


def t_by_hand(sums, counts):
    mean = sums.sum() / counts.sum()
    jackknifed = ((sums - counts * mean) / (counts.sum() - counts)) ** 2
    return mean / math.sqrt((len(sums) - 1) / len(sums) * jackknifed.sum())


@pytest.mark.parametrize("clusters", [6, 9, 11])
def test_exhaustive_sign_flip_is_the_permutation_test_of_scipy(clusters):
    z, labels = uneven(clusters, clusters)
    counts = np.bincount(labels).astype(float)
    sums = np.bincount(labels, weights=z[0])
    found = sign_flip(z[0], labels)
    assert found.exact
    assert found.draws == 2**clusters
    for alternative, pvalue in (("two-sided", found.pvalue), ("less", found.pvalue_drop)):
        wanted = stats.permutation_test(
            (sums,),
            lambda s: t_by_hand(s, counts),
            permutation_type="samples",
            n_resamples=np.inf,
            vectorized=False,
            alternative=alternative,
        )
        assert found.statistic == pytest.approx(wanted.statistic, abs=1e-10)
        assert pvalue == pytest.approx(wanted.pvalue, abs=1e-10)


def test_equal_clusters_give_the_permutation_test_of_the_mean():
    sums = np.random.default_rng(3).normal(0.5, 1, 8)
    wanted = stats.permutation_test((sums,), np.mean, permutation_type="samples", n_resamples=np.inf)
    found = sign_flip(np.repeat(sums / 3, 3), np.repeat(np.arange(8), 3))
    assert found.pvalue == pytest.approx(wanted.pvalue, abs=1e-10)


def test_statistic_is_the_cr3_t():
    z, labels = uneven(5, 30)
    t = totals(z[0], labels)
    found = sign_flip(z[0], labels)
    assert found.statistic == pytest.approx(t.mean / math.sqrt(cr3(t)), abs=1e-10)
    assert found.estimate == pytest.approx(z[0].mean(), abs=1e-12)


def test_many_draws_approach_the_t_test():
    z, labels = uneven(6, 80)
    found = sign_flip(z[0], labels, draws=20_000)
    assert not found.exact
    assert found.pvalue == pytest.approx(2 * stats.t.sf(abs(found.statistic), 79), abs=0.02)


def test_one_cell_of_max_t_is_the_one_sided_sign_flip():
    for clusters in (9, 40):
        z, labels = uneven(7, clusters)
        assert max_t_groups([(z, labels)]).pvalues == (sign_flip(z[0], labels).pvalue_drop,)
        assert max_t_groups([(z[0], labels)], step_down=False).pvalues == (sign_flip(z[0], labels).pvalue_drop,)


@pytest.mark.parametrize("step_down", [True, False])
def test_max_t_is_the_enumeration_by_hand(step_down):
    z, labels = uneven(8, 7, cells=3)
    counts = np.bincount(labels).astype(float)
    sums = np.stack([np.bincount(labels, weights=row) for row in z])
    observed = np.array([t_by_hand(row, counts) for row in sums])
    patterns = list(itertools.product([1, -1], repeat=7))
    flipped = np.array([[t_by_hand(row * np.array(p), counts) for row in sums] for p in patterns])
    order, running, wanted = np.argsort(observed), 0.0, np.zeros(3)
    for rank, cell in enumerate(order):
        family = order[rank:] if step_down else order
        running = max(running, float(np.mean(flipped[:, family].min(axis=1) <= observed[cell] + 1e-9)))
        wanted[cell] = running
    assert max_t_groups([(z, labels)], step_down=step_down).pvalues == pytest.approx(wanted, abs=1e-10)


def test_swapped_arms_flip_the_statistic_and_keep_the_p_value_of_random_draws():
    z, labels = uneven(9, 33)
    one, two = sign_flip(z[0], labels), sign_flip(-z[0], labels)
    assert (one.estimate, one.statistic) == (-two.estimate, -two.statistic)
    assert one.pvalue == two.pvalue
    assert one.pvalue_drop + two.pvalue_drop == pytest.approx(1, abs=0.02)


def test_item_order_and_cluster_labels_change_nothing():
    for clusters in (12, 50):
        z = np.random.default_rng(10).choice([-1.0, 0.0, 1.0], size=(3, clusters * 4), p=[0.2, 0.7, 0.1])
        labels = np.arange(clusters * 4) % clusters
        order = np.random.default_rng(0).permutation(z.shape[1])
        names = np.array([f"template-{997 - label * 7 % 101}" for label in labels])
        assert sign_flip(z[0], labels) == sign_flip(z[0][order], names[order])
        assert max_t_groups([(z, labels)]) == max_t_groups([(z[:, order], names[order])])


def test_adjusted_p_values_lie_between_the_raw_ones_and_bonferroni():
    z, labels = uneven(11, 12, cells=5)
    z[3] -= 0.4
    raw = np.array([sign_flip(row, labels).pvalue_drop for row in z])
    down, single = max_t_groups([(z, labels)]), max_t_groups([(z, labels)], step_down=False)
    assert np.all(raw <= down.pvalues)
    assert np.all(np.array(down.pvalues) <= single.pvalues)
    assert np.all(single.pvalues <= np.minimum(1, 5 * raw) + 1e-12)
    assert down.pvalues != single.pvalues


def test_a_copy_of_a_cell_costs_nothing():
    z, labels = uneven(12, 25)
    once, twice = max_t_groups([(z, labels)]), max_t_groups([(np.vstack([z, z]), labels)])
    assert twice.pvalues == once.pvalues * 2


def test_panels_flip_independently():
    (one, first), (two, second) = uneven(13, 20, cells=2), uneven(14, 15)
    family = max_t_groups([(one, first), (two, second)], step_down=False)
    assert family.estimates == pytest.approx([*one.mean(axis=1), two.mean()], abs=1e-12)
    # the chance that no panel falls below t is the product of the panels' chances
    worst = int(np.argmin(family.statistics[:2]))
    alone = max_t_groups([(one, first)], step_down=False).pvalues[worst]
    sums, counts = np.bincount(second, weights=two[0])[None], np.bincount(second).astype(float)
    below = np.mean(flip_statistics(sums, counts, signs(15, 9999, 1).patterns) <= family.statistics[worst])
    assert family.pvalues[worst] == pytest.approx(1 - (1 - alone) * (1 - below), abs=0.01)
    assert alone + 0.02 < family.pvalues[worst] < 0.98


def test_no_difference_anywhere_is_no_evidence():
    labels = np.repeat(np.arange(20), 3)
    found = sign_flip(np.zeros(60), labels)
    assert (found.statistic, found.pvalue, found.pvalue_drop) == (0.0, 1.0, 1.0)
    assert max_t_groups([(np.zeros((2, 60)), labels)]).pvalues == (1.0, 1.0)


def test_the_same_loss_in_every_cluster_is_the_most_extreme_pattern():
    found = sign_flip(-np.ones(24), np.repeat(np.arange(8), 3))
    assert found.statistic == -math.inf
    assert (found.pvalue, found.pvalue_drop) == (2 / 256, 1 / 256)


def test_five_clusters_are_refused():
    with pytest.raises(AssertionError, match="needs 6 clusters"):
        sign_flip(np.arange(10.0), np.arange(10) % 5)


def test_batched_core_gives_the_statistics_of_every_simulation():
    rng = np.random.default_rng(15)
    sums, counts = rng.normal(size=(5, 4, 3, 9)), rng.integers(1, 6, 9).astype(float)
    patterns = signs(9, 0, 0).patterns
    flipped = flip_statistics(sums, counts, patterns)
    assert flipped.shape == (5, 4, 3, 512)
    observed = studentised(sums, counts)
    assert observed[2, 1, 0] == pytest.approx(t_by_hand(sums[2, 1, 0], counts), abs=1e-10)
    assert flipped[4, 3, 2, 77] == pytest.approx(t_by_hand(sums[4, 3, 2] * patterns[77], counts), abs=1e-10)
    own = rng.integers(1, 6, (5, 4, 1, 9)).astype(float)
    assert flip_statistics(sums, own, patterns)[1, 2, 0, 5] == pytest.approx(
        t_by_hand(sums[1, 2, 0] * patterns[5], own[1, 2, 0]), abs=1e-10
    )
    adjusted = max_t_pvalues(observed, flipped, exact=True)
    assert adjusted[3, 2] == pytest.approx(max_t_pvalues(observed[3, 2], flipped[3, 2], exact=True), abs=0)
    assert drop_pvalues(observed, flipped, exact=True).shape == (5, 4, 3)
    assert two_sided_pvalues(observed, flipped, exact=True).shape == (5, 4, 3)


def test_family_wise_error_and_power_over_holm():
    rng = np.random.default_rng(16)
    simulations, cells, clusters = 1500, 6, 30
    common = rng.normal(size=(simulations, 1, clusters)) * 0.7
    sums = common + rng.normal(size=(simulations, cells, clusters)) * 0.7
    counts = np.ones(clusters)
    patterns = signs(clusters, 499, 3).patterns
    null = max_t_pvalues(studentised(sums, counts), flip_statistics(sums, counts, patterns), exact=False)
    assert np.mean(null.min(axis=1) < 0.05) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / simulations)
    sums[:, 0] -= 0.5
    observed, flipped = studentised(sums, counts), flip_statistics(sums, counts, patterns)
    ours = np.mean(max_t_pvalues(observed, flipped, exact=False)[:, 0] < 0.05)
    bonferroni = np.mean(drop_pvalues(observed, flipped, exact=False)[:, 0] < 0.05 / cells)
    assert ours > bonferroni + 0.02


def test_moments_without_a_flip_are_the_mean_and_the_cr3_variance():
    z, labels = uneven(17, 19)
    t = totals(z[0], labels)
    found = flip_moments(t.sums, t.counts, np.ones((1, 19)))
    assert (found.mean[0], found.variance[0]) == pytest.approx((t.mean, cr3(t)), abs=1e-12)
