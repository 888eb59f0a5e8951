"""Judge error: exact binomial intervals, kappa, the bias bound and the adjudicated drift."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from kvaudit.reports.stats.adjudication import (
    adjudicated,
    adjudicated_bounds,
    label_weights,
    labelled_pairs,
    round_robin,
)
from kvaudit.reports.stats.judges import clopper_pearson, differential_bias, judge_error, kappa
from kvaudit.reports.stats.rule import shows_margin
from kvaudit.reports.stats.tango import ess_tango, tango_interval


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (7, 7), (1, 100), (37, 50), (0, 1)])
def test_clopper_pearson_is_the_exact_interval_of_scipy(successes, trials):
    wanted = stats.binomtest(successes, trials).proportion_ci(0.9, method="exact")
    found = clopper_pearson(successes, trials, level=0.9)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-10)
    assert found.estimate == successes / trials


def test_no_trials_say_nothing():
    found = clopper_pearson(0, 0)
    assert (found.estimate, found.low, found.high) == (None, 0.0, 1.0)
    assert clopper_pearson(5, 5).low == pytest.approx(0.025**0.2, abs=1e-12)


@pytest.mark.parametrize("table", [[[40, 9], [6, 45]], [[3, 0], [5, 90]], [[10, 2, 1], [3, 20, 4], [0, 5, 30]]])
def test_kappa_equals_statsmodels(table):
    rater = pytest.importorskip("statsmodels.stats.inter_rater")
    pairs = [(i, j) for i, row in enumerate(table) for j, n in enumerate(row) for _ in range(n)]
    first, second = np.array(pairs).T
    wanted = rater.cohens_kappa(np.array(table))
    found = kappa(first, second)
    assert found.estimate == pytest.approx(wanted.kappa, abs=1e-10)
    assert (found.low, found.high) == pytest.approx((wanted.kappa_low, wanted.kappa_upp), abs=1e-10)
    assert found.agreement == pytest.approx(np.trace(table) / np.sum(table), abs=1e-12)


def test_kappa_of_judges_who_always_agree_is_one_without_an_interval():
    found = kappa([0, 1, 1, 0], [0, 1, 1, 0])
    assert (found.estimate, found.low, found.high) == (1, None, None)


@pytest.mark.parametrize("varying", [[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
def test_kappa_with_a_judge_who_never_varies_is_unknown(varying):
    for pair in ((varying, [1, 1, 1, 1]), ([1, 1, 1, 1], varying)):
        found = kappa(*pair)
        assert (found.estimate, found.low, found.high) == (None, None, None)
        assert found.agreement == np.mean(varying)


def judge(hits, misses, rejections, false_alarms):
    said = [1] * hits + [0] * misses + [0] * rejections + [1] * false_alarms
    return judge_error(said, [1] * (hits + misses) + [0] * (rejections + false_alarms))


def test_sensitivity_and_specificity_of_a_known_table():
    error = judge(45, 5, 32, 8)
    assert error.sensitivity == clopper_pearson(45, 50)
    assert error.specificity == clopper_pearson(32, 40)
    assert error.informedness == pytest.approx(0.7, abs=1e-12)
    below = math.hypot(0.9 - error.sensitivity.low, 0.8 - error.specificity.low)
    assert error.informedness_low == pytest.approx(0.7 - below, abs=1e-12)


def test_bias_bound_is_the_gap_weighted_by_the_rate():
    bias = differential_bias(judge(45, 5, 36, 4), judge(45, 5, 32, 8), rate=0.75)
    assert bias.bound == pytest.approx(0.25 * 0.1, abs=1e-12)
    assert bias.specificity_gap.low < -0.1 < bias.specificity_gap.high
    assert bias.upper > bias.bound
    turned = differential_bias(judge(45, 5, 32, 8), judge(45, 5, 36, 4), rate=0.75)
    assert (turned.bound, turned.upper) == pytest.approx((bias.bound, bias.upper), abs=1e-12)
    assert turned.specificity_gap == pytest.approx((-bias.specificity_gap.high, -bias.specificity_gap.low))


def test_bias_limit_by_hand():
    one, two = judge(50, 0, 40, 0), judge(50, 0, 30, 10)
    se, good, bad = clopper_pearson(50, 50), clopper_pearson(40, 40), clopper_pearson(30, 40)
    se_far = math.hypot(1 - se.low, 0)  # difference of 1 and 1: up by nothing, down by one interval
    sp_far = 0.25 + math.hypot(0.75 - bad.low, good.high - 1)
    wanted = 0.4 * 0.25 + math.hypot(0.6 * se_far, 0.4 * (sp_far - 0.25))
    assert differential_bias(one, two, rate=0.6).upper == pytest.approx(wanted, abs=1e-12)


def test_more_labels_lower_the_limit_of_the_bias():
    uppers = [differential_bias(judge(*[n] * 4), judge(*[n] * 4), rate=0.5).upper for n in (10, 100, 1000)]
    assert uppers[0] > 2 * uppers[1] > 4 * uppers[2]


def test_an_arm_without_negatives_leaves_the_bias_open():
    blind, seeing = judge(45, 5, 0, 0), judge(45, 5, 36, 4)
    assert (blind.informedness, blind.informedness_low) == (None, pytest.approx(clopper_pearson(45, 50).low - 1))
    bias = differential_bias(blind, seeing, rate=0.5)
    assert bias.bound is None
    known = clopper_pearson(36, 40)
    assert bias.specificity_gap == pytest.approx((known.low - 1, known.high), abs=1e-12)
    assert bias.upper > 0.45


def example():
    """12 pairs in 6 clusters; the judge differs on four, and the human agrees with it on three of them."""
    discordant = np.zeros(12, dtype=bool)
    discordant[[0, 1, 4, 8]] = True
    human = np.full(12, np.nan)
    human[[0, 1, 4, 8]] = [-1, -1, 1, 0]
    human[[2, 5, 10]] = [0, -1, 0]
    return discordant, human, np.repeat(np.arange(6), 2)


def test_adjudicated_drift_of_a_small_example():
    """Of eight concordant pairs, three are labelled, in templates that hold two, one and two of them."""
    discordant, human, clusters = example()
    found = adjudicated(discordant, human, clusters)
    assert found.estimate == pytest.approx(-1 / 12 + 8 / 12 * -1 / 5, abs=1e-12)
    whole = ess_tango(np.where(discordant, human, 0), clusters)
    left_out = np.array([-1 / 3, 0, -1 / 3])  # the mean without one of the three templates
    variance = 2 / 3 * np.sum((left_out + 1 / 5) ** 2)
    deff = (2**2 + 1 + 2**2) * 3 / 5**2  # of the weights alone
    assert variance / ((3 / 5 - (3 / 5) ** 2 / 3) / 3**2) < deff
    sample = tango_interval(3 / 5 / deff, 0, 3 / deff, float(special.stdtrit(2, 0.95)))
    wanted = found.estimate - math.hypot(-1 / 12 - whole.lower, 8 / 12 * (-1 / 5 - sample.low))
    assert found.lower == pytest.approx(wanted, abs=1e-10)
    wanted = found.estimate + math.hypot(whole.upper + 1 / 12, 8 / 12 * (sample.high + 1 / 5))
    assert found.upper == pytest.approx(wanted, abs=1e-10)
    assert (found.losses, found.gains) == pytest.approx((2 + 8 / 5, 1), abs=1e-12)
    turned = adjudicated(discordant, -human, clusters)
    assert (turned.losses, turned.gains) == pytest.approx((1, 2 + 8 / 5), abs=1e-12)
    assert found.low < found.lower < found.estimate < found.upper < found.high


def test_template_totals_of_a_small_example():
    """Templates that nobody looked at are taken for the others' weighted mean, and counted as unseen."""
    x = labelled_pairs(*example())
    assert list(x.alike) == [0, 2, 1, 2, 1, 2]
    assert list(x.looked) == [0, 1, 1, 0, 0, 1]
    assert x.unseen == 2
    assert x.totals == pytest.approx([-2, 0, 1 - 1, -2 / 5, 0 - 1 / 5, 0], abs=1e-12)
    assert x.totals.sum() / 12 == pytest.approx(adjudicated(*example()).estimate, abs=1e-12)
    everything = np.array([-1, -1, 0, 0, 1, -1, 0, 0, 0, 0, 0, 1.0])
    assert list(labelled_pairs(example()[0], everything, example()[2]).totals) == [-2, 0, 0, 0, 0, 1]


