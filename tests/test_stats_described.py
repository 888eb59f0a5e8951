"""Descriptions beside the gate: concentration and churn, by hand and oracle."""

import math

import numpy as np
import pytest

from kvaudit.reports.stats.churn import chance_gini, churn_of, concentration_of, flips, gini


def test_concentration_of_a_known_case():
    z = np.array([-1.0, -1, -1, 0, -1, 1, 0, 0, 0, 0])
    names = np.array(["a", "a", "a", "a", "b", "b", "c", "c", "d", "d"])
    found = concentration_of(z, names)
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


def test_one_lost_item_has_the_gini_of_chance():
    found = concentration_of([-1.0] + [0.0] * 71, np.arange(72) // 2)
    assert (found.gini, found.chance) == pytest.approx((1 - 1 / 36, 1 - 1 / 36))


def test_two_losses_fall_on_one_of_four_pairs_by_chance_once_in_seven():
    """Two losses in 8 items of 4 clusters: 4 of 28 pairs share a cluster (Gini 3/4), the others do not (1/2)."""
    assert chance_gini([1, 1, 0, 0, 0, 0, 0, 0], [2, 2, 2, 2]) == pytest.approx(4 / 28 * 0.75 + 24 / 28 * 0.5, abs=0.01)


def test_a_template_that_broke_is_further_from_even_than_chance():
    found = concentration_of([-1.0] * 4 + [0.0] * 28, np.arange(32) // 4)
    assert found.chance < 0.65 < found.gini == pytest.approx(1 - 1 / 8)


def test_no_loss_is_concentrated_nowhere():
    found = concentration_of([0.0, 1.0, 0.0], [1, 2, 3])
    assert (found.losses, found.gini, found.carrying_half, found.dominant, found.broken) == (0, 0, 0, (), ())


def test_half_of_even_losses_lies_in_half_of_the_clusters():
    found = concentration_of(-np.ones(10), np.arange(10))
    assert (found.carrying_half, found.dominant, found.gini) == (5, (), 0)
    assert found.broken == tuple(str(i) for i in range(10))


def test_shares_add_up_and_order_does_not_matter():
    rng = np.random.default_rng(1)
    z, labels = rng.choice([-1.0, -0.25, 0.0, 0.5], 60), np.arange(60) % 11
    order = rng.permutation(60)
    found = concentration_of(z, labels)
    assert math.fsum(c.share for c in found.clusters) == pytest.approx(1)
    assert concentration_of(z[order], labels[order]) == found


def test_churn_of_single_draws_counts_the_discordant_items():
    found = churn_of([1, 1, 1, 0, 0], [0, 0, 1, 1, 0])
    assert (found.losses, found.gains, found.churn) == pytest.approx((0.4, 0.2, 0.6))
    assert (found.draw_losses, found.draw_gains, found.draw_churn) == pytest.approx((0.4, 0.2, 0.6))
    assert found.rerun_churn is None


def test_churn_of_several_draws_is_that_of_every_pair_of_draws():
    rng = np.random.default_rng(2)
    old, new = (rng.random((2, 30, 4)) < 0.7).astype(float)
    pairs = [(old[:, i], new[:, j]) for i in range(4) for j in range(4)]
    reruns = [(x[:, i], x[:, j]) for x in (old, new) for i in range(4) for j in range(4) if i != j]
    found = churn_of(old.mean(axis=1), new.mean(axis=1), samples=4)
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
    assert found.rerun is None


def test_flips_of_several_draws_are_those_of_every_pair_of_draws_of_the_same_seeds():
    rng = np.random.default_rng(7)
    old, new = rng.integers(0, 2, (2, 3, 20, 4))  # seeds, items, draws
    pairs = [(old[s, :, i], new[s, :, j]) for s in range(3) for i in range(4) for j in range(4)]
    found = flips(old.mean(axis=2), new.mean(axis=2), samples=4)
    assert found.churn == pytest.approx(np.mean([(a != b).mean() for a, b in pairs]), abs=1e-12)
    assert found.won - found.lost == pytest.approx(new.mean() - old.mean(), abs=1e-12)
    reruns = [
        (x[s, :, i], x[s, :, j]) for x in (old, new) for s in range(3) for i in range(4) for j in range(4) if i != j
    ]
    assert found.rerun == pytest.approx(np.mean([(a != b).mean() for a, b in reruns]), abs=1e-12)


def test_copies_of_one_draw_churn_like_the_draw():
    one = churn_of([1, 0, 1, 1], [0, 0, 1, 1])
    four = churn_of([1, 0, 1, 1], [0, 0, 1, 1], samples=4)
    assert (four.losses, four.draw_churn, four.rerun_churn) == (one.losses, one.draw_churn, 0)


def test_two_draws_that_disagree_would_churn_on_a_rerun():
    assert churn_of([0.5, 0.5], [1.0, 0.0], samples=2).rerun_churn == pytest.approx(0.5)
