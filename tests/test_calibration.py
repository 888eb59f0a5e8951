"""The gate keeps what is asked of it in simulation, and one that is broken on purpose does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.calibration.broken import BrokenTemplates
from bench.calibration.case import FAST, FULL, Case, Figure, Scale, Simulated, at_least, at_most, confirmed
from bench.calibration.checks import (
    doses,
    families,
    graded,
    intervals,
    judges,
    power,
    recipes,
    standing,
    templates,
)
from bench.calibration.family import Seeded
from bench.calibration.probit import Probit
from bench.calibration.streams import EVEN, THREE_TO_ONE
from kvaudit.core.facets import FACETS, readable_facets
from kvaudit.core.records import Outcome
from kvaudit.reports.stats.clustered import many_totals, t_bounds
from kvaudit.reports.stats.effect import Bounds, Effect
from kvaudit.reports.stats.rule import Call, SuiteTotals, calls, shows_margin, too_uneven
from kvaudit.reports.stats.seeds import Recipe, many_recipe_effects
from kvaudit.reports.stats.tango import ess_tango, many_ess_tango
from kvaudit.reports.verdict.cell import decide_cell
from kvaudit.reports.verdict.controls import controls_of
from kvaudit.reports.verdict.verdict import Status

SEED = 20_260
SMALL = Scale("test", 0.06, every_case=False, slack=3.0, confirms=False)
SMALLER = Scale("test", 0.015, every_case=False, slack=3.0, confirms=False)  # to find what is wrong by much
LARGER = Scale("test", 0.12, every_case=False, slack=3.0, confirms=False)  # to find what is wrong by little


def simulated(cases: list[Case], *, seed: int = SEED) -> list[Simulated]:
    return [Simulated(case, case.rates(seed), 0.0) for case in cases]


def missed(figures: list[Figure]) -> list[str]:
    return [f"{f.what}: {f.value:.4f}, asked {f.asked} +- {f.slack:.4f}" for f in figures if not f.ok]


@pytest.mark.parametrize(
    "check",
    [intervals, templates, families, recipes, judges, doses, power, graded, standing],
    ids=lambda m: m.__name__[28:],
)
def test_every_figure_keeps_to_what_is_asked(check):
    figures = check.figures(simulated(check.cases(SMALL)), SMALL)
    assert figures
    assert not missed(figures)


def test_a_score_interval_of_independent_items_calls_measurable_what_is_not(monkeypatch):
    """Wilson's bound of items, whatever their templates."""

    def wilson(values, counts, *, draws=1):
        n, z = int(counts.sum()), 2.43
        rate = values.mean(axis=-1)
        spread = z * np.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
        middle = rate + z**2 / (2 * n)
        return standing.ShownShare(rate, (middle - spread) / (1 + z**2 / n), (middle + spread) / (1 + z**2 / n))

    monkeypatch.setattr(standing, "shares", wilson)
    found = missed(standing.figures(simulated(standing.cases(SMALL)), SMALL))
    assert any("nothing to lose" in line for line in found)


def test_what_is_simulated_is_what_the_gate_says_of_the_same_answers():
    case = standing._case(
        own=0.4, control=0.25, twin=0.88, clusters=30, items=2, shared=0.3, margin=0.05, simulations=40, healthy=True
    )
    counts = np.full(30, 2)
    simulated_ = case._measurable(np.random.default_rng(8), 40, counts)
    rng = np.random.default_rng(8)
    hard = rng.standard_normal((40, 30))
    own, control = (case._answers(rng, hard, counts, rate) for rate in (case.own, case.control))
    twin = case._answers(rng, rng.standard_normal(hard.shape), counts, case.twin)
    said = []
    for rows in zip(own, control, twin, strict=True):
        kinds = zip(("refused", "capable", "over_refused"), rows, strict=True)
        answers = [
            SimpleNamespace(
                suite="s",
                context_tokens=0,
                cluster_id=f"c{i // 2}",
                item_id=f"{facet}-{i}",
                outcome=Outcome.DESIRED,
                score=1.0,
                facets=readable_facets({facet: bool(good) == FACETS[facet].wanted}),
            )
            for facet, own in kinds
            for i, good in enumerate(own)
        ]
        [found] = controls_of(answers, {"s.refused": 0.05})
        said.append(found.is_measurable)
    assert said == simulated_.tolist()
    assert 5 < sum(said) < 35


