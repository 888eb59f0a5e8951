"""The ratio of paired rates: numbers from elsewhere, zero counts, mirrored arms, and its rate of false passes."""

import math

import numpy as np
import pytest
from scipy import optimize, stats
from statsmodels.stats.proportion import _confint_riskratio_paired_nam

from kvaudit.reports.stats.ratio import (
    events_of,
    is_below,
    points_of,
    shows_ratio,
    tang_scores,
    times_of,
    widest,
)


def table(both, after, before, n):
    """The score of one 2 x 2 table at a ratio."""
    counts = [np.array(float(count)) for count in (both, before, after)]
    return lambda theta: float(tang_scores(*counts, float(n), theta))


def ends(both, after, before, n):
    quantile = stats.norm.ppf(0.975)
    score = table(both, after, before, n)
    return tuple(optimize.brentq(lambda t, q=q: score(t) - q, 1e-4, 1e3) for q in (quantile, -quantile))


@pytest.mark.parametrize("cells", [(1, 1, 7, 12), (59, 6, 16, 80), (40, 10, 25, 60), (43, 0, 1, 8), (3, 9, 2, 200)])
def test_one_item_per_template_is_the_score_interval_of_statsmodels(cells):
    """statsmodels solves Nam's polynomial of fourth degree (2009) for the same interval."""
    both, after, before, _ = cells
    oracle = _confint_riskratio_paired_nam(list(cells)).confint
    assert ends(both, after, before, sum(cells)) == pytest.approx(tuple(oracle), rel=1e-8)


def test_a_published_example():
    """Bentur et al. 2009 in Fagerland, Lydersen & Laake 2014, Statistics in Medicine 33:2850: Tang's .065 to .907."""
    assert ends(1, 1, 7, 21) == pytest.approx((0.065, 0.907), abs=5e-4)


def test_at_a_ratio_of_one_it_is_mcnemar():
    assert table(40, 9, 20, 300)(1.0) == pytest.approx((9 - 20) / math.sqrt(29), rel=1e-12)


def drawn(seed, clusters=60, items=5, rate=0.3, churn=0.1):
    rng = np.random.default_rng(seed)
    reference = (rng.random(clusters * items) < rate).astype(float)
    candidate = np.where(rng.random(len(reference)) < churn, 1 - reference, reference)
    return reference, candidate, np.full(clusters, items)


def test_the_interval_is_where_the_score_meets_the_quantile():
    reference, candidate, counts = drawn(0)
    e = events_of(reference, candidate, counts)
    found = times_of(e, alpha=0.05)
    assert found.low < found.lower < found.estimate < found.upper < found.high
    assert [bool(is_below(e, factor * found.upper, alpha=0.05)) for factor in (0.999, 1.001)] == [False, True]
    assert found.estimate == pytest.approx(candidate.sum() / reference.sum())


def test_exchanged_sides_turn_the_ratio_over():
    reference, candidate, counts = drawn(1)
    one = times_of(events_of(reference, candidate, counts), alpha=0.05)
    two = times_of(events_of(candidate, reference, counts), alpha=0.05)
    assert (one.low, one.estimate, one.high) == pytest.approx((1 / two.high, 1 / two.estimate, 1 / two.low), rel=1e-9)


def test_clusters_that_move_together_widen_it():
    reference, candidate, counts = drawn(2, clusters=60, items=1)
    alone = times_of(events_of(reference, candidate, counts), alpha=0.05)
    copied = times_of(events_of(np.repeat(reference, 5), np.repeat(candidate, 5), 5 * counts), alpha=0.05)
    assert copied.low == pytest.approx(alone.low, rel=0.02)
    assert copied.high == pytest.approx(alone.high, rel=0.02)


def test_zero_counts_leave_an_interval():
    some, _, counts = drawn(3)
    none = np.zeros_like(some)
    nothing = times_of(events_of(none, none, counts), alpha=0.05)
    assert (nothing.estimate, nothing.low, nothing.high) == (None, 0.0, math.inf)
    new = times_of(events_of(none, some, counts), alpha=0.05)
    assert new.estimate is None
    assert 1 < new.low < math.inf == new.high
    gone = times_of(events_of(some, none, counts), alpha=0.05)
    assert (gone.estimate, gone.low) == (0.0, 0.0)
    assert 0 < gone.high < 1
    same = times_of(events_of(some, some, counts), alpha=0.05)
    assert same.low < 1 == same.estimate < same.high
    few = np.zeros_like(some)
    few[0] = 1
    assert not is_below(events_of(few, none, counts), 1.1, alpha=0.05)  # one event is no ground for a tenth


def test_readings_are_as_wide_as_all_of_them():
    reference, candidate, counts = drawn(4)
    one, two = (times_of(events_of(reference, side, counts), alpha=0.05) for side in (candidate, reference))
    found = widest([one, two])
    assert (found.estimate, found.low, found.high) == (one.estimate, min(one.low, two.low), max(one.high, two.high))


def test_what_a_limit_allows_is_never_more_than_all():
    assert points_of(1.1, 0.3) == pytest.approx(0.03)
    assert points_of(1.1, 0.95) == pytest.approx(0.05)
    assert points_of(3, 0.0) == 0


def test_templates_that_were_not_seen_count():
    """60 templates in half of which it happens, nothing different: a tenth more needs few of them broken unseen."""
    half = np.repeat([5.0, 0.0], 30)
    counts = np.full(60, 5)
    assert shows_ratio(half, half, counts, limit=1.25, alpha=0.05)
    assert not shows_ratio(half, half, counts, limit=1.03, alpha=0.05)
    broken = half + np.where(np.arange(60) >= 57, 5.0, 0.0)  # a tenth more, by three templates
    assert not shows_ratio(half, broken, counts, limit=1.1, alpha=0.05)


@pytest.mark.parametrize(("rate", "limit"), [(0.5, 1.1), (0.3, 1.25), (0.1, 1.8)])
def test_at_the_limit_it_is_rarely_below_it(rate, limit):
    rng = np.random.default_rng(5)
    level = np.repeat(rng.beta(2 * rate, 2 * (1 - rate), (1500, 80)), 4, axis=1)
    reference = (rng.random(level.shape) < level).astype(float)
    new = (limit - 1 + 0.05) * rate / (1 - rate)
    moved = rng.random(level.shape)
    candidate = np.where(reference == 1, moved >= 0.05, moved < new).astype(float)
    e = events_of(reference, candidate, np.full(80, 4))
    assert np.mean(is_below(e, limit, alpha=0.05)) < 0.07
