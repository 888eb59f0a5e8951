"""Statistics against outside oracles and literal numbers."""

import math

import numpy as np
import pytest
from scipy import stats

from kvaudit.reports.stats.clustered import cr3, cr3_effect, totals
from kvaudit.reports.stats.rule import blind_spot, clusters_required
from kvaudit.reports.stats.seeds import recipe_effect
from kvaudit.reports.stats.signflip import holm
from kvaudit.reports.stats.tango import design_effect, ess_tango, tango_interval, tango_z


def uneven(seed: int, clusters: int = 17) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, clusters)
    labels = np.repeat(np.arange(clusters), sizes)
    z = rng.choice([-1.0, 0.0, 1.0], size=len(labels), p=[0.2, 0.7, 0.1])
    return z, labels


@pytest.mark.parametrize("seed", range(2))
def test_cr3_equals_statsmodels(seed):
    sm = pytest.importorskip("statsmodels.api")
    z, labels = uneven(seed)
    z = z + np.random.default_rng(seed).normal(0, 0.1, len(z))
    t = totals(z, labels)
    model = sm.OLS(z, np.ones(len(z)))
    three = model.fit(cov_type="cluster-crv3", cov_kwds={"groups": labels}, use_t=True)
    assert cr3(t) == pytest.approx(float(three.cov_params()[0, 0]), abs=1e-10, rel=1e-10)
    effect = cr3_effect(z, labels)
    low, high = three.conf_int()[0]
    assert (effect.low, effect.high) == pytest.approx((low, high), abs=1e-10)
    assert effect.pvalue == pytest.approx(float(three.pvalues[0]), abs=1e-10)


def test_tango_gives_the_published_interval():
    low, high = tango_interval(2, 12, 50, 1.959963984540054)
    assert (round(low, 4), round(high, 4)) == (0.0611, 0.3447)


@pytest.mark.parametrize(("losses", "gains"), [(2, 12), (9, 1), (3, 3), (0, 7), (5, 0)])
def test_score_at_zero_is_mcnemar(losses, gains):
    assert tango_z(losses, gains, 50, 0.0) == pytest.approx((gains - losses) / math.sqrt(gains + losses), abs=1e-10)


def test_one_item_per_cluster_with_deff_one_is_plain_tango_at_a_t_quantile():
    z = np.array([-1.0] * 2 + [1.0] * 12 + [0.0] * 36)
    effect = ess_tango(z, np.arange(50))
    assert effect.deff >= 1
    wanted = tango_interval(*(count / effect.deff for count in (2, 12, 50)), float(stats.t.ppf(0.975, 49)))
    assert (effect.low, effect.high) == pytest.approx(wanted, abs=1e-10)
    assert (effect.losses, effect.gains, effect.n_items, effect.n_clusters) == (2, 12, 50, 50)


def test_no_discordance_still_has_width():
    effect = ess_tango(np.zeros(60), np.repeat(np.arange(20), 3))
    assert effect.deff == pytest.approx(1 + (3 - 1) * 0.1)
    assert -0.2 < effect.low < effect.lower < 0 < effect.upper < effect.high < 0.2
    # with b = c = 0 the score equation is n d/(1-d) = t^2
    n, t = 60 / 1.2, float(stats.t.ppf(0.975, 19))
    assert effect.high == pytest.approx(t * t / n / (1 + t * t / n), abs=1e-10)


def test_a_scaled_contrast_is_the_unit_one_stretched():
    z, labels = uneven(4)
    one, two = ess_tango(z, labels), ess_tango(2 * z, labels, scale=2.0)
    assert two.deff == one.deff
    assert (two.estimate, two.low, two.high) == pytest.approx((2 * one.estimate, 2 * one.low, 2 * one.high), abs=1e-12)


def test_every_item_lost_stays_on_the_scale():
    effect = ess_tango(-np.ones(40), np.repeat(np.arange(20), 2))
    assert effect.estimate == effect.low == -1
    assert -1 < effect.high < -0.7


def test_deff_floor_is_one_for_one_sample_and_one_over_k_for_averages():
    labels = np.repeat(np.arange(30), 4)
    alternating = np.tile([1.0, -1.0, 0.0, 0.0], 30)  # no variance between clusters at all
    assert ess_tango(alternating, labels).deff == 1.0
    assert ess_tango(alternating / 2, labels, samples=2).deff == 0.5


def test_clustered_losses_widen_the_interval():
    labels = np.repeat(np.arange(40), 5)
    spread, packed = np.zeros(200), np.zeros(200)
    spread[::10] = -1
    packed[:20] = -1
    assert ess_tango(packed, labels).deff > 3
    assert ess_tango(packed, labels).low < ess_tango(spread, labels).low - 0.03


def test_design_effect_of_a_hand_computed_case():
    z, labels = np.array([-1.0, -1, 0, 0, 0, 0]), np.array([0, 0, 1, 1, 2, 2])
    t = totals(z, labels)  # mean -1/3, residuals -4/3, 2/3, 2/3, N - n_c = 4
    variance = 2 / 3 * ((4 / 12) ** 2 + 2 * (2 / 12) ** 2)
    binomial = (2 - 4 / 6) / 36
    assert design_effect(t, floor=1.0) == pytest.approx(variance / binomial, abs=1e-12)


@pytest.mark.parametrize(("margin", "clusters"), [(0.10, 29), (0.05, 59), (0.03, 99), (0.02, 149), (0.01, 299)])
def test_clusters_required(margin, clusters):
    assert clusters_required(margin, 0.05) == clusters
    assert blind_spot(clusters, 0.05) <= margin < blind_spot(clusters - 1, 0.05)


def test_holm_of_a_known_family():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([]) == ()


def test_recipe_effect_adds_seed_variance():
    labels = np.repeat(np.arange(20), 3)
    base = np.tile([-1.0, 0, 0, 1.0, 0, 0], 10)
    same = recipe_effect(np.stack([base] * 3), labels)
    assert same.low == pytest.approx(cr3_effect(base, labels).low, abs=1e-10)
    shifted = recipe_effect(np.stack([base - 0.1, base, base + 0.1]), labels)
    seed = 0.01 / 3
    item = cr3(totals(base, labels))
    df = (item + seed) ** 2 / (item**2 / 19 + seed**2 / 2)
    half = float(stats.t.ppf(0.975, df)) * math.sqrt(item + seed)
    assert shifted.high - shifted.estimate == pytest.approx(half, abs=1e-10)


def test_two_seeds_refuse_a_recipe_claim():
    with pytest.raises(AssertionError, match="needs 3 seeds"):
        recipe_effect(np.zeros((2, 10)), np.arange(10))
