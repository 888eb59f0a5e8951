"""Judge error: exact binomial intervals, kappa, the bias bound and the adjudicated drift."""

import math

import numpy as np
import pytest
from scipy import special, stats

from reports.stats.binomial import clopper_pearson, clopper_pearson_bounds
from reports.stats.clustered import cr3_variance, many_totals
from reports.stats.judges import Labelled, adjudicated, adjudicated_bounds, differential_bias, judge_error, kappa
from reports.stats.tango import design_effects, ess_tango, tango_interval


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (7, 7), (1, 100), (37, 50), (0, 1)])
def test_clopper_pearson_is_the_exact_interval_of_scipy(successes, trials):
    wanted = stats.binomtest(successes, trials).proportion_ci(0.9, method="exact")
    found = clopper_pearson(successes, trials, level=0.9)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-10)
    assert found.estimate == successes / trials


def test_no_trials_say_nothing():
    found = clopper_pearson(0, 0)
    assert (found.estimate, found.low, found.high) == (None, 0.0, 1.0)


def test_many_exact_intervals_at_once():
    low, high = clopper_pearson_bounds(np.arange(6).reshape(2, 3), 5)
    assert low[1, 2] == pytest.approx(0.025**0.2, abs=1e-12)
    assert high[0, 0] == pytest.approx(1 - 0.025**0.2, abs=1e-12)
    assert (low[0, 0], high[1, 2]) == (0, 1)


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
    discordant, human, clusters = example()
    found = adjudicated(discordant, human, clusters)
    assert found.estimate == pytest.approx(-1 / 12 + 8 / 12 * -1 / 3, abs=1e-12)
    whole = ess_tango(np.where(discordant, human, 0), clusters)
    sample = tango_interval(1, 0, 3, float(special.ndtri(0.95)))
    wanted = found.estimate - math.hypot(-1 / 12 - whole.lower, 8 / 12 * (-1 / 3 - sample.low))
    assert found.lower == pytest.approx(wanted, abs=1e-10)
    wanted = found.estimate + math.hypot(whole.upper + 1 / 12, 8 / 12 * (sample.high + 1 / 3))
    assert found.upper == pytest.approx(wanted, abs=1e-10)
    assert (found.losses, found.gains) == pytest.approx((2 + 8 / 3, 1), abs=1e-12)
    turned = adjudicated(discordant, -human, clusters)
    assert (turned.losses, turned.gains) == pytest.approx((1, 2 + 8 / 3), abs=1e-12)
    assert found.low < found.lower < found.estimate < found.upper < found.high


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
    rng = np.random.default_rng(2)
    losses, gains, lost = rng.integers(0, 12, (3, 4, 5)).astype(float)
    labelled = Labelled(
        losses,
        gains,
        np.float64(200),
        1 + rng.random((4, 5)),
        lost,
        np.zeros((4, 5)),
        np.full((4, 5), 50.0),
        1 - (losses + gains + 5) / 200,
    )
    found = adjudicated_bounds(labelled, df=39, confidence=0.95)
    alone = adjudicated_bounds(Labelled(*(np.broadcast_to(x, (4, 5))[2, 3] for x in labelled)), df=39, confidence=0.95)
    assert found.low.shape == (4, 5)
    assert (found.estimate[2, 3], found.low[2, 3], found.high[2, 3]) == pytest.approx(
        (float(alone.estimate), float(alone.low), float(alone.high)), abs=1e-10
    )


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
    human = candidate.astype(float) - reference
    apart = raw != 0
    picked = np.argsort(np.where(apart, 2.0, rng.random((studies, items))), axis=1)[:, :sample]
    seen = np.take_along_axis(human, picked, axis=1)
    t = many_totals(np.where(apart, human, 0.0), np.full(clusters, size))
    deff = design_effects(t, cr3_variance(t.residuals, t.counts), floor=1.0)
    labelled = Labelled(
        t.losses,
        t.gains,
        np.float64(items),
        deff,
        (seen < 0).sum(axis=1),
        (seen > 0).sum(axis=1),
        np.float64(sample),
        1 - apart.mean(axis=1),
    )
    one, two = (adjudicated_bounds(labelled, df=clusters - 1, confidence=c) for c in (0.95, 0.975))
    assert raw.mean() + 0.05 > 0.01, "the judge alone hides part of the drop"
    assert one.estimate.mean() == pytest.approx(-0.05, abs=0.002)
    assert np.mean(one.low > -0.05) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)
    assert np.mean((two.low <= -0.05) & (two.high >= -0.05)) >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)