def test_a_sampled_loss_counts_for_all_concordant_pairs_of_its_template():
    discordant, clusters = np.zeros(12, dtype=bool), np.repeat([0, 1, 2], (8, 2, 2))
    human = np.full(12, np.nan)
    human[[0, 8, 10]] = [-1, 0, 0]
    assert list(labelled_pairs(discordant, human, clusters).totals) == [-8, 0, 0]
    assert adjudicated(discordant, human, clusters).estimate == pytest.approx(-8 / 12)


def test_labels_of_one_template_leave_the_others_open():
    discordant, clusters = np.repeat([True, False], [8, 12]), np.tile(np.arange(4), 5)
    human = np.where(discordant, 0.0, np.nan)
    human[8:20:4] = 0
    found = adjudicated(discordant, human, clusters)
    assert labelled_pairs(discordant, human, clusters).unseen == 3
    assert found.estimate == 0
    assert found.lower < -12 / 20
    assert found.upper > 12 / 20


def test_templates_that_fail_unseen_widen_the_interval():
    """Sixty labelled pairs, three lost: in three templates of twenty, or in one."""
    discordant, clusters = np.zeros(100, dtype=bool), np.arange(100) // 5
    human = np.where(np.arange(100) % 5 < 3, 0.0, np.nan)
    spread, together = human.copy(), human.copy()
    spread[[0, 5, 10]] = -1
    together[[0, 1, 2]] = -1
    apart, same = (adjudicated(discordant, z, clusters) for z in (spread, together))
    assert apart.estimate == pytest.approx(-0.05)
    assert same.estimate == pytest.approx(-0.05)
    assert same.lower < apart.lower - 0.02


