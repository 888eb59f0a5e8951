"""``python -m bench.calibration``, and the calibration that ships."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from reports_synthetic import Design, build
from typer.testing import CliRunner

from bench.calibration import table
from bench.calibration.__main__ import calibrate, designs
from bench.calibration.case import FULL, Scale
from bench.calibration.checks import intervals, standing, templates
from bench.calibration.design import EQUAL, LARGER, SPREAD, TWICE, WHOLE, RunDesign, design_cases
from bench.calibration.run import simulate
from bench.calibration.sources import SOURCES, code_hash, code_only, source_hashes
from bench.calibration.table import all_cases
from kvaudit.reports.records.load import load_run
from kvaudit.reports.sections.shared.words import error_rates_text
from kvaudit.reports.verdict.controls import shipped_calibration, shipped_rates

app = typer.Typer()
app.command()(calibrate)
RESULTS = Path(__file__).parent.parent / "docs" / "results" / "calibration.md"
TINY = Scale("tiny", 0.01, every_case=False, slack=6.0, confirms=False)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("bench.calibration.__main__.FAST", TINY)


def calibrated(tmp_path, *words):
    out = tmp_path / "calibration.json"
    done = CliRunner().invoke(app, ["--fast", "--workers", "1", "--out", str(out), *words])
    return done, out


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """A calibration into a folder that is not there yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.calibration.__main__.FAST", TINY)
        return calibrated(tmp_path_factory.mktemp("calibration") / "new", "--seed", "4")


def test_it_prints_the_table_and_writes_the_figures(printed):
    done, out = printed
    assert done.exit_code == 0, done.output
    held = json.loads(out.read_text())
    assert (held["seed"], held["scale"], held["ok"]) == (4, "tiny", True)
    assert {figure["row"] for figure in held["figures"]} == {*range(1, 11), 14, 15, 16}
    assert held["sources"] == source_hashes()
    assert "every figure keeps to what was asked" in done.output
    assert f"calibrate {len(all_cases(TINY))}/{len(all_cases(TINY))}" in done.stderr
    assert str(out) in done.stdout.replace("\n", "")


