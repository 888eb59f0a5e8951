"""Training seeds: how far they lie apart, what a recipe may claim, and the worst of them."""

from dataclasses import replace

import numpy as np
import pytest
from reports_synthetic import Design, policy, tables_of, with_values
from test_reports_drift import data_of, scored, spec_of

from kvaudit.core.spec import RunSpec
from kvaudit.reports.page.answers import answers
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.page.tables import gate_table
from kvaudit.reports.run import decide_run
from kvaudit.reports.stats.clustered import cr3, totals
from kvaudit.reports.stats.seeds import recipe_effect, recipe_variance, seed_noise, seed_spread
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import Status


def runs(rng, seeds, deviation, clusters=72, items=2):
    """Differences [S, N] of runs that each flip a sixth of the answers by chance, around drifts of their own."""
    losing = np.clip(1 / 12 - rng.normal(0, deviation, (seeds, 1)) / 2, 0, 1)
    value = rng.random((seeds, clusters * items))
    return np.where(value < losing, -1.0, np.where(value > 1 - (1 / 6 - losing), 1.0, 0.0))


def printed(deviation, seeds, simulations=400):
    rng = np.random.default_rng(11)
    found = [runs(rng, seeds, deviation) for _ in range(simulations)]
    spreads = [seed_spread(z.mean(axis=1), float(seed_noise(z, np.full(72, 2)))) for z in found]
    return np.array([z.mean(axis=1).std(ddof=1) for z in found]), np.array([s.sd for s in spreads])


def test_where_no_seed_differs_the_printed_spread_is_about_nothing():
    raw, sd = printed(0.0, seeds=3)
    assert raw.mean() > 0.028  # which was printed as if the runs differed
    assert np.median(sd) == 0
    assert sd.mean() < 0.012


def test_a_spread_that_is_there_is_printed_without_that_of_the_items():
    raw, sd = printed(0.06, seeds=5)
    assert np.mean(raw**2) ** 0.5 > 0.066
    assert np.mean(sd**2) ** 0.5 == pytest.approx(0.06, abs=0.003)


def test_the_part_of_the_items_is_the_mean_square_of_a_two_way_table():
    z = runs(np.random.default_rng(1), 4, 0.05, clusters=30, items=1)
    left = z - z.mean(axis=0) - z.mean(axis=1, keepdims=True) + z.mean()
    assert seed_noise(z, np.ones(30)) == pytest.approx(np.sum(left**2) / (3 * 29) / 30)


def test_a_template_that_flips_whole_in_one_seed_is_one_event():
    z = runs(np.random.default_rng(2), 3, 0.05, clusters=40, items=1)
    assert seed_noise(np.repeat(z, 4, axis=1), np.full(40, 4)) == pytest.approx(seed_noise(z, np.ones(40)))


@pytest.mark.parametrize(
    ("estimates", "noise", "wanted"),
    [
        ((0.0, 0.01, 0.02), 0.0, (0.0052066, 0.01, 0.0628473)),  # chi-square with 2: sqrt(2/7.3778), sqrt(2/0.050636)
        ((0.0, 0.01, 0.02), 0.00005, (0.0, 0.0070711, 0.0624483)),  # each squared, less .00005
        ((0.0, 0.01, 0.02), 0.0002, (0.0, 0.0, 0.0612354)),
    ],
)
def test_spread_over_seeds_has_the_chi_square_interval_less_the_items(estimates, noise, wanted):
    assert tuple(seed_spread(estimates, noise)) == pytest.approx(wanted, rel=1e-5)


def test_two_seeds_have_no_spread():
    assert seed_spread((0.1, 0.2), 0.0) is None


