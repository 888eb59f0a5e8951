"""Sizes before a run, against simulations of another kind and the printed figures of the protocol."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import reports_synthetic as synthetic
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.core.errors import SpecError
from kvaudit.reports.stats.rule import SuiteTotals
from kvaudit.reports.stats.tango import ess_tango
from kvaudit.reports.verdict.cell import decide_cell
from kvaudit.reports.verdict.chance import Differences, draw_audits, lowest_estimate, pass_rate, pool_of
from kvaudit.reports.verdict.sizes import (
    Design,
    larger_designs,
    lowest_drift,
    needed_clusters,
    pass_chance,
    plan_sizes,
    smallest_margin,
    spec_snippet,
    with_more_items,
)
from kvaudit.reports.verdict.verdict import PASSED


def deff_of(value, size):
    return (value - 1) / (size - 1)


@pytest.mark.parametrize(
    ("items", "clusters", "discordance", "simulated", "half_width"),
    [
        (100, 20, 0.10, 0.33, 8.3),
        (200, 40, 0.10, 0.60, 5.3),
        (300, 60, 0.05, 0.95, 3.0),
        (300, 60, 0.10, 0.78, 4.2),
        (300, 60, 0.20, 0.50, 6.1),
        (600, 60, 0.10, 0.93, 3.1),
    ],
)
def test_the_interval_passes_as_simulated_at_a_design_effect_in_its_range(
    items, clusters, discordance, simulated, half_width
):
    size = items // clusters
    low, high = (
        plan_sizes(Design(0.05, discordance, clusters, size, correlation=deff_of(deff, size))) for deff in (1.5, 1.2)
    )
    assert low.interval - 0.03 <= simulated <= high.interval + 0.03
    assert 100 * high.half_width - 0.1 <= half_width <= 100 * low.half_width + 0.3


@pytest.mark.parametrize(
    ("clusters", "items", "samples", "discordance", "correlation", "simulated"),
    [
        (60, 5, 1, 0.05, 0.0, 0.904),
        (60, 5, 1, 0.10, 0.105, 0.648),
        (60, 5, 1, 0.16, 0.168, 0.432),
        (120, 5, 1, 0.16, 0.080, 0.797),
        (72, 2, 1, 0.16, 0.168, 0.342),
        (60, 5, 4, 0.10, 0.052, 0.826),
        (72, 2, 4, 0.16, 0.168, 0.457),
    ],
)
def test_the_chance_to_pass_is_that_of_another_model_of_the_same_size(
    clusters, items, samples, discordance, correlation, simulated
):
    """Probit answers of two arms (``calibration.probit``), 1,500 audits each, decided by the whole rule."""
    design = Design(0.05, discordance, clusters, items, samples=samples, correlation=correlation)
    assert pass_chance(design) == pytest.approx(simulated, abs=0.035)


@pytest.mark.parametrize("samples", [1, 4])
def test_an_audit_passes_where_the_gate_passes_it(samples):
    pool = pool_of(Differences(0.2, -0.01, 0.5, 0.3, 0.0), items=1, samples=samples, seeds=1)
    found = draw_audits(pool, 70, audits=60)

    def passes(z):
        effect = ess_tango(z, np.arange(70), samples=samples)
        return decide_cell(effect, 0.1, 1.0, [SuiteTotals(1.0, z, np.ones(70))])[0] in PASSED

    every = [passes(z) for z in found.sums]
    assert 5 < sum(every) < 55
    assert pass_rate(found, margin=0.1, alpha=0.05) == pytest.approx(np.mean(every))


def test_samples_and_seeds_raise_the_chance_where_answers_differ_by_them():
    one = Design(0.05, 0.16, 72, 2)
    assert (
        pass_chance(one) + 0.1
        < pass_chance(Design(0.05, 0.16, 72, 2, samples=4))
        < pass_chance(Design(0.05, 0.16, 72, 2, seeds=5))
    )


def test_repeats_buy_nothing_when_decoding_is_greedy_nor_seeds_when_nothing_is_trained():
    greedy = [plan_sizes(Design(0.05, 0.1, 60, 5, samples=k, sampling_share=0.0)) for k in (1, 8)]
    assert greedy[0].error == greedy[1].error
    assert greedy[0].passes == pytest.approx(greedy[1].passes, abs=0.03)
    served = [plan_sizes(Design(0.05, 0.1, 60, 5, seeds=s, sampling_share=0.0, seed_share=0.0)) for s in (1, 8)]
    assert served[0].error == served[1].error
    assert [s.words for s in larger_designs(Design(0.05, 0.1, 60, 5, sampling_share=0.0, seed_share=0.0))] == [
        "4 times the items of each template"
    ]


def test_the_steps_go_from_samples_to_seeds_to_items_and_each_helps():
    design = Design(0.05, 0.16, 72, 2)
    found = list(larger_designs(design))
    assert [s.words for s in found] == ["4 answers to an item", "5 seeds", "4 times the items of each template"]
    assert pass_chance(design) < found[0].passes < found[1].passes < found[2].passes
    assert pass_chance(design) < with_more_items(design).passes < found[2].passes


@pytest.mark.parametrize(("clusters", "lowest"), [(60, -0.0231), (100, -0.0342), (150, -0.0395)])
def test_the_lowest_estimate_that_passes_is_that_of_the_template_rule(clusters, lowest):
    assert lowest_estimate(clusters, margin=0.05, alpha=0.05) == pytest.approx(lowest, abs=1e-4)


def test_below_c_min_no_estimate_passes():
    assert lowest_estimate(58, margin=0.05, alpha=0.05) is None


def test_the_lowest_drift_with_power_has_that_power_and_a_lower_one_has_not():
    found = lowest_drift(Design(0.05, 0.08, 100, 5))
    assert -0.034 < found < 0
    assert pass_chance(Design(0.05, 0.08, 100, 5, drift=found)) == pytest.approx(0.8, abs=0.05)
    assert pass_chance(Design(0.05, 0.08, 100, 5, drift=found - 0.01)) < 0.75


@pytest.mark.parametrize(("margin", "required"), [(0.10, 29), (0.05, 59), (0.03, 99), (0.02, 149), (0.01, 299)])
def test_fewest_templates_are_those_of_the_gate(margin, required):
    sizes = plan_sizes(Design(margin, 0.1, 60, 5))
    assert sizes.required_clusters == required
    assert (sizes.passes > 0) == (required <= 60)


def test_a_blind_spot_of_sixty_templates_is_under_five_percent():
    assert plan_sizes(Design(0.05, 0.1, 60, 5)).blind_spot == pytest.approx(0.0487, abs=1e-4)


def test_time_is_answers_over_the_rate():
    design = Design(0.05, 0.1, 60, 5, samples=4, policies=3, seeds=2, rate=5.0)
    assert design.answers == 60 * 5 * 4 * 3 * 2 * 2
    assert design.seconds == design.answers / 5


def test_the_needed_size_has_the_asked_power_and_at_least_c_min():
    asked = Design(0.05, 0.2, 60, 5, power=0.9)
    needed = needed_clusters(asked)
    assert pass_chance(asked) < 0.7
    assert pass_chance(Design(0.05, 0.2, needed, 5)) == pytest.approx(0.9, abs=0.04)
    assert needed_clusters(Design(0.05, 0.001, 60, 5)) == 59


def test_a_size_beyond_all_reason_is_an_error():
    with pytest.raises(SpecError, match="more than 20,000 templates would be needed"):
        needed_clusters(Design(0.05, 0.1, 60, 5, drift=-0.0499))


def test_the_margin_that_is_passed_with_power_is_passed_with_that_power():
    found = smallest_margin(Design(0.05, 0.1, 60, 5))
    assert pass_chance(Design(found, 0.1, 60, 5)) == pytest.approx(0.8, abs=0.04)
    assert smallest_margin(Design(0.05, 0.1, 2, 1)) is None


def test_a_gain_passes_more_easily_than_no_drift_and_a_loss_less():
    loss, still, gain = (pass_chance(Design(0.05, 0.1, 60, 5, drift=d)) for d in (-0.02, 0.0, 0.02))
    assert loss < 0.4 < still < 0.8 < gain


def test_the_snippet_is_a_spec_part_with_the_suggested_size():
    import yaml

    parsed = yaml.safe_load(spec_snippet(Design(0.05, 0.1, 20, 5, samples=4), 70, "refusal"))
    assert parsed["evaluate"] == {"suites": {"refusal": {"items": 350}}, "samples": 4}
    assert parsed["gate"] == {"alpha": 0.05, "margins": {"refusal": 5}}


ANY = st.just(math.nan) | st.floats(-0.5, 1.5)


@settings(max_examples=8, deadline=None)
@given(ANY, ANY, st.integers(-2, 10**5), st.integers(-2, 10**4), ANY, ANY)
def test_any_design_gives_sizes_or_one_line(margin, discordance, clusters, size, correlation, drift):
    try:
        sizes = plan_sizes(Design(margin, discordance, clusters, size, correlation=correlation, drift=drift))
    except SpecError:
        return
    assert 0 <= sizes.passes <= sizes.interval <= 1
    assert all(math.isfinite(v) for v in (sizes.half_width, sizes.deff))


def test_the_command_prints_the_figures_and_writes_the_snippet(tmp_path):
    words = ["plan", "--discordance", "0.1", "--clusters", "60", "--samples", "4", "--policies", "3", "--rate", "5"]
    done = CliRunner().invoke(app, [*words, "--seeds", "3", "--out", str(tmp_path / "size.yaml")])
    assert done.exit_code == 0, done.output
    for figure in (
        "59 templates for 5 pp",
        "4.9 %",
        "72.0 minutes, 1.20 GPU-hours",
        "no estimate below -2.3 pp passes",
    ):
        assert figure in done.output
    chances = [line for line in done.output.splitlines() if " % with " in line or "as planned" in line]
    assert [c.split(" % ")[1] for c in chances] == [
        "as planned",
        "with 5 seeds",
        "with 4 times the items of each template too",
        "with 4 times the items of each template and nothing else",
    ]
    assert "refusal: {items: " in (tmp_path / "size.yaml").read_text()


def test_too_few_templates_are_called_so_and_the_missing_ones_counted():
    done = CliRunner().invoke(app, ["plan", "--clusters", "20", "--discordance", "0.02"])
    for words in ("0 %: fewer templates than C_min", "buy 39 more templates", "templates: 59 of them, then samples"):
        assert words in done.output


def test_the_chance_to_find_a_drop_of_the_margin_is_that_of_a_drop_not_of_no_drift():
    found = plan_sizes(Design(0.05, 0.06, 60, 5, correlation=0.0))
    error = math.sqrt((0.06 - 0.05**2) / 300)  # the variance at a drop of 5 pp
    assert found.detects == pytest.approx(float(stats.t.cdf(0.05 / error - stats.t.ppf(0.95, 59), 59)))


def test_a_drop_that_cannot_exist_is_called_so():
    assert plan_sizes(Design(0.05, 0.02, 60, 5)).detects is None
    done = CliRunner().invoke(app, ["plan", "--discordance", "0.02"])
    assert done.exit_code == 0, done.output
    assert "more than the 2.0 % of the items that differ can lose" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--margin", "0"], "--margin is 0"),
        (["--drift", "-6"], "no size passes a drop at or beyond the margin"),
        (["--drift", "-5"], "no size passes a drop at or beyond the margin"),
        (["--clusters", "1"], "--clusters is 1"),
        (["--icc", "nan"], "--icc is nan"),
        (["--rate", "0"], "--rate is 0"),
        (["--suite", "a: b"], "--suite is 'a: b'"),
        (["--discordance", "0.01", "--drift", "2"], "too small for a drift"),
        (["--discordance", "0.01", "--drift", "-2"], "the share of items that differ is at least the size"),
    ],
)
def test_bad_numbers_are_one_line_and_exit_2(words, said):
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_a_run_says_how_many_would_decide_each_of_its_cells(tmp_path):
    design = synthetic.Design(
        arms=("base",), seeds=(0,), train=False, policies=("none", synthetic.policy("streaming", 96)),
        suites=("refusal", "math"), clusters=20, items=40, primary=(synthetic.policy("streaming", 96),),
    )  # fmt: skip
    run = synthetic.build(tmp_path / "run", design)
    done = CliRunner().invoke(app, ["plan", str(run)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split(",")[0] for line in lines] == ["refusal at 192 tokens", "math at 192 tokens"]
    for line in lines:
        assert "INCONCLUSIVE with 40 items in 20 templates; " in line
    needed = [int(re.search(r" items in (\d+) templates would decide it", line)[1]) for line in lines]
    assert needed[0] >= 59  # C_min at 5 points
    assert needed[1] >= 99  # at 3


def test_options_of_a_design_are_refused_of_a_run(tmp_path):
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "--margin", "2", "--items-per-cluster", "5"])
    assert done.exit_code == 2
    assert "leave out --margin, --items-per-cluster" in " ".join(done.stderr.split())


def test_a_folder_without_a_run_has_no_plan(tmp_path):
    done = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1)
    assert "give the folder of a run" in done.stderr


def test_nothing_that_is_printed_advises_to_tolerate_more():
    root = Path(__file__).parent.parent
    advice = re.compile(r"\b(raise|widen|wider|larger|loosen|increase)\s+(the|a|its|your)?\s*margin", re.IGNORECASE)
    files = [
        path for room in ("core", "audit", "reports", "suites") for path in (root / "kvaudit" / room).rglob("*.py")
    ]
    assert len(files) > 200
    assert [path.name for path in files if advice.search(" ".join(path.read_text("utf-8").split()))] == []