def test_every_template_gives_one_pair_before_any_gives_two():
    clusters = np.repeat(np.arange(10), np.arange(1, 11))
    alike = np.arange(55) % 4 != 0
    per_template = np.bincount(clusters, weights=alike)
    rng = np.random.default_rng(0)
    first = round_robin(rng, alike, clusters, int(np.count_nonzero(per_template)))
    assert np.bincount(clusters, weights=first).tolist() == [min(1, n) for n in per_template]
    second = round_robin(rng, alike, clusters, int(np.minimum(per_template, 2).sum()))
    assert np.bincount(clusters, weights=second).tolist() == [min(2, n) for n in per_template]
    assert not (second & ~alike).any()
    assert round_robin(rng, alike, clusters, 10**6).tolist() == alike.tolist()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=60), st.integers(0, 70))
def test_drawing_in_turn_is_even_whatever_the_templates_and_order(pairs, size):
    clusters, alike = np.array([c for c, _ in pairs]), np.array([a for _, a in pairs])
    chosen, more = (round_robin(np.random.default_rng(3), alike, clusters, n) for n in (size, size + 1))
    assert chosen.sum() == min(size, alike.sum())
    assert not (chosen & ~more).any(), "a larger sample holds the smaller one"
    drawn, left = (np.bincount(clusters[part], minlength=8) for part in (chosen, alike & ~chosen))
    assert drawn.max(initial=0) <= drawn[left > 0].min(initial=60) + 1


def test_every_pair_of_a_template_is_drawn_as_often():
    alike = np.tile([True, True, False, True], (4000, 1))
    drawn = round_robin(np.random.default_rng(1), alike, [0, 0, 0, 1], 1).mean(axis=0)
    assert drawn == pytest.approx([0.25, 0.25, 0, 0.5], abs=0.03)


