"""What the first page says beside the number: what to do, and which seed lost by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reports_synthetic import spec_of
from test_reports_drift import data_of, scored, small

from kvaudit.reports.page.banner import banner_lines, to_do
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.run import decide_run
from kvaudit.reports.sections.training import curves
from kvaudit.reports.verdict.verdict import Status

CLUSTERS = 80


def run_with(score, *, seeds=(1,), clusters=CLUSTERS):
    design = small(
        policies=("none",), seeds=seeds, clusters=clusters, items=2 * clusters, primary=("none",),
        margins={"refusal": 5.0},
    )  # fmt: skip
    return decide_run(data_of(scored(design, score), spec_of(design)))


@pytest.mark.parametrize(("lost", "said"), [(16, True), (4, False)])
def test_a_seed_that_lost_more_than_the_margin_by_itself_is_named_on_the_first_page(lost, said):
    """Every tenth item in one of three seeds averages to -3.3 pp."""
    score = lambda arm, seed, _p, i: not (arm == "naive" and seed == 2 and i % 160 < lost)  # noqa: E731
    found = run_with(score, seeds=(1, 2, 3))
    assert found.verdict.status is not Status.FAIL
    lines = [line for line in banner_lines(found, found.verdict.head) if line.startswith("One seed alone")]
    assert bool(lines) is said
    if said:
        assert "lost more than the margin: naive @ none, refusal, seed 2: -10.0 pp [" in lines[0]


def test_what_to_do_at_the_floor_is_another_suite_not_more_items():
    found = run_with(lambda *_: False)
    assert found.verdict.status is Status.NOT_MEASURABLE
    assert "by this run (NOT MEASURABLE): use suites that can show a loss" in to_do(found)


def test_what_to_do_about_an_open_cell_is_a_larger_run():
    assert "size the next run with kvaudit plan" in to_do(run_with(lambda *_: True, clusters=20))


def test_what_to_do_about_an_invalid_run_clears_nobody():
    found = run_with(lambda *_: True, clusters=4)
    assert found.verdict.status is Status.INVALID
    assert to_do(found) == "What to do: fix the records or the comparison; nothing is decided."


def test_alarms_of_training_and_a_declared_stop_stand_under_the_banner():
    told = {"stopped": {"11": "at step 20 of 60: naive rang ess"}}
    rung = {("naive", 1): [{"step": 1, "alarm/ess": 1}, {"step": 2, "alarm/ess": 0}], ("dense", 1): [{"step": 1}]}
    found = replace(
        run_with(lambda *_: True, clusters=20), values={"training": curves(rung, ("dense", "naive"))}, provenance=told
    )
    lines = [line for line in remarks(found) if "training" in line]
    assert lines == [
        "ALARM in training: naive; see Training for what to do.",
        "STOPPED in training, as declared: all arms of seed 11 end at step 20 of 60: naive rang ess.",
    ]