def test_an_interval_of_cr1_and_z_quantiles_is_found_out(monkeypatch):
    """Inspect's formula, as a gate."""

    def normal(z, counts, *, samples=1, alpha):
        t = many_totals(z, counts)
        clusters = len(t.counts)
        cr1 = clusters / (clusters - 1) * (t.residuals**2).sum(axis=-1) / t.counts.sum() ** 2
        return t_bounds(t.mean, cr1, 1e9, alpha=alpha)

    monkeypatch.setattr(intervals, "many_ess_tango", normal)
    found = missed(intervals.figures(simulated(intervals.cases(LARGER)), LARGER))
    assert any("clears a drift at the margin, any design" in line for line in found)
    assert any("coverage" in line for line in found)


def test_item_level_tango_is_found_out(monkeypatch):
    """Every item in a cluster of its own: what McNemar and an unclustered score interval do."""

    def unclustered(z, counts, *, samples=1, alpha):
        return many_ess_tango(z, np.ones(z.shape[-1], dtype=np.int64), samples=samples, alpha=alpha)

    monkeypatch.setattr(intervals, "many_ess_tango", unclustered)
    assert len(missed(intervals.figures(simulated(intervals.cases(SMALLER)), SMALLER))) >= 3


@pytest.fixture
def lost_templates():
    """Cases of broken templates, few of them."""
    return [
        case
        for case in templates.cases(SMALL)
        if case.model == BrokenTemplates(0.05, 0.02) and case.alpha == 0.05 and case.named
    ]


def test_a_gate_without_c_min_is_found_out(monkeypatch, lost_templates):
    monkeypatch.setattr("kvaudit.reports.stats.rule.clusters_required", lambda margin, alpha: 1)
    monkeypatch.setattr(intervals, "too_uneven", lambda counts, margin, alpha: False)
    monkeypatch.setattr(intervals, "shows_margin", lambda sums, counts, **_: np.ones(len(sums), dtype=np.bool_))
    twenty = next(case for case in lost_templates if case.clusters == 20)
    assert twenty.rates(SEED)["passed"] > 0.2  # no broken template is drawn in .95^20 = 36 % of the simulations


def test_fewer_than_c_min_never_pass(lost_templates):
    few = [case for case in lost_templates if case.clusters < 59]
    assert [case.clusters for case in few] == [10, 20, 40, 58]
    assert [case.rates(SEED)["passed"] for case in few] == [0, 0, 0, 0]


def test_a_gate_without_the_template_rule_is_found_out(monkeypatch):
    """Eight samples: their average hides how few templates carry the loss."""
    case = templates.TemplateCase(BrokenTemplates(0.05, 0.02, 8), 72, 5, EVEN, 0.05, simulations=4000)
    held = case.rates(SEED)["passed"]
    monkeypatch.setattr(intervals, "shows_margin", lambda sums, counts, **_: np.ones(len(sums), dtype=np.bool_))
    assert held < 0.06
    assert case.rates(SEED)["passed"] > 0.1


def test_a_template_rule_that_is_a_little_lax_is_found_out(monkeypatch):
    case = templates.TemplateCase(BrokenTemplates(0.05, 0.1), 60, 5, EVEN, 0.05, simulations=10_000)
    monkeypatch.setattr("kvaudit.reports.stats.rule.SHARPNESS", 0.9)
    assert case.rates(SEED)["passed"] > 0.065


def test_a_sequence_that_goes_on_after_a_failure_is_found_out(monkeypatch):
    monkeypatch.setattr(doses, "cleared", lambda passed: passed.shape[-1] - np.argmax(passed[..., ::-1], axis=-1))
    assert missed(doses.figures(simulated(doses.cases(SMALL)), SMALL))


