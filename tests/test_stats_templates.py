"""The template rule: what a few templates that broke, or were never seen, may hide."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom
from statsmodels.emplike.descriptive import DescStat

from kvaudit.reports.stats.rule import (
    EXACT,
    SHARPNESS,
    STEEPEST,
    SuiteTotals,
    _log_ratio,
    chi_square_limit,
    clusters_required,
    largest_alone,
    parts_show_margin,
    shows_margin,
    template_bound,
    too_large,
    too_uneven,
)

FIVE = {"margin": 0.05, "alpha": 0.05}


@pytest.mark.filterwarnings("ignore:DescStatUV.test_mean:FutureWarning")
def test_without_an_unseen_template_it_is_owens_empirical_likelihood_ratio():
    values = np.random.default_rng(0).normal(0.05, 0.2, 60)
    # statsmodels gives -2 log R; the unseen template is put so near that it does not bind
    assert 2 * _log_ratio(values, 0.01) == pytest.approx(DescStat(values).test_mean(0)[0], rel=1e-9)


@pytest.mark.parametrize("items", [1, 5])
def test_nothing_discordant_gives_the_log_of_having_drawn_no_broken_template(items):
    found = _log_ratio(np.full(60, 0.05 * items), 0.95 * items)
    assert found == pytest.approx(-60 * np.log(0.95), rel=1e-9)


def test_templates_that_all_agree_clear_the_margin_well_before_c_min():
    """60 * -log(.95) = 3.08 against 1.2 * t(59, .95)^2 / 2 = 1.68."""
    assert clusters_required(0.05, 0.05) == 59
    enough = [c for c in range(6, 60) if shows_margin(np.zeros(c), np.full(c, 5), **FIVE)]
    assert enough[0] == 34
    assert enough == list(range(34, 60))
    assert SHARPNESS == 1.2


@pytest.mark.parametrize(
    ("clusters", "margin", "broken", "shown"),
    [
        (79, 0.05, 1, False),  # the chi-square itself
        (82, 0.05, 1, False),  # 5 % of the templates break, one or none of 82 in .079
        (83, 0.05, 1, True),  # in .076, but more is not asked than by the steepest limit
        (90, 0.05, 1, True),  # in .056
        (116, 0.05, 2, False),
        (122, 0.05, 2, True),
    ],
)
def test_before_a_step_whole_templates_are_counted_as_a_binomial_law_has_it(clusters, margin, broken, shown):
    sums = np.where(np.arange(clusters) < broken, -5.0, 0.0)
    ratio = _log_ratio(sums + 5 * margin, 5 * (1 - margin)) / chi_square_limit(clusters, 0.05) * SHARPNESS
    likely = binom.cdf(broken, clusters, margin) > EXACT * 0.05
    assert bool(ratio > (STEEPEST if likely else SHARPNESS)) is shown
    assert bool(shows_margin(sums, np.full(clusters, 5), margin=margin, alpha=0.05)) is shown


def test_of_one_size_all_are_the_largest_and_the_chance_is_that_of_c_min():
    found = largest_alone(np.full(60, 5), 0.05)
    assert (found.number, found.share) == (60, 1)
    assert found.unseen == pytest.approx(0.95**60)
    assert [too_uneven(np.full(c, 5), 0.05, 0.05) for c in (58, 59)] == [True, False]


def test_the_larger_half_alone_may_not_hide_the_margin():
    """Of 74 templates of 2 and 6 items the large ones hold 75 %; none of 37 breaks in (1 - .05 / .75)^37."""
    found = largest_alone(np.tile([2, 6], 37), 0.05)
    assert (found.number, found.share) == (37, 0.75)
    assert found.unseen == pytest.approx((1 - 0.05 / 0.75) ** 37)
    assert too_uneven(np.tile([2, 6], 37), 0.05, 0.05)
    assert not too_uneven(np.tile([2, 6], 44), 0.05, 0.05)


@pytest.mark.parametrize(("broken", "shown"), [(0, True), (1, False), (3, False)])
def test_one_broken_template_in_sixty_may_be_three(broken, shown):
    """One of 60 is -1.7 pp; its share may be 5 % all the same (a share of 1 in 60 or fewer has probability .19)."""
    sums = np.zeros(60)
    sums[:broken] = -5
    assert bool(shows_margin(sums, np.full(60, 5), **FIVE)) is shown


def test_a_loss_spread_over_all_templates_is_no_reason_to_doubt_them():
    """Every fifth template loses one of its five items: -4 pp of no template's making, far from -10."""
    sums = np.where(np.arange(60) % 5 == 0, -1.0, 0.0)
    assert shows_margin(sums, np.full(60, 5), margin=0.1, alpha=0.05)


def test_many_samples_are_decided_as_one_each():
    rng = np.random.default_rng(1)
    sums, counts = rng.normal(0, 1, (200, 72)), rng.integers(2, 6, 72)
    together = shows_margin(sums, counts, **FIVE)
    assert 0 < together.sum() < 200
    assert together.tolist() == [bool(shows_margin(row, counts, **FIVE)) for row in sums]


def test_the_bound_is_where_the_rule_turns():
    sums, counts = np.random.default_rng(2).normal(0, 0.5, 72), np.full(72, 2)
    bound = template_bound([SuiteTotals(1.0, sums, counts)], alpha=0.05)
    assert bound == pytest.approx(-0.04440, abs=1e-4)
    assert shows_margin(sums, counts, margin=-bound + 1e-5, alpha=0.05)
    assert not shows_margin(sums, counts, margin=-bound - 1e-5, alpha=0.05)


def test_order_and_copies_of_the_items_change_nothing():
    rng = np.random.default_rng(3)
    sums, counts = rng.normal(0, 1, 60), rng.integers(2, 6, 60)
    order = rng.permutation(60)
    bound = template_bound([SuiteTotals(1.0, sums, counts)], alpha=0.05)
    assert template_bound([SuiteTotals(1.0, sums[order], counts[order])], alpha=0.05) == pytest.approx(bound, abs=1e-12)
    assert template_bound([SuiteTotals(1.0, 3 * sums, 3 * counts)], alpha=0.05) == pytest.approx(bound, abs=1e-12)


def test_large_templates_do_not_speak_for_small_ones():
    """Ten small templates broke: 10 of 510 items, but 10 of 60 templates."""
    counts = np.array([1] * 10 + [10] * 50)
    sums = np.where(counts == 1, -1.0, 0.0)
    assert shows_margin(sums, np.full(60, 8.5), **FIVE)  # as if all were of one size
    assert not shows_margin(sums, counts, **FIVE)


def test_a_difference_of_suites_adds_their_gaps_as_squares():
    counts = np.full(80, 3)
    one, other = SuiteTotals(1.0, np.zeros(80), counts), SuiteTotals(-1.0, np.zeros(80), counts)
    alone = template_bound([one], alpha=0.05)
    assert template_bound([other], alpha=0.05) == pytest.approx(alone)
    assert template_bound([one, other], alpha=0.05) == pytest.approx(alone * np.sqrt(2))
    assert parts_show_margin([one], **FIVE)
    assert parts_show_margin([one, other], margin=-alone * 1.42, alpha=0.05)
    assert not parts_show_margin([one, other], margin=-alone * 1.41, alpha=0.05)


def test_a_template_with_more_than_half_the_margin_of_the_items_is_too_large():
    counts = np.array([5] * 38 + [5])
    assert too_large(counts, 0.05)  # 1 of 39 is 2.56 %
    assert not too_large(np.full(40, 5), 0.05)
    assert not too_large(counts, 0.06)
