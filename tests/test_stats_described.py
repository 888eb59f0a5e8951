"""Descriptions beside the gate: churn, by hand and oracle."""

import numpy as np
import pytest

from kvaudit.reports.stats.power import draw_flips, flips


def test_flips_between_single_draws_are_the_discordant_items():
    found = draw_flips([1, 1, 1, 0, 0], [0, 0, 1, 1, 0])
    assert (found.lost, found.won, found.churn) == pytest.approx((0.4, 0.2, 0.6))
    assert found.rerun is None


def test_flips_between_any_draws_are_those_of_every_pair_of_draws():
    rng = np.random.default_rng(2)
    old, new = (rng.random((2, 30, 4)) < 0.7).astype(float)
    pairs = [(old[:, i], new[:, j]) for i in range(4) for j in range(4)]
    reruns = [(x[:, i], x[:, j]) for x in (old, new) for i in range(4) for j in range(4) if i != j]
    found = draw_flips(old.mean(axis=1), new.mean(axis=1), samples=4)
    assert found.lost == pytest.approx(np.mean([(a > b).mean() for a, b in pairs]), abs=1e-12)
    assert found.churn == pytest.approx(np.mean([(a != b).mean() for a, b in pairs]), abs=1e-12)
    assert found.rerun == pytest.approx(np.mean([(a != b).mean() for a, b in reruns]), abs=1e-12)
    assert found.won - found.lost == pytest.approx(new.mean() - old.mean(), abs=1e-12)


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


def test_copies_of_one_draw_flip_like_the_draw():
    one = draw_flips([1, 0, 1, 1], [0, 0, 1, 1])
    four = draw_flips([1, 0, 1, 1], [0, 0, 1, 1], samples=4)
    assert (four.lost, four.churn, four.rerun) == (one.lost, one.churn, 0)


def test_two_draws_that_disagree_would_flip_on_a_rerun():
    assert draw_flips([0.5, 0.5], [1.0, 0.0], samples=2).rerun == pytest.approx(0.5)
