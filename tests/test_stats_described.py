"""Descriptions beside the gate: concentration, churn, bootstrap, mid-p and the exploratory list, by hand and oracle."""

import math

import numpy as np
import pytest
from scipy import stats

from reports.stats.bootstrap import cluster_bootstrap, resampled_means
from reports.stats.churn import churn, flips
from reports.stats.concentration import concentration, gini
from reports.stats.fdr import benjamini_hochberg
from reports.stats.mcnemar import mid_p


def test_concentration_of_a_known_case():
    z = np.array([-1.0, -1, -1, 0, -1, 1, 0, 0, 0, 0])
    names = np.array(["a", "a", "a", "a", "b", "b", "c", "c", "d", "d"])
    found = concentration(z, names)
    assert [(c.label, c.items, c.losses, c.gains, c.share, c.rate) for c in found.clusters] == [
        ("a", 4, 3, 0, 0.75, 0.75),
        ("b", 2, 1, 1, 0.25, 0.5),
        ("c", 2, 0, 0, 0, 0),
        ("d", 2, 0, 0, 0, 0),
    ]
    assert (found.losses, found.carrying_half, found.dominant, found.broken) == (4, 1, ("a",), ("a",))
    assert found.gini == pytest.approx((3 * 3 + 1 * 1) / (4 * 4))  # sum of (2i - C - 1) x / (C * total)


def test_gini_is_half_the_mean_difference_over_the_mean():
    x = np.random.default_rng(0).exponential(size=9)
    assert gini(x) == pytest.approx(np.abs(x[:, None] - x).mean() / 2 / x.mean(), abs=1e-12)
    assert gini([2, 2, 2]) == 0
    assert gini([0, 0, 0, 7]) == pytest.approx(0.75)


def test_no_loss_is_concentrated_nowhere():
    found = concentration([0.0, 1.0, 0.0], [1, 2, 3])
    assert (found.losses, found.gini, found.carrying_half, found.dominant, found.broken) == (0, 0, 0, (), ())


def test_half_of_even_losses_lies_in_half_of_the_clusters():
    found = concentration(-np.ones(10), np.arange(10))
    assert (found.carrying_half, found.dominant, found.gini) == (5, (), 0)
    assert found.broken == tuple(str(i) for i in range(10))


def test_shares_add_up_and_order_does_not_matter():
    rng = np.random.default_rng(1)
    z, labels = rng.choice([-1.0, -0.25, 0.0, 0.5], 60), np.arange(60) % 11
    order = rng.permutation(60)
    found = concentration(z, labels)
    assert math.fsum(c.share for c in found.clusters) == pytest.approx(1)
    assert concentration(z[order], labels[order]) == found


def test_churn_of_single_draws_counts_the_discordant_items():
    found = churn([1, 1, 1, 0, 0], [0, 0, 1, 1, 0])
    assert (found.losses, found.gains, found.churn) == pytest.approx((0.4, 0.2, 0.6))
    assert (found.draw_losses, found.draw_gains, found.draw_churn) == pytest.approx((0.4, 0.2, 0.6))
    assert found.rerun_churn is None


def test_churn_of_several_draws_is_that_of_every_pair_of_draws():
    rng = np.random.default_rng(2)
    old, new = (rng.random((2, 30, 4)) < 0.7).astype(float)
    pairs = [(old[:, i], new[:, j]) for i in range(4) for j in range(4)]
    reruns = [(x[:, i], x[:, j]) for x in (old, new) for i in range(4) for j in range(4) if i != j]
    found = churn(old.mean(axis=1), new.mean(axis=1), samples=4)
    assert found.draw_losses == pytest.approx(np.mean([(a > b).mean() for a, b in pairs]), abs=1e-12)
    assert found.draw_churn == pytest.approx(np.mean([(a != b).mean() for a, b in pairs]), abs=1e-12)
    assert found.rerun_churn == pytest.approx(np.mean([(a != b).mean() for a, b in reruns]), abs=1e-12)
    drift = new.mean() - old.mean()
    assert found.gains - found.losses == pytest.approx(drift, abs=1e-12)
    assert found.draw_gains - found.draw_losses == pytest.approx(drift, abs=1e-12)
    assert found.churn < found.draw_churn


def test_flips_of_single_draws_are_counted_in_each_pair_of_seeds():
    old, new = [[1, 1, 0, 0], [1, 0, 0, 1]], [[0, 1, 0, 1], [1, 1, 0, 1]]
    found = flips(old, new)
    assert (found.lost, found.won, found.churn) == (1 / 8, 2 / 8, 3 / 8)


