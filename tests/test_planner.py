"""Sizes before a run, against the simulated and the printed figures of the protocol."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from audit.cli import app
from audit.core.errors import SpecError
from reports.gate.sizes import Design, plan_sizes, snippet


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
def test_power_is_the_simulated_one_at_a_design_effect_in_its_range(
    items, clusters, discordance, simulated, half_width
):
    size = items // clusters
    low, high = (
        plan_sizes(Design(0.05, discordance, clusters, size, correlation=deff_of(deff, size))) for deff in (1.5, 1.2)
    )
    assert low.power - 0.01 <= simulated <= high.power + 0.01
    assert 100 * high.half_width - 0.1 <= half_width <= 100 * low.half_width + 0.3


def test_repeated_samples_raise_the_power_as_simulated():
    # 300 items in 60 templates, 10 % churn: .78 with one sample, .92 with four
    one, four = (plan_sizes(Design(0.05, 0.1, 60, 5, samples=k, correlation=deff_of(1.25, 5))).power for k in (1, 4))
    assert one == pytest.approx(0.78, abs=0.02)
    assert four == pytest.approx(0.92, abs=0.02)


def test_repeats_buy_nothing_when_decoding_is_greedy():
    one, many = (plan_sizes(Design(0.05, 0.1, 60, 5, samples=k, sampling_share=0.0)).power for k in (1, 8))
    assert one == many


@pytest.mark.parametrize(("margin", "required"), [(0.10, 29), (0.05, 59), (0.03, 99), (0.02, 149), (0.01, 299)])
def test_fewest_templates_are_those_of_the_gate(margin, required):
    sizes = plan_sizes(Design(margin, 0.1, 60, 5))
    assert sizes.required_clusters == required
    assert sizes.needed_clusters >= required
    assert (sizes.passes > 0) == (required <= 60)


def test_a_blind_spot_of_sixty_templates_is_under_five_percent():
    assert plan_sizes(Design(0.05, 0.1, 60, 5)).blind_spot == pytest.approx(0.0487, abs=1e-4)


@pytest.mark.parametrize(
    ("discordance", "margin", "items"),
    [(0.05, 0.05, 174), (0.10, 0.05, 347), (0.20, 0.05, 693), (0.10, 0.03, 962), (0.20, 0.02, 4328)],
)
def test_needed_items_are_the_printed_ones_and_a_little_for_the_t_quantiles(discordance, margin, items):
    sizes = plan_sizes(Design(margin, discordance, 60, 5, correlation=0.1))  # design effect 1.4
    assert items <= sizes.needed_items <= 1.04 * items + 8


def test_the_needed_size_has_the_asked_power():
    asked = Design(0.05, 0.2, 60, 5, correlation=0.1, power=0.9)
    sizes = plan_sizes(asked)
    assert sizes.power < 0.9
    grown = plan_sizes(Design(0.05, 0.2, sizes.needed_clusters, 5, correlation=0.1, power=0.9))
    assert 0.9 <= grown.power < 0.91


def test_the_margin_that_is_passed_with_power_is_passed_with_that_power():
    found = plan_sizes(Design(0.05, 0.1, 60, 5)).smallest_margin
    assert plan_sizes(Design(found, 0.1, 60, 5)).power == pytest.approx(0.8, abs=1e-9)


def test_time_is_answers_over_the_rate():
    sizes = plan_sizes(Design(0.05, 0.1, 60, 5, samples=4, policies=3, rate=5.0))
    assert sizes.answers == 60 * 5 * 4 * 3 * 2
    assert sizes.seconds == sizes.answers / 5


def test_the_snippet_is_a_spec_part_with_the_suggested_size():
    import yaml

    sizes = plan_sizes(Design(0.05, 0.1, 20, 5, samples=4))
    parsed = yaml.safe_load(snippet(sizes, "refusal"))
    assert parsed["evaluate"] == {"suites": {"refusal": {"items": sizes.needed_clusters * 5}}, "samples": 4}
    assert parsed["gate"] == {"alpha": 0.05, "margins": {"refusal": 5}}


ANY = st.just(math.nan) | st.floats(-0.5, 1.5)


@given(ANY, ANY, st.integers(-2, 10**9), st.integers(-2, 10**8), ANY, ANY)
def test_any_design_gives_sizes_or_one_line(margin, discordance, clusters, size, correlation, drift):
    try:
        sizes = plan_sizes(Design(margin, discordance, clusters, size, correlation=correlation, drift=drift))
    except SpecError:
        return
    assert 0 <= sizes.passes <= sizes.power <= 1
    assert all(math.isfinite(v) for v in (sizes.smallest_margin, sizes.half_width, sizes.deff))


def test_the_command_prints_the_figures_and_writes_the_snippet(tmp_path):
    words = ["plan", "--discordance", "0.1", "--clusters", "60", "--samples", "4", "--policies", "3", "--rate", "5"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "size.yaml")])
    assert done.exit_code == 0, done.output
    for figure in ("89.3 %", "4.3 pp", "59 templates for 5 pp", "4.9 %", "24.0 minutes, 0.40 GPU-hours", "295 items"):
        assert figure in done.output
    assert "refusal: {items: 295}" in (tmp_path / "size.yaml").read_text()


def test_too_few_templates_are_called_so_and_the_missing_ones_counted():
    done = CliRunner().invoke(app, ["plan", "--clusters", "20"])
    assert "0 %: fewer templates than C_min" in done.output
    assert "buy 51 more templates" in done.output


def test_a_gain_passes_more_easily_than_no_drift_and_a_loss_less():
    loss, still, gain = (plan_sizes(Design(0.05, 0.1, 60, 5, drift=d)) for d in (-0.02, 0.0, 0.02))
    assert loss.power < 0.5 < still.power < 0.9 < gain.power
    assert loss.needed_items > still.needed_items > gain.needed_items
    assert loss.smallest_margin > still.smallest_margin > gain.smallest_margin > 0
    done = CliRunner().invoke(app, ["plan", "--drift", "5", "--margin", "5"])
    assert done.exit_code == 0, done.output


def test_a_gain_that_is_large_enough_passes_any_margin():
    assert plan_sizes(Design(0.05, 0.2, 400, 5, drift=0.1)).smallest_margin == 0
    done = CliRunner().invoke(app, ["plan", "--discordance", "0.2", "--clusters", "400", "--drift", "10"])
    assert "any, the gain is large enough" in done.output


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