def test_many_draws_are_drawn_as_one():
    clusters = np.repeat(np.arange(5), 4)
    alike = np.random.default_rng(0).random((3, 20)) < 0.7
    chosen = round_robin(np.random.default_rng(1), alike, clusters, 7)
    assert [np.bincount(clusters, weights=row).max() for row in chosen] == [2, 2, 2]
    assert chosen.sum(axis=1).tolist() == [7, 7, 7]


def test_a_label_weighs_what_it_stands_for():
    discordant, human, clusters = example()
    weights = label_weights(discordant, human, clusters)
    wanted = np.zeros(12)
    wanted[[0, 1, 4, 8]] = 1
    wanted[[2, 5, 10]] = np.array([2, 1, 2]) * 8 / 5
    assert weights == pytest.approx(wanted, abs=1e-12)
    assert weights.sum() == pytest.approx(12)


def test_weighted_error_rates_are_of_all_pairs_at_the_size_of_a_thinned_sample():
    said, true = [1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0]
    found = judge_error(said, true, [4, 2, 2, 4, 4, 4])
    assert found.sensitivity.estimate == pytest.approx(6 / 8)
    assert (found.sensitivity.successes, found.sensitivity.trials) == (1.5, 2)
    low, high = special.betaincinv(1.5, 1.5, 0.025), special.betaincinv(2.5, 0.5, 0.975)
    assert (found.sensitivity.low, found.sensitivity.high) == pytest.approx((low, high), abs=1e-12)
    assert found.specificity == clopper_pearson(2, 3)
    assert judge_error(said, true, [7] * 6) == judge_error(said, true)


def test_a_fraction_of_a_success_is_more_than_none():
    bounds = [clopper_pearson(successes, 10).low for successes in (0, 0.25, 0.5, 1)]
    assert 0 == bounds[0] < bounds[1] < bounds[2] < bounds[3] == pytest.approx(clopper_pearson(1, 10).low)


def test_everything_discordant_needs_no_sample():
    human = np.tile([-1.0, 1.0, 0.0, 0.0, -1.0], 8)
    clusters = np.arange(40) // 4
    found, plain = adjudicated(np.ones(40, dtype=bool), human, clusters), ess_tango(human, clusters)
    assert (found.estimate, found.low, found.high, found.lower, found.upper) == pytest.approx(
        (plain.estimate, plain.low, plain.high, plain.lower, plain.upper), abs=1e-10
    )
    assert found.pvalue_drop == pytest.approx(plain.pvalue_drop, abs=1e-6)


def test_adjudicated_p_value_is_the_level_of_the_bound_at_zero():
    rng = np.random.default_rng(1)
    discordant = rng.random(300) < 0.2
    human = np.where(discordant, rng.choice([-1.0, -1.0, 0.0, 1.0], 300), np.nan)
    human[np.flatnonzero(~discordant)[:60]] = 0
    clusters = np.arange(300) // 5
    found = adjudicated(discordant, human, clusters)
    at = adjudicated(discordant, human, clusters, alpha=found.pvalue_drop)
    assert found.estimate < 0
    assert at.upper == pytest.approx(0, abs=1e-8)
    turned = adjudicated(discordant, -human, clusters)
    assert turned.pvalue_drop == pytest.approx(1 - found.pvalue_drop, abs=1e-9)
    assert turned.pvalue == pytest.approx(found.pvalue, abs=1e-9)
    assert (turned.lower, turned.upper) == pytest.approx((-found.upper, -found.lower), abs=1e-9)