def test_flips_of_several_draws_are_those_of_every_pair_of_draws_of_the_same_seeds():
    rng = np.random.default_rng(7)
    old, new = rng.integers(0, 2, (2, 3, 20, 4))  # seeds, items, draws
    pairs = [(old[s, :, i], new[s, :, j]) for s in range(3) for i in range(4) for j in range(4)]
    found = flips(old.mean(axis=2), new.mean(axis=2), samples=4)
    assert found.churn == pytest.approx(np.mean([(a != b).mean() for a, b in pairs]), abs=1e-12)
    assert found.won - found.lost == pytest.approx(new.mean() - old.mean(), abs=1e-12)


def test_copies_of_one_draw_churn_like_the_draw():
    one = churn([1, 0, 1, 1], [0, 0, 1, 1])
    four = churn([1, 0, 1, 1], [0, 0, 1, 1], samples=4)
    assert (four.losses, four.draw_churn, four.rerun_churn) == (one.losses, one.draw_churn, 0)


def test_two_draws_that_disagree_would_churn_on_a_rerun():
    assert churn([0.5, 0.5], [1.0, 0.0], samples=2).rerun_churn == pytest.approx(0.5)


def test_bootstrap_is_near_that_of_scipy():
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(40), rng.integers(1, 6, 40))
    z = rng.choice([-1.0, 0.0, 1.0], len(labels), p=[0.2, 0.7, 0.1])
    sums, counts = np.bincount(labels, weights=z), np.bincount(labels)
    wanted = stats.bootstrap(
        (sums, counts),
        lambda s, n, axis: s.sum(axis=axis) / n.sum(axis=axis),
        paired=True,
        method="percentile",
        n_resamples=9999,
        rng=np.random.default_rng(0),
    ).confidence_interval
    found = cluster_bootstrap(z, labels, draws=9999)
    assert found.estimate == pytest.approx(z.mean(), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=0.006)
    assert "display only" in found.method


def test_bootstrap_does_not_see_labels_or_order():
    rng = np.random.default_rng(4)
    z, labels = rng.normal(size=60), np.arange(60) % 13
    order = rng.permutation(60)
    one, two = (
        cluster_bootstrap(z, labels),
        cluster_bootstrap(z[order], np.array([f"t{99 - x}" for x in labels[order]])),
    )
    assert (one.low, one.high) == pytest.approx((two.low, two.high), abs=1e-12)


def test_resampled_means_of_many_samples_share_their_draws():
    sums, counts = np.random.default_rng(5).normal(size=(3, 2, 7)), np.arange(1.0, 8)
    found = resampled_means(sums, counts, draws=50, rng=np.random.default_rng(6))
    alone = resampled_means(sums[2, 1], counts, draws=50, rng=np.random.default_rng(6))
    assert found.shape == (3, 2, 50)
    assert found[2, 1] == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize(("losses", "gains"), [(2, 12), (5, 5), (0, 3), (0, 0), (40, 21), (1, 0)])
def test_mid_p_takes_half_of_the_observed_table(losses, gains):
    n = losses + gains
    fewer = min(losses, gains)
    below = float(stats.binom.cdf(fewer - 1, n, 0.5)) if fewer else 0.0
    wanted = min(1.0, 2 * (below + 0.5 * float(stats.binom.pmf(fewer, n, 0.5))))
    if losses == gains:
        wanted = 1.0 - (float(stats.binom.pmf(fewer, n, 0.5)) if n else 0.0)
    assert float(mid_p(losses, gains)) == pytest.approx(wanted, abs=1e-10)


def test_mid_p_is_the_exact_p_value_less_the_observed_point():
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    exact = contingency.mcnemar([[30, 12], [2, 6]], exact=True).pvalue
    assert float(mid_p(2, 12)) == pytest.approx(exact - float(stats.binom.pmf(2, 14, 0.5)), abs=1e-10)


@pytest.mark.parametrize("dependent", [False, True])
def test_exploratory_list_equals_statsmodels(dependent):
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    pvalues = [0.001, 0.2, 0.013, 0.04, 0.9, 0.021]
    wanted = multitest.multipletests(pvalues, 0.10, method="fdr_by" if dependent else "fdr_bh")
    found = benjamini_hochberg(pvalues, dependent=dependent)
    assert found.adjusted == pytest.approx(wanted[1], abs=1e-10)
    assert list(found.discovered) == wanted[0].tolist()
    assert benjamini_hochberg([]).adjusted == ()
    assert benjamini_hochberg([0.1], q=0.1).discovered == (True,)