def test_a_figure_that_misses_exits_with_three(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("kvaudit.reports.stats.rule.clusters_required", lambda margin, alpha: 1)
    monkeypatch.setattr(intervals, "too_uneven", lambda counts, margin, alpha: False)
    monkeypatch.setattr(intervals, "shows_margin", lambda sums, counts, **_: np.ones(len(sums), dtype=np.bool_))
    checks = tuple(check for check in table.CHECKS if check.cases is intervals.cases)
    monkeypatch.setattr("bench.calibration.__main__.CHECKS", checks)
    done, out = calibrated(tmp_path)
    assert done.exit_code == 3, done.output
    assert json.loads(out.read_text())["ok"] is False
    assert "miss what was asked" in done.output


@pytest.mark.parametrize("place", ["", "file/x.json"])
def test_a_path_that_cannot_be_written_is_one_line_before_anything_is_simulated(tiny, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("bench.calibration.__main__.simulated", None)
    done = CliRunner().invoke(app, ["--fast", "--out", str(tmp_path / place)])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --out is ")
    assert done.stderr.count("\n") == 1


def test_several_processes_give_the_figures_of_one():
    cases = intervals.cases(TINY)[4:7]
    seen = []
    one = simulate(cases, seed=3, workers=1, progress=lambda done, name: None)
    two = simulate(cases, seed=3, workers=2, progress=lambda done, name: seen.append(done))
    assert [o.rates for o in one] == [o.rates for o in two]
    assert len({str(o.rates) for o in one}) == 3
    assert seen == [1, 2, 3]


def test_names_of_cases_are_unique():
    names = [case.name for case in all_cases(FULL)]
    assert len(names) == len(set(names))


def test_the_shipped_calibration_is_of_the_statistics_as_they_are():
    now, then = source_hashes(), shipped_calibration()["sources"]
    stale = [name for name in SOURCES if now[name] != then.get(name)]
    assert not stale, "changed since: again, python -m bench.calibration --out reports/verdict/error_rates.json"


def test_the_stamp_quotes_the_worst_of_the_shipped_figures():
    said = shipped_rates()
    either = lambda f: f["value"] if f["row"] in (4, 14) else max(f["value"], f["first"])  # noqa: E731 - noise at first
    every = [(figure, either(figure)) for figure in shipped_calibration()["figures"]]
    figures = {figure["what"]: worst for figure, worst in every}
    whole = [(f["most_extreme"][0], worst) for f, worst in every if f["row"] == 4 and f["asked"] != "not asked"]
    at_level = [worst for name, worst in whole if "alpha=0.05" in name]
    assert len(at_level) == 7  # one sample, several, between 0 and 1, 10 pp, too few, Zipf, the largest alone
    assert said.false_pass_max == max(*at_level, figures["gate passes at the margin, C >= C_min, any design"])
    at_release = [worst for name, worst in whole if "alpha=0.025" in name]
    interval = next(worst for f, worst in every if f["row"] == 2 and f["what"] == "same at the release level .025")
    assert said.release_max == max(*at_release, interval)
    assert said.type_one_max == figures["two-sided false alarms without drift, any design"]
    coverage = next(f for f, _ in every if f["row"] == 3)
    assert said.coverage_min == min(coverage["value"], coverage["first"])
    assert said.beyond_max == figures["interval clears a drift at the margin, other rates and margins"]
    assert said.unnamed_max == figures[templates.UNNAMED]
    assert said.nothing_to_lose_max == figures[standing.NOTHING_TO_LOSE] <= 0.01
    assert said.turned_away_max == figures[standing.TURNED_AWAY] <= 0.05
    percent, count = re.search(
        r"at most ([\d.]+) % .* any of ([\d,]+) designs", error_rates_text(said, 0.05, [0.05])
    ).groups()
    assert float(percent) == pytest.approx(100 * said.false_pass_max, abs=0.051)
    assert int(count.replace(",", "")) == said.false_pass_designs > 100


@pytest.mark.parametrize(
    ("alpha", "margins", "begins", "lacks"),
    [
        (0.05, [0.05, 0.05], "At level 0.05 the gate passes at most ", "not simulated"),
        (0.025, [0.05], "At level 0.025 the gate passes at most ", "not simulated"),
        (0.05, [0.05, 0.03], "The gate was not simulated at a margin of 3 pp. At level 0.05 ", "this level"),
        (0.49, [0.05], "The gate was not simulated at this level (0.49). At level 0.05 ", "pp. At"),
        (0.0125, [0.5], "The gate was not simulated at this level (0.0125) or at a margin of 50 pp. At", "0.025"),
    ],
)
def test_the_stamp_says_what_it_was_simulated_at_and_what_it_is_not_about(alpha, margins, begins, lacks):
    said = error_rates_text(shipped_rates(), alpha, margins)
    assert said.startswith(begins)
    assert lacks not in said


def test_the_stamp_names_what_went_worse():
    said = shipped_rates()
    for alpha in (0.05, 0.025):
        text = error_rates_text(said, alpha, [0.05])
        assert f"up to {100 * said.beyond_max:.1f} % (the interval, level 0.05), with a reference at 98 %" in text
    assert f"at most {100 * said.release_max:.1f} % " in error_rates_text(said, 0.025, [0.05])


def test_words_about_code_do_not_make_a_calibration_stale():
    one = '"""A."""\n\nX = "#"  # why\n\n\ndef f():\n    """Say."""\n    return 1\n'
    two = '"""Another."""\nX = "#"\n\ndef f():\n    # more\n    """Say\n    at length."""\n    return 1\n'
    assert code_only(one) == 'X = "#"\ndef f():\n    return 1'
    assert code_hash(one) == code_hash(two) != code_hash(one.replace("1", "2"))


def test_the_full_table_repeats_what_decides_and_nothing_else():
    scale = Scale("tiny", 0.005, every_case=False, slack=0.0, confirms=True)
    checks = [check for check in table.CHECKS if check.cases in (intervals.cases, templates.cases)]
    seen = []
    done = table.calibrate(scale, seed=1, workers=1, progress=lambda _, name: seen.append(name), checks=checks)
    again = [name.removeprefix("again ") for name in seen if name.startswith("again ")]
    assert len(again) == len(set(again)) == done.repeated > 10
    by_name = {figure.what: figure for figure in done.figures}
    mean = by_name["gate passes at the margin, C >= C_min, mean"]
    most = by_name["gate passes at the margin, C >= C_min, any design"]
    assert mean.simulations == 4 * 50
    assert most.simulations == 4 * 50 + 3 * 500
    assert {case.name for case in most.leaders} <= set(again)
    unasked = by_name["interval clears a drift at the margin, other rates and margins"]
    assert not {case.name for case in unasked.leaders} & set(again)


def test_the_shipped_calibration_is_the_full_table_and_keeps_to_it():
    held = shipped_calibration()
    missed = [figure["what"] for figure in held["figures"] if figure["ok"] is False]
    assert (held["scale"], missed) == ("full", [])
    assert all(figure["slack"] == 0 for figure in held["figures"])


def test_the_results_page_shows_the_shipped_figures():
    page = RESULTS.read_text(encoding="utf-8")
    for f in shipped_calibration()["figures"]:
        assert f"| {f['row']} | {f['what']} | {f['asked']} | {f['value']:.4f} | {f['first']:.4f} |" in page


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """64 templates of two items, three seeds."""
    design = Design(arms=("dense", "naive"), seeds=(11, 12, 13), policies=("none",), clusters=64, items=128)
    return build(tmp_path_factory.mktemp("design") / "run", design)


def test_the_design_of_a_run_is_what_it_asked(small_run):
    found = designs(load_run(small_run))
    assert {d.suite for d in found} == {"refusal", "agent", "math"}
    assert {d.counts for d in found} == {(2,) * 64}
    assert {d.draws for d in found} == {3}


def test_the_design_of_a_run_is_simulated(tiny, small_run, tmp_path):
    done, out = calibrated(tmp_path, "--design", str(small_run))
    held = json.loads(out.read_text())
    assert done.exit_code == 0, done.output
    assert "stamp" not in held
    said = {figure["what"].partition(" items: ")[2] for figure in held["figures"]}
    assert said == {EQUAL, SPREAD, WHOLE, TWICE}


def test_uneven_templates_of_a_run_break_more_often_where_they_are_large():
    design = RunDesign("s", 192, (2, 3), 1, 0.9, 0.1, graded=False, margin=0.05, alpha=0.05)
    assert [case.what for case in design_cases([design], TINY)] == [EQUAL, SPREAD, WHOLE, LARGER, TWICE]


@pytest.mark.parametrize("rate", [0.0, 0.03, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("discordance", [0.0, 0.02, 0.6])
def test_any_rate_of_a_run_can_be_simulated(rate, discordance):
    design = RunDesign("s", 192, (2,) * 60, 1, rate, discordance, graded=False, margin=0.05, alpha=0.05)
    for case in design_cases([design], TINY):
        assert set(case.rates(1)) == {"passed", "failed"}


def test_a_run_that_is_none_is_one_line(tmp_path):
    done = CliRunner().invoke(app, ["--design", str(tmp_path / "none"), "--out", str(tmp_path / "x.json")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x.json").exists()