def test_labels_that_cancel_say_nothing_either_way():
    found = adjudicated([True, True] + [False] * 10, [-1, 1, 0, 0] + [np.nan] * 8, np.arange(12) // 2)
    assert (found.estimate, found.pvalue_drop, found.pvalue) == (0, 0.5, 1)
    assert found.low < 0 < found.high


def test_an_unlabelled_discordant_pair_is_refused():
    discordant, human, clusters = example()
    human[0] = np.nan
    with pytest.raises(AssertionError, match="every discordant pair"):
        adjudicated(discordant, human, clusters)
    with pytest.raises(AssertionError, match="random sample of the concordant"):
        adjudicated(discordant, np.where(discordant, 0.0, np.nan), clusters)


def test_adjudication_of_many_studies_equals_one_at_a_time():
    rng, sizes = np.random.default_rng(2), np.arange(40) % 5 + 3
    clusters = np.repeat(np.arange(40), sizes)
    apart = rng.random((6, sizes.sum())) < 0.1
    human = np.where(
        apart | round_robin(rng, ~apart, clusters, 60), rng.choice([-1.0, 0, 0, 0, 1], apart.shape), np.nan
    )
    many = labelled_pairs(apart, human, clusters)
    found = adjudicated_bounds(many, confidence=0.95)
    alone = [adjudicated(*study, clusters) for study in zip(apart, human, strict=True)]
    assert found.low.shape == (6,)
    assert found.estimate == pytest.approx([one.estimate for one in alone], abs=1e-12)
    assert found.low == pytest.approx([one.lower for one in alone], abs=1e-10)
    assert found.high == pytest.approx([one.upper for one in alone], abs=1e-10)
    assert many.totals.sum(axis=-1) / sizes.sum() == pytest.approx(found.estimate, abs=1e-12)


def test_adjudication_covers_and_seldom_passes_where_the_raw_judge_is_biased():
    rng, studies, clusters, size, sample = np.random.default_rng(3), 2000, 40, 10, 100
    items = clusters * size
    lost, won = 0.075, 0.025  # a drift of -5 pp at a discordance of 10 %
    change = rng.choice([-1, 0, 1], p=[lost, 1 - lost - won, won], size=(studies, items))
    reference = np.where(change, change < 0, rng.random((studies, items)) < 0.85)
    candidate = np.where(change, change > 0, reference)
    raw = np.zeros((studies, items))
    for arm, sign, specificity in ((reference, -1, 0.9), (candidate, 1, 0.8)):
        draw = rng.random((studies, items))
        raw += sign * np.where(arm, draw < 0.97, draw >= specificity)
    templates, apart = np.repeat(np.arange(clusters), size), raw != 0
    seen = apart | round_robin(rng, ~apart, templates, sample)
    labelled = labelled_pairs(apart, np.where(seen, candidate.astype(float) - reference, np.nan), templates)
    one, two = (adjudicated_bounds(labelled, confidence=c) for c in (0.95, 0.975))
    assert raw.mean() + 0.05 > 0.01, "the judge alone hides part of the drop"
    assert one.estimate.mean() == pytest.approx(-0.05, abs=0.002)
    assert np.mean(one.low > -0.05) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)
    assert np.mean((two.low <= -0.05) & (two.high >= -0.05)) >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.parametrize("each", [1, 2])
def test_a_judge_blind_to_whole_templates_seldom_passes_a_loss_of_the_margin(each):
    """One template in twenty lost everything and looks unchanged to the judge, who sees the others as they are."""
    rng, studies, clusters, size = np.random.default_rng(4), 2000, 72, 5
    templates = np.repeat(np.arange(clusters), size)
    lost = np.repeat(rng.random((studies, clusters)) < 0.05, size, axis=1)
    change = rng.choice([-1.0, 0, 1], p=[0.01, 0.98, 0.01], size=lost.shape)
    apart, human = (change != 0) & ~lost, np.where(lost, -1.0, change)
    seen = apart | round_robin(rng, ~apart, templates, each * clusters)
    x = labelled_pairs(apart, np.where(seen, human, np.nan), templates)
    assert not x.unseen.any()
    passed = shows_margin(x.totals, x.pairs, margin=0.05, alpha=0.05)
    assert np.mean(passed) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)
    two = adjudicated_bounds(x, confidence=0.975)
    assert np.mean((two.low <= -0.05) & (two.high >= -0.05)) >= 0.93
