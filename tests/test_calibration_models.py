"""What the simulations draw from is what they say: rates, discordance and cluster correlation, exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from bench.calibration.checks.judges import SimulatedJudge
from bench.calibration.family import Family, Seeded
from bench.calibration.probit import Probit, both_below, correlation_for
from bench.calibration.streams import blocks, cluster_sizes, generator


@pytest.mark.parametrize(
    ("h", "k", "r"), [(1, 0.8, 0.9), (1.03, 0.84, 0.99), (0, 0, 0.5), (1, 1, 0.9999), (-0.3, 1.2, 0)]
)
def test_bivariate_normal_is_scipys(h, k, r):
    wanted = stats.multivariate_normal.cdf([h, k], cov=[[1, r], [r, 1]])
    assert both_below(h, k, r) == pytest.approx(wanted, abs=1e-10)


def test_orthant_probability_is_the_arcsine():
    assert both_below(0, 0, 0.6) == pytest.approx(0.25 + math.asin(0.6) / (2 * math.pi), abs=1e-14)
    assert correlation_for(0, 0, 0.25 + math.asin(0.6) / (2 * math.pi)) == pytest.approx(0.6, abs=1e-9)


@pytest.mark.parametrize(
    "model",
    [
        Probit(0.0, 0.02, 0.5),
        Probit(-0.05, 0.06, 0.0),
        Probit(-0.05, 0.1, 0.25, samples=4),
        Probit(-0.08, 0.2, 0.5, samples=8),
        Probit(-0.03, 0.1, 0.5, reference=0.6),
    ],
    ids=str,
)
def test_probit_has_its_rates_discordance_and_cluster_correlation(model):
    rng, size, clusters, simulations = np.random.default_rng(11), 6, 50, 4000
    counts = np.full(clusters, size)
    reference, candidate = model.answers(rng, simulations, counts)
    z = (candidate - reference).reshape(simulations, clusters, size).astype(np.float64)

    def mean_and_error(per_simulation):
        return per_simulation.mean(), 4 * per_simulation.std() / math.sqrt(simulations)

    for answers, rate in ((reference, model.reference), (candidate, model.reference + model.drift)):
        found, error = mean_and_error(answers.mean(axis=1, dtype=np.float64))
        assert found == pytest.approx(rate, abs=error)
        assert error < 0.004
    pairs = 1 - reference * candidate - (1 - reference) * (1 - candidate)
    if model.samples == 1:
        found, error = mean_and_error(pairs.mean(axis=1, dtype=np.float64))
        assert found == pytest.approx(model.discordance, abs=error)
    centred = z - model.drift
    products = centred.sum(axis=2) ** 2 - (centred**2).sum(axis=2)  # of two different items of a cluster
    between, error = mean_and_error(products.mean(axis=1) / (size * (size - 1)))
    variance = (centred**2).mean()
    assert between / variance == pytest.approx(model.icc, abs=error / variance)
    assert sum(model.shares) == pytest.approx(1, abs=1e-12)


def test_discordance_of_single_draws_is_exact_whatever_the_samples():
    """Two draws agree as often as two normals of the shared correlation fall on one side of their cuts."""
    for samples in (1, 8):
        model = Probit(-0.05, 0.1, 0.25, samples)
        both = both_below(*model.cuts, model.shares.cluster + model.shares.item)
        assert 0.85 + 0.80 - 2 * both == pytest.approx(0.1, abs=1e-9)


def test_more_draws_raise_the_cluster_correlation_into_the_range_that_was_asked_for():
    one, eight = (Probit(0.0, 0.2, 0.5, samples).icc for samples in (1, 8))
    assert (one, eight) == (pytest.approx(0.21, abs=0.01), pytest.approx(0.37, abs=0.02))
    assert Probit(0.0, 0.2, 0.0).icc == pytest.approx(0, abs=1e-12)


def test_a_discordance_out_of_reach_is_refused():
    with pytest.raises(AssertionError):
        _ = Probit(-0.08, 0.06).shares


def test_family_cells_have_their_drifts_and_seeds_average_to_none():
    counts = np.full(40, 5)
    z = Family((0.0, -0.05), 0.1, 0.25).draw(np.random.default_rng(1), 3000, counts)
    assert z.mean(axis=(0, 2)) == pytest.approx([0.0, -0.05], abs=0.002)
    assert np.abs(z[:, 0]).mean() == pytest.approx(0.1, abs=0.002)
    assert np.corrcoef(z[:, 0].mean(axis=1), z[:, 1].mean(axis=1))[0, 1] > 0.3  # one reference for all
    runs = Seeded(5, 0.04, 0.1, 0.25).draw(np.random.default_rng(2), 3000, counts).mean(axis=2)
    assert runs.mean() == pytest.approx(0, abs=0.003)
    still = Seeded(5, 0.0, 0.1, 0.25).draw(np.random.default_rng(2), 3000, counts).mean(axis=2)
    scatter = runs.var(axis=1, ddof=1).mean() - still.var(axis=1, ddof=1).mean()
    assert math.sqrt(scatter) == pytest.approx(0.04, abs=0.004)


def test_a_judge_errs_as_often_as_it_says():
    desired = np.repeat(np.float32([1, 0]), 50_000)
    said = SimulatedJudge(0.95, 0.8).labels(np.random.default_rng(0), desired)
    assert (said[:50_000].mean(), said[50_000:].mean()) == pytest.approx((0.95, 0.2), abs=0.008)


def test_cluster_sizes_are_uniform_on_half_to_three_halves():
    sizes = cluster_sizes(np.random.default_rng(0), 50_000, 5)
    assert sorted(set(sizes.tolist())) == [3, 4, 5, 6, 7]
    assert sizes.mean() == pytest.approx(5, abs=0.03)


def test_a_stream_depends_on_seed_name_and_block_alone():
    def first(*key):
        return generator(*key).random()

    values = {first(1, "a", 0), first(1, "a", 1), first(1, "b", 0), first(2, "a", 0)}
    assert len(values) == 4
    assert first(1, "a", 0) in values
    drawn = [(b.size, b.counts.sum()) for b in blocks("x", seed=1, simulations=1200, clusters=4, items=6, sizes="even")]
    assert drawn == [(500, 24), (500, 24), (200, 24)]