def test_a_recipe_without_seed_variance_is_found_out(monkeypatch):
    monkeypatch.setattr(
        "kvaudit.reports.stats.seeds.recipe_variance",
        lambda item, _m, _n, clusters: Recipe(item, np.float64(clusters - 1)),
    )
    assert missed(recipes.figures(simulated(recipes.cases(SMALL)), SMALL))


def outcome(number: int, rate: float, simulations: int = 100) -> Simulated:
    case = recipes.RecipeCase(Seeded(number, 0.0, 0.1), simulations=simulations)
    return Simulated(case, {"rate": rate}, 1.5)


def test_an_extreme_is_taken_from_its_leaders_drawn_again():
    first = [outcome(i, rate) for i, rate in enumerate((0.01, 0.07, 0.02, 0.05, 0.06))]
    figure = at_most(1, "", first, "rate", 0.06, scale=FULL)
    assert (figure.value, figure.ok, figure.simulations) == (0.07, False, 500)
    assert [case.model.seeds for case in figure.leaders] == [1, 4, 3]
    again = {o.case.name: o for o in (outcome(i, 0.055 + i / 1000, 1000) for i in (1, 4, 3))}
    second = confirmed(figure, again)
    assert (second.value, second.ok, second.simulations) == (pytest.approx(0.059), True, 3500)
    assert second.first == 0.07
    assert confirmed(figure, {}) == figure
    least = at_least(3, "", first, "rate", 0.015, scale=FULL)
    assert (least.value, least.ok) == (0.01, False)
    assert least.leaders[0].model.seeds == 0
    assert confirmed(least, {o.case.name: o for o in [outcome(0, 0.02), outcome(2, 0.016)]}).value == 0.016


def test_only_a_reduced_table_grants_simulation_error():
    first = [outcome(0, 0.0601, 10_000)]
    assert not at_most(1, "", first, "rate", 0.06, scale=FULL).ok
    assert at_most(1, "", first, "rate", 0.06, scale=FAST).slack == pytest.approx(3 * (0.06 * 0.94 / 10_000) ** 0.5)
    assert at_most(1, "", [outcome(0, 0.0001)], "rate", 0.0, scale=FAST).ok is False  # what must be 0 is 0


def test_two_seeds_are_refused():
    with pytest.raises(AssertionError, match="needs 3 seeds"):
        many_recipe_effects(np.zeros((4, 2, 30)), np.full(10, 3), alpha=0.05)


def test_a_figure_is_the_same_for_the_same_seed_and_another_for_another():
    case = intervals.cases(SMALL)[0]
    assert case.rates(1) == case.rates(1)
    assert case.rates(1) != case.rates(2)


@pytest.mark.parametrize("samples", [1, 4])
def test_many_samples_at_once_are_one_sample_many_times(samples):
    rng = np.random.default_rng(3)
    counts = rng.integers(2, 9, 25)
    z = Probit(-0.03, 0.1, 0.3, samples).draw(rng, 40, counts)
    z[0] = 0
    z[1] = -1
    together = many_ess_tango(z, counts, samples=samples, alpha=0.025)
    for i, row in enumerate(z):
        effect = ess_tango(row, np.repeat(np.arange(25), counts), samples=samples, alpha=0.025)
        alone = [getattr(effect, name) for name in Bounds._fields]
        assert [field[i] for field in together] == pytest.approx(alone, abs=1e-12)


STATUS = {
    Call.PASS: Status.PASS,
    Call.PASS_NOTED: Status.PASS_NOTED,
    Call.FAIL: Status.FAIL,
    Call.INCONCLUSIVE: Status.INCONCLUSIVE,
    Call.CLUSTERS: Status.INCONCLUSIVE,
    Call.UNEVEN: Status.INCONCLUSIVE,
    Call.TEMPLATES: Status.INCONCLUSIVE,
}


