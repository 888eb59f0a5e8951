"""The gate interval keeps its error rates in simulation, under both ways templates can go wrong."""

import math

import numpy as np
from scipy import stats

from kvaudit.reports.stats.seeds import many_recipe_effects
from kvaudit.reports.stats.tango import many_ess_tango

SIMULATIONS = 6000


def three_errors(rate: float, simulations: int = SIMULATIONS) -> float:
    return 3 * math.sqrt(rate * (1 - rate) / simulations)


def probit_difference(rng, clusters, items, drift, own_cluster_share):
    """Reference at .85, candidate at .85 + drift, exactly; the arms share most of a latent difficulty."""

    def latent(share):
        cluster = np.repeat(rng.normal(size=clusters), items)
        return math.sqrt(share) * cluster + math.sqrt(1 - share) * rng.normal(size=clusters * items)

    shared = latent(0.3)
    arms = []
    for rate in (0.85, 0.85 + drift):
        value = math.sqrt(0.9) * shared + math.sqrt(0.1) * latent(own_cluster_share)
        arms.append(value < stats.norm.ppf(rate))
    return arms[1].astype(float) - arms[0]


def broken_templates(rng, clusters, items, share):
    """A share of templates loses every item; the others lose and gain one in a hundred at random."""
    z = rng.choice([-1.0, 0.0, 1.0], p=[0.01, 0.98, 0.01], size=(clusters, items))
    z[rng.random(clusters) < share] = -1.0
    return z.ravel()


def effects(draw, clusters, items):
    z = np.stack([draw() for _ in range(SIMULATIONS)])
    return many_ess_tango(z, np.full(clusters, items), alpha=0.05)


def test_false_pass_at_the_margin_is_near_nominal():
    rng = np.random.default_rng(11)
    found = effects(lambda: probit_difference(rng, 60, 5, -0.05, 0.3), 60, 5)
    false_pass = np.mean(found.lower > -0.05)
    assert false_pass <= 0.066 + three_errors(0.066)
    assert false_pass >= 0.02, "so conservative that it could never pass anything"
    covered = np.mean((found.low <= -0.05) & (found.high >= -0.05))
    assert covered >= 0.943 - three_errors(0.943)


def test_type_one_error_and_power_without_drift():
    rng = np.random.default_rng(12)
    found = effects(lambda: probit_difference(rng, 60, 5, 0.0, 0.3), 60, 5)
    assert np.mean(found.pvalue < 0.05) <= 0.0565 + three_errors(0.0565)
    assert np.mean(found.lower > -0.05) >= 0.5


def test_broken_templates_pass_rarely_with_enough_clusters():
    rng = np.random.default_rng(13)
    found = effects(lambda: broken_templates(rng, 60, 5, 0.05), 60, 5)
    assert np.mean(found.lower > -0.05) <= 0.076 + three_errors(0.076)


def test_recipe_interval_holds_with_three_seeds():
    rng = np.random.default_rng(14)
    item = np.repeat(rng.normal(0, 0.1, (SIMULATIONS, 1, 30)), 5, axis=-1) + rng.normal(0, 0.3, (SIMULATIONS, 1, 150))
    z = item + rng.normal(0, 0.1, (SIMULATIONS, 3, 150)) + rng.normal(0, 0.02, (SIMULATIONS, 3, 1))
    found = many_recipe_effects(z, np.full(30, 5), alpha=0.05)
    assert np.mean(found.pvalue < 0.05) <= 0.06 + three_errors(0.06)
