"""``kvaudit calibrate``, and the calibration that ships."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from audit.cli import app
from reports.calibration import table
from reports.calibration.case import FULL, Scale
from reports.calibration.checks import families, intervals
from reports.calibration.run import simulate
from reports.calibration.sources import SOURCES, code_hash, code_only, source_hashes
from reports.calibration.stamp import shipped, stamp
from reports.calibration.table import all_cases
from reports.page.words import error_rates

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "calibration.md"
TINY = Scale("tiny", 0.01, every_case=False, slack=6.0, confirms=False)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("reports.calibration.case.FAST", TINY)


def calibrated(tmp_path, *words):
    out = tmp_path / "calibration.json"
    done = CliRunner().invoke(app, ["calibrate", "--fast", "--workers", "1", "--out", str(out), *words])
    return done, out


def test_it_prints_the_table_and_writes_the_figures(tiny, tmp_path):
    done, out = calibrated(tmp_path, "--seed", "4")
    assert done.exit_code == 0, done.output
    held = json.loads(out.read_text())
    assert (held["seed"], held["scale"], held["ok"]) == (4, "tiny", True)
    assert {figure["row"] for figure in held["figures"]} == set(range(1, 11))
    assert held["sources"] == source_hashes()
    assert "every figure keeps to what was asked" in done.output
    assert f"calibrate {len(all_cases(TINY))}/{len(all_cases(TINY))}" in done.stderr
    assert str(out) in done.stdout.replace("\n", "")


def test_a_figure_that_misses_exits_with_three(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("reports.stats.rule.clusters_required", lambda margin, alpha: 1)
    done, out = calibrated(tmp_path)
    assert done.exit_code == 3, done.output
    assert json.loads(out.read_text())["ok"] is False
    assert "miss what was asked" in done.output


@pytest.mark.parametrize("place", ["", "file/x.json"])
def test_a_place_that_cannot_be_written_is_one_line_before_anything_is_simulated(tiny, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("reports.calibration.table.calibrate", None)
    done = CliRunner().invoke(app, ["calibrate", "--fast", "--out", str(tmp_path / place)])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --out is ")
    assert done.stderr.count("\n") == 1


def test_a_folder_for_the_figures_is_made(tiny, tmp_path):
    done, _ = calibrated(tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "new" / "calibration.json").exists()


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
    now, then = source_hashes(), shipped()["sources"]
    stale = [name for name in SOURCES if now[name] != then.get(name)]
    assert not stale, "changed since: make it again with kvaudit calibrate --out reports/calibration/calibration.json"


def test_the_stamp_quotes_the_shipped_figures():
    said = stamp()
    figures = {figure["what"]: (figure["value"], figure["first"]) for figure in shipped()["figures"]}
    assert said.false_pass_mean == figures["gate passes at the margin, C >= C_min, mean"][0]
    assert said.false_pass_max == max(figures["gate passes at the margin, C >= C_min, any design"])
    assert said.type_one_max == max(figures["two-sided false alarms without drift, any design"])
    assert said.coverage_min == min(figures["coverage of the 95 % interval, any drift and design"])
    release = "same at the release level .025"
    at_release = [f for f in shipped()["figures"] if f["what"] == release]
    assert said.release_max == max(max(f["value"], f["first"]) for f in at_release if f["row"] == 2)
    assert said.beyond_max == max(figures["interval clears a drift at the margin, other rates and margins"])
    broken = [(f["most_extreme"][0], max(f["value"], f["first"])) for f in shipped()["figures"] if f["row"] == 4]
    assert said.broken_templates_max == max(rate for name, rate in broken if "alpha=0.05" in name)
    assert said.broken_templates_release_max == max(rate for name, rate in broken if "alpha=0.025" in name)
    sentence = error_rates(said, 0.05, [0.05])
    percent, count = re.search(r"falsely passes ([\d.]+) % of ([\d,]+) simulated", sentence).groups()
    assert float(percent) == pytest.approx(100 * said.false_pass_mean, abs=0.051)
    assert int(count.replace(",", "")) == said.false_pass_simulations > 0


@pytest.mark.parametrize(
    ("alpha", "margins", "begins", "lacks"),
    [
        (
            0.05,
            [0.05, 0.05],
            "At level 0.05, a margin of 5 pp and a reference at 85 %, the gate falsely",
            "not simulated",
        ),
        (0.025, [0.05], "At level 0.025, a margin of 5 pp and a reference at 85 %, the gate's interval", "5.1 %"),
        (0.05, [0.05, 0.03], "The gate was not simulated at a margin of 3 pp. At level 0.05,", "this level"),
        (0.49, [0.05], "The gate was not simulated at this level (0.49). At level 0.05,", "pp. At"),
        (0.0125, [0.5], "The gate was not simulated at this level (0.0125) or at a margin of 50 pp. At", "0.025"),
    ],
)
def test_the_stamp_says_what_it_was_simulated_at_and_what_it_is_not_about(alpha, margins, begins, lacks):
    said = error_rates(stamp(), alpha, margins)
    assert said.startswith(begins)
    assert lacks not in said


def test_the_stamp_names_what_went_worse_at_the_level_of_the_gate():
    said = stamp()
    for alpha, worse in ((0.05, said.broken_templates_max), (0.025, said.broken_templates_release_max)):
        text = error_rates(said, alpha, [0.05])
        assert f"up to {100 * worse:.1f} % where 5 % of templates break altogether" in text
        assert f"{100 * said.beyond_max:.1f} % (the interval, level 0.05) with a reference at 98 %" in text
    assert f"at most {100 * said.release_max:.1f} % " in error_rates(said, 0.025, [0.05])


def test_words_about_code_do_not_make_a_calibration_stale():
    one = '"""A."""\n\nX = "#"  # why\n\n\ndef f():\n    """Say."""\n    return 1\n'
    two = '"""Another."""\nX = "#"\n\ndef f():\n    # more\n    """Say\n    at length."""\n    return 1\n'
    assert code_only(one) == 'X = "#"\ndef f():\n    return 1'
    assert code_hash(one) == code_hash(two) != code_hash(one.replace("1", "2"))


def test_the_full_table_repeats_what_decides_and_nothing_else(monkeypatch):
    scale = Scale("tiny", 0.005, every_case=False, slack=0.0, confirms=True)
    monkeypatch.setattr(table, "CHECKS", tuple(c for c in table.CHECKS if c.cases is not families.cases))
    seen = []
    done = table.calibrate(scale, seed=1, workers=1, progress=lambda _, name: seen.append(name))
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
    held = shipped()
    missed = [figure["what"] for figure in held["figures"] if figure["ok"] is False]
    assert (held["scale"], missed) == ("full", [])
    assert all(figure["slack"] == 0 for figure in held["figures"])


def test_the_results_page_shows_the_shipped_figures():
    page = RESULTS.read_text(encoding="utf-8")
    for f in shipped()["figures"]:
        assert f"| {f['row']} | {f['what']} | {f['asked']} | {f['value']:.4f} | {f['first']:.4f} |" in page