@pytest.mark.parametrize("largest", [2, 8])
@pytest.mark.parametrize("broken", [0, 4])
@pytest.mark.parametrize("clusters", [6, 58, 59, 200])
def test_the_gate_decides_as_the_simulated_rule(clusters, broken, largest):
    template = ess_tango(np.zeros(60), np.repeat(np.arange(20), 3))
    counts = np.full(clusters, 2.0)
    counts[-1] = largest
    sums = np.where(np.arange(clusters) < broken, -2.0, 0.0)
    shown, uneven = shows_margin(sums, counts, margin=0.05, alpha=0.05), too_uneven(counts, 0.05, 0.05)
    for lower in (-0.2, -0.05, -0.04, 0.01):
        for upper in (-0.06, -0.01, 0.0, 0.02):
            for pvalue in (0.001, 0.05, 0.5):
                if lower > upper:
                    continue
                effect: Effect = replace(template, lower=lower, upper=upper, n_clusters=clusters)
                call = Call(
                    int(
                        calls(
                            lower,
                            upper,
                            pvalue,
                            clusters=clusters,
                            uneven=uneven,
                            shown=shown,
                            margin=0.05,
                            alpha=0.05,
                        )
                    )
                )
                status, reasons = decide_cell(effect, 0.05, pvalue, [SuiteTotals(1.0, sums, counts)])
                assert status is STATUS[call]
                assert (call in (Call.CLUSTERS, Call.UNEVEN)) == any(r.code == "CLUSTERS" for r in reasons)
                assert (call is Call.TEMPLATES) == any(r.code == "TEMPLATES" for r in reasons)


def test_the_rule_of_known_bounds():
    lower, upper = np.array([-0.04, -0.04, -0.04, -0.06, -0.06, -0.06]), np.array([0.01, *[-0.01] * 4, 0.01])
    pvalue = np.array([0.3, 0.01, 0.06, 0.01, 0.06, 0.01])
    rule = {"margin": 0.05, "alpha": 0.05}
    found = calls(lower, upper, pvalue, clusters=59, uneven=False, shown=True, **rule)
    expected = [Call.PASS, Call.PASS_NOTED, Call.PASS, Call.FAIL, Call.INCONCLUSIVE, Call.INCONCLUSIVE]
    assert found.tolist() == expected
    assert calls(-0.04, 0.0, 0.5, clusters=58, uneven=False, shown=True, **rule) == Call.CLUSTERS
    assert calls(-0.04, 0.0, 0.5, clusters=59, uneven=True, shown=True, **rule) == Call.UNEVEN
    assert calls(-0.04, 0.0, 0.5, clusters=59, uneven=False, shown=False, **rule) == Call.TEMPLATES
    assert calls(-0.06, -0.01, 0.01, clusters=6, uneven=True, shown=False, **rule) == Call.FAIL  # a loss that is shown


def test_broken_templates_lose_a_share_of_whole_clusters():
    rng, counts = np.random.default_rng(5), np.full(40, 5)
    model = BrokenTemplates(0.05, 0.02)
    z = model.draw(rng, 4000, counts)
    assert model.discordance == pytest.approx(0.05 + 0.95 * 0.02)
    assert z.mean() == pytest.approx(-0.05, abs=0.0025)
    assert np.abs(z).mean() == pytest.approx(model.discordance, abs=0.0025)
    lost = (z.reshape(4000, 40, 5) == -1).all(axis=2)
    assert lost.mean() == pytest.approx(0.05, abs=0.0022)  # 4 standard errors of 160,000 clusters


def test_large_templates_that_break_more_often_are_found_out_where_templates_are_merely_counted(monkeypatch):
    model = BrokenTemplates(0.05, 0.02, by_size=True)
    case = templates.TemplateCase(model, 61, 4, THREE_TO_ONE, 0.05, simulations=4000)
    assert case.rates(SEED)["passed"] == 0  # 61 templates of 2 and 6 items are worth 49
    monkeypatch.setattr(intervals, "effective_clusters", len)
    monkeypatch.setattr(intervals, "too_uneven", lambda counts, margin, alpha: False)
    assert case.rates(SEED)["passed"] > 0.065


def test_the_expected_loss_is_the_share_that_breaks_whatever_breaks_it():
    rng, counts = np.random.default_rng(7), np.array([2, 6] * 40)
    for model in (BrokenTemplates(0.05, 0.0, by_size=True), BrokenTemplates(0.05, 0.0, among=0.2)):
        assert model.draw(rng, 4000, counts).mean() == pytest.approx(-0.05, abs=0.003)
