"""How high a share is shown to be: scipy's exact bound, templates and repeats, and two kinds told apart."""

import numpy as np
import pytest
from scipy import stats

from kvaudit.reports.stats.shares import SHOWN_LEVEL, ShownShare, correlation, share, shares, told_apart


@pytest.mark.parametrize(("hits", "items"), [(0, 48), (1, 48), (8, 48), (47, 48), (48, 48), (120, 300)])
def test_items_of_their_own_templates_have_clopper_and_pearsons_bounds(hits, items):
    """A small design effect below 1 is none: the floor of one draw an item."""
    found = share(np.repeat([1.0, 0.0], [hits, items - hits]), np.arange(items))
    low, high = stats.binomtest(hits, items).proportion_ci(1 - 2 * SHOWN_LEVEL, method="exact")
    assert (found.rate, found.low, found.high) == pytest.approx((hits / items, low, high), abs=0.004)


def test_templates_that_agree_show_less_and_few_of_them_less_still():
    scores = np.repeat([1.0, 0.0], [60, 180])
    apart, in_tens, in_twenties = (share(scores, np.arange(240) // size).low for size in (1, 10, 20))
    assert apart > in_tens > in_twenties > 0
    assert share(scores, np.zeros(240)) == ShownShare(0.25, 0.0, 1.0)  # one template shows nothing


def test_names_and_order_of_templates_change_nothing():
    rng = np.random.default_rng(4)
    scores, clusters = (rng.random(90) < 0.4).astype(float), rng.integers(0, 30, 90)
    order = rng.permutation(90)
    first = [float(value) for value in share(scores, clusters)]
    assert first == pytest.approx([float(value) for value in share(scores[order], clusters[order])])
    renamed = np.array([f"t{99 - cluster}" for cluster in clusters])
    assert first == pytest.approx([float(value) for value in share(scores, renamed)])


def test_copies_of_a_draw_are_no_new_draws():
    scores = np.repeat([1.0, 0.0], [20, 40])
    assert share(scores, np.arange(60), draws=8) == share(scores, np.arange(60))


def test_many_samples_are_each_as_one():
    rng = np.random.default_rng(7)
    values = (rng.random((5, 60)) < 0.3).astype(float)
    many = shares(values, np.full(20, 3))
    for i, own in enumerate(values):
        one = [float(value) for value in share(own, np.arange(60) // 3)]
        assert [float(bound[i]) for bound in many] == pytest.approx(one)


def test_a_constant_behaviour_is_not_told_apart_and_a_perfect_one_is():
    everything, nothing = (share(np.full(48, rate), np.arange(48)) for rate in (1.0, 0.0))
    assert told_apart(everything, nothing, 0.0).rate == 0
    assert told_apart(everything, nothing, 0.0).low < 0
    assert told_apart(everything, everything, 0.0).rate == 1
    assert told_apart(everything, everything, 0.0).low > 0.85


def test_templates_that_are_hard_for_both_kinds_make_the_bound_wider():
    some = share(np.repeat([1.0, 0.0], [36, 12]), np.arange(48))
    alone, together = (told_apart(some, some, alike).low for alike in (0.0, 1.0))
    assert together < alone
    assert together == pytest.approx(2 * float(some.low) - 1)


def test_the_correlation_is_that_of_template_totals_and_never_below_nothing():
    one, other = np.array([1.0, -1.0, 2.0, -2.0]), np.array([1.0, 0.0, 1.0, -2.0])
    assert correlation(one, other) == pytest.approx(7 / np.sqrt(10 * 6))
    assert correlation(one, -other) == 0
    assert correlation(one, np.zeros(4)) == 0
