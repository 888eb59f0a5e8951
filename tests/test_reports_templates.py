"""Templates that broke altogether: what the gate says of them, from records to words."""

from __future__ import annotations

import pytest
from reports_synthetic import spec_of
from test_reports_drift import data_of, scored, small

from kvaudit.reports.page.remarks import cautions
from kvaudit.reports.run import decide_run
from kvaudit.reports.verdict.verdict import Status

SEEDS = (1, 2, 3, 4)


def run_with(broken, *, clusters=80, margin=5.0):
    """Two items a template, four seeds; ``broken`` templates lost all, one answer in 28 flips either way."""
    design = small(
        policies=("none",), seeds=SEEDS, clusters=clusters, items=2 * clusters, primary=("none",),
        margins={"refusal": margin},
    )  # fmt: skip

    def score(arm, seed, _policy, item):
        if item % clusters < broken and arm == "naive":
            return False
        return not (seed == SEEDS[0] and item % 7 == (3 if arm == "naive" else 5))

    return decide_run(data_of(scored(design, score), spec_of(design)))


def gated(report):
    [decision] = [d for d in report.verdict.decisions if d.gated]
    return decision


def test_one_broken_template_of_eighty_is_inconclusive_though_its_interval_is_within_the_margin():
    d = gated(run_with(1))
    assert d.effect.lower > -0.05
    assert d.status is Status.INCONCLUSIVE
    assert [reason.code for reason in d.reasons] == ["TEMPLATES"]
    assert d.template_bound == pytest.approx(-0.0516, abs=0.002)


def test_none_broken_passes_and_the_page_says_what_templates_leave_open():
    report = run_with(0)
    d = gated(report)
    assert d.status is Status.PASS
    assert -0.05 < d.template_bound < -0.02
    [said] = [line for line in cautions(report, d) if line.startswith("Broken templates")]
    assert f"a loss of {-100 * d.template_bound:.2f} pp is not (naive @ none, refusal)" in said


def test_a_cell_that_its_templates_keep_open_is_said_to_be():
    report = run_with(1)
    [said] = [line for line in cautions(report, gated(report)) if line.startswith("Broken templates")]
    assert "allow a loss beyond the margin, up to 5.31 pp (naive @ none, refusal): the data cannot tell." in said


def test_eight_broken_templates_fail():
    d = gated(run_with(8))
    assert d.status is Status.FAIL
    assert d.template_bound is None


def test_a_recipe_passes_no_sooner_than_its_checkpoints():
    assert gated(run_with(1)).recipe is Status.INCONCLUSIVE
    assert gated(run_with(0)).recipe is Status.PASS