def test_what_items_do_to_a_seed_is_counted_once_in_a_recipe():
    z = runs(np.random.default_rng(4), 3, 0.0)
    item = cr3(totals(z.mean(axis=0), np.arange(144) // 2))
    seed, noise = np.var(z.mean(axis=1), ddof=1) / 3, float(seed_noise(z, np.full(72, 2))) / 3
    assert seed < noise  # no more than chance
    found = recipe_effect(z, np.arange(144) // 2)
    assert found.deff == 1
    assert found.df == pytest.approx(item**2 / (item**2 / 71 + seed**2 / 2 + noise**2 / 142))


# --- seeds that are one training run --------------------------------------------------------------------------------


def decided_with_weights(**weights):
    """A run of three seeds in which naive loses nothing, with these weights of an arm's seeds."""
    design = Design(
        arms=("dense", "naive"), seeds=(1, 2, 3), policies=("none",), suites=("refusal",), clusters=72, items=144
    )
    rows = [
        replace(row, checkpoint=weights.get(row.arm, {}).get(row.train_seed, row.checkpoint))
        for row in scored(design, lambda _arm, _seed, _p, _i: True)
    ]
    return decide_run(data_of(rows, spec_of(design)))


def answer_about_training(found):
    return next(answer.line for answer in answers(found) if answer.question == "training")


def test_three_training_runs_support_a_claim_about_the_recipe():
    found = decided_with_weights()
    assert found.verdict.recipe is Status.PASS
    assert not [line for line in remarks(found) if line.startswith("EQUAL")]
    assert "no claim about the recipe" not in answer_about_training(found)


@pytest.mark.parametrize("weights", [{1: "a" * 64, 2: "a" * 64}, dict.fromkeys((1, 2, 3), "a" * 64)])
@pytest.mark.parametrize("arm", ["naive", "dense"])
def test_seeds_of_equal_weights_are_one_training_run_and_support_none(arm, weights):
    found = decided_with_weights(**{arm: weights})
    assert found.verdict.status is not Status.INVALID
    assert found.verdict.recipe is None
    [line] = [line for line in remarks(found) if line.startswith("EQUAL SEEDS: ")]
    assert f"seeds {', '.join(map(str, weights))} of {arm} have the same weights" in line
    assert answer_about_training(found).startswith("For 3 seeds, no claim about the recipe")


def test_a_seed_with_the_weights_of_the_reference_is_named():
    [line] = [
        line for line in remarks(decided_with_weights(naive={2: "a" * 64}, dense={1: "a" * 64})) if "EQUAL" in line
    ]
    assert line.startswith("EQUAL WEIGHTS: naive (seed 2) has exactly the weights of dense.")


# --- the worst of them ---------------------------------------------------------------------------------------------

SNAP = policy("snapkv", 96)


def losing(lost, worst_seed=True, **gate):
    """A run of 72 x 2 items in which naive loses the first items of each seed, as many as ``lost`` says."""
    seeds = tuple(range(1, len(lost) + 1))
    design = Design(
        arms=("dense", "naive"), seeds=seeds, policies=("none", SNAP), suites=("refusal",), clusters=72, items=144
    )
    spec = spec_of(design)
    spec["gate"] |= {"worst_seed": True} if worst_seed else {}
    spec["gate"] |= gate
    data = data_of(scored(design, lambda arm, seed, _p, i: arm == "dense" or i >= lost[seed - 1]), spec)
    return decide_run(data), data


def test_a_seed_that_loses_nine_points_alone_fails_its_cell_where_the_gate_asks():
    found, _ = losing((13, 0, 0))
    assert found.verdict.status is Status.FAIL
    d = found.verdict.head
    assert d.reasons[0].code == ReasonCode.SEED
    assert d.reasons[0].text == "fails by itself: seed 1 (-9.0 pp)"
    assert d.recipe is Status.FAIL


def test_a_seed_that_loses_nine_points_alone_is_averaged_away_where_it_does_not():
    found, _ = losing((13, 0, 0), worst_seed=False)
    assert found.verdict.status is not Status.FAIL


def test_a_seed_that_lost_less_than_the_margin_fails_nothing_alone():
    found, _ = losing((4, 4, 5))
    assert ReasonCode.SEED not in {reason.code for d in found.verdict.decisions for reason in d.reasons}


def test_the_worst_of_several_policies_is_held_by_its_seeds():
    found, _ = losing((13, 0, 0), estimands=["worst"])
    [d] = [d for d in found.verdict.decisions if d.gated]
    assert (d.estimand, d.status, d.reasons[0].code) == ("worst", Status.FAIL, ReasonCode.SEED)


def test_the_worst_seed_stands_beside_every_averaged_cell_with_its_own_interval():
    found, data = losing((5, 13, 0), worst_seed=False)
    worst = found.verdict.head.worst_seed
    assert (worst.seed, worst.estimate) == (2, pytest.approx(-13 / 144))
    assert worst.low < worst.lower < worst.estimate < worst.upper < worst.high
    assert worst.high - worst.low > 1.3 * (found.verdict.head.effect.high - found.verdict.head.effect.low)
    said = "2: -9.0 pp ["
    table = gate_table(found, found.verdict.decisions, gated=True)
    assert {row[table.headers.index("worst seed, pp")] for row in table.rows} == {"-9.0 (2)"}
    with_table = with_values(found, data, "seeds")
    assert all(row[3].startswith(said) for row in tables_of(with_table, "seeds")[0].rows)


def test_one_seed_is_no_worst_of_several():
    assert losing((13,))[0].verdict.head.worst_seed is None


def test_a_spec_that_asks_nothing_of_its_seeds_keeps_its_hash():
    plain, asking = (losing((0,), asked)[1].spec for asked in (False, True))
    assert "worst_seed" not in plain.written()["gate"]
    assert asking.written()["gate"]["worst_seed"] is True
    assert (
        plain.sha256
        == RunSpec.model_validate(plain.written() | {"gate": {**plain.written()["gate"], "worst_seed": False}}).sha256
    )
    assert plain.sha256 != asking.sha256


def test_seeds_that_lost_and_won_the_same_items_have_no_interval_of_any_width():
    z = np.zeros((5, 71))
    z[[0, 4], 2] = z[[2, 1], 45] = (-1, 1)  # V_seed less V_noise is rounding: 1e-20, by degrees of freedom 1e-30
    found = recipe_effect(z, np.arange(71))
    assert -0.001 < found.low <= 0 <= found.high < 0.001


def test_degrees_of_freedom_end_at_one():
    means = np.array([-0.01, 0.0, 0.01])  # V_seed = 1e-4 / 3
    found = recipe_variance(np.array(0.0), means, np.array(0.9e-4), 60)
    assert found.variance == pytest.approx(1e-5 / 3)  # a tenth of V_seed; Satterthwaite would have df .02
    assert found.df == 1
