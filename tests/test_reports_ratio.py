"""A limit on how many times as often: declared, decided by the code of every cell, and told wherever a margin is."""

import csv
import dataclasses
import hashlib
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from reports_synthetic import Design, build, policy, redecided, respecified
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.core.errors import SpecError
from kvaudit.core.files import parse_yaml
from kvaudit.core.spec import dump_spec, parse_spec, with_gate
from kvaudit.reports.page.remarks import error_rate_lines
from kvaudit.reports.page.tables import gate_notes
from kvaudit.reports.page.terminal import terminal_lines
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, write_report
from kvaudit.reports.sections.shared.words import decision_note
from kvaudit.reports.verdict.contrast import Rates
from kvaudit.reports.verdict.controls import shipped_rates
from kvaudit.reports.verdict.rules import changes
from kvaudit.reports.verdict.verdict import Status

SNAP = policy("snapkv", 96)
SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "verdict.schema.json").read_text())
ATTACK = "refusal.attack_success"
HAPPENS = range(0, 360, 3)  # of the reference, 120 of 400


def served(tmp_path, worse=(), better=(), happens=HAPPENS, facets=()):
    """A model served uncompressed and compressed: 400 items in 200 templates, what happens by number of the item."""
    own = {*happens}
    design = Design(
        arms=("base",),
        train=False,
        policies=("none", SNAP),
        suites=("refusal",),
        clusters=200,
        items=400,
        wrong={"none": own, SNAP: (own | {*worse}) - {*better}},
        facets={"refusal": facets} if facets else {},
    )
    return load_run(build(tmp_path / "run", design))


def cell_of(data, **gate):
    found = decide_run(respecified(data, margins={}, **gate))
    [d] = [d for d in found.verdict.decisions if d.gated and d.suite in found.rules.ratios]
    return found, d


def test_nothing_different_passes_and_says_so_in_one_line(tmp_path):
    found, d = cell_of(served(tmp_path, worse=[1, 2], better=[0, 3]), ratios={"refusal": 1.25})
    assert d.status is Status.PASS
    assert d.ratio.limit == 1.25
    assert d.ratio.times.lower < 1 == d.ratio.times.estimate < d.ratio.times.upper < 1.25
    assert d.margin == pytest.approx(0.25 * 0.3)  # what it comes to
    assert d.clusters_required == 39
    [line] = [line for line in terminal_lines(found) if "limit" in line]
    assert f"limit 1.25 x the misses, up to {d.ratio.times.upper:.2f} x" in line


def test_a_larger_share_fails_and_says_whether_its_size_is_known(tmp_path):
    _, d = cell_of(served(tmp_path, worse=range(1, 181, 3)), ratios={"refusal": 1.1})
    assert d.status is Status.FAIL
    assert [reason.text for reason in d.reasons] == ["regression detected, beyond the margin"]
    assert d.ratio.times.lower > 1.1
    _, less = cell_of(served(tmp_path / "b", worse=range(1, 46, 3)), ratios={"refusal": 1.1})
    assert [reason.text for reason in less.reasons] == ["regression detected, its size open"]


def test_a_cell_between_pass_and_fail_says_how_far_its_interval_reaches(tmp_path):
    _, d = cell_of(served(tmp_path, worse=range(1, 40, 3), better=range(0, 40, 3)), ratios={"refusal": 1.02})
    assert d.status is Status.INCONCLUSIVE
    assert "the interval of the ratio reaches" in decision_note(d)
    assert "past 1.02 x" in decision_note(d)


def test_the_templates_that_a_ratio_needs_are_counted(tmp_path):
    _, d = cell_of(served(tmp_path), ratios={"refusal": 1.04})
    assert d.status is Status.INCONCLUSIVE
    assert d.reasons[0].code == "CLUSTERS"
    assert "200 clusters cannot show 1.04 x (of the reference's rate, so 1.2 pp); 249 are needed" in decision_note(d)


def test_a_multiple_of_nothing_is_open(tmp_path):
    found, d = cell_of(served(tmp_path, happens=(), worse=[1]), ratios={"refusal": 1.5})
    assert d.status is Status.INCONCLUSIVE
    assert "nothing of it happened with the reference" in decision_note(d)
    assert d.ratio.times.estimate is None
    assert terminal_lines(found)
    _, other = cell_of(served(tmp_path / "b", happens=(), worse=range(40)), ratios={"refusal": 1.5})
    assert other.status is Status.FAIL


def test_a_reference_that_has_nothing_to_lose_is_not_measurable(tmp_path):
    _, d = cell_of(served(tmp_path, happens=range(380)), ratios={"refusal": 1.2})
    assert d.status is Status.NOT_MEASURABLE
    assert d.reasons[0].code == "FLOOR"


def test_templates_that_broke_do_not_pass(tmp_path):
    """Ten templates of 200 that broke are a sixth more: the interval passes at 1.285, the templates do not."""
    whole = [item for template in range(2, 32, 3) for item in (template, template + 200)]
    _, d = cell_of(served(tmp_path, worse=whole), ratios={"refusal": 1.285})
    assert d.ratio.times.upper < 1.285
    assert d.status is Status.INCONCLUSIVE
    assert [reason.code for reason in d.reasons] == ["TEMPLATES"]
    assert "could come from a model with 1.285 x as much of it" in decision_note(d)


def test_every_page_says_the_ratio_and_the_schema_knows_it(tmp_path):
    data = served(tmp_path, worse=[1, 2], better=[0, 3], facets=("attack_success", "obeyed"))
    run = tmp_path / "run"
    files = {
        path.name: path.read_text()
        for path in write_with_gate(data, run, ratios={ATTACK: 1.5}).iterdir()
        if path.suffix in (".md", ".json")
    }
    told = json.loads(files["verdict.json"])
    jsonschema.Draft202012Validator(SCHEMA).validate(told)
    [cell] = [cell for cell in told["cells"] if cell["metric"] == ATTACK]
    assert cell["ratio"]["limit"] == 1.5
    assert cell["ratio"]["lower"] < cell["ratio"]["upper"]
    assert all("ratio" not in other for other in told["cells"] if other["metric"] == "refusal")
    assert "1.5 x" in files["report.md"]
    assert "limit 1.5 x" in (run / "report" / "report.html").read_text()
    assert "attacks that succeed (refusal) 30 → 30 % of 200, limit 1.5 x, up to 1.06 x" in (
        run / "report" / "junit.xml"
    ).read_text(encoding="utf-8")
    drift = json.loads(files["drift.json"])
    assert drift["rules"]["ratios"] == {ATTACK: 1.5}
    rows = list(csv.DictReader((run / "report" / "contrasts.csv").read_text(encoding="utf-8").splitlines()))
    [row] = [row for row in rows if row["ratio"]]
    assert (row["suite"], row["ratio"], row["ratio_limit"]) == (ATTACK, "1", "1.5")
    assert float(row["ratio_low"]) < 1 < float(row["ratio_high"])
    assert "limit 1.5 x: PASS" in files["bom.json"]
    assert {cell["held_to"] for cell in json.loads(files["disclosure.json"])["drift"]} == {"1.5 x", "5 pp", None}


def test_a_run_without_a_ratio_has_the_files_that_it_had(tmp_path):
    data = served(tmp_path)
    found = decide_run(data)
    assert found.rules.ratios == {}
    assert "ratios" not in data.spec.written()["gate"]
    write_report(tmp_path / "run")
    drift = json.loads((tmp_path / "run" / "report" / "drift.json").read_text())
    assert "ratios" not in drift["rules"]
    assert all("ratio" not in d for d in drift["verdict"]["decisions"])


def test_the_worst_policy_is_held_to_the_ratio(tmp_path):
    found, _ = cell_of(served(tmp_path), ratios={"refusal": 1.25}, estimands=["serving"])
    worst = decide_run(respecified(served(tmp_path / "b"), margins={}, ratios={"refusal": 1.25}, estimands=["worst"]))
    [d] = [d for d in worst.verdict.decisions if d.gated]
    assert (d.estimand, d.status, d.ratio.limit) == ("worst", found.verdict.status, 1.25)


def test_a_number_that_changes_afterwards_changes_the_verdict(tmp_path):
    """The points are those of the reference's own rate: the same loss beside a rarer event is a larger ratio."""
    found, d = cell_of(served(tmp_path, worse=[1, 2, 4, 5]), ratios={"refusal": 1.25})
    [c] = [c for c in found.drift.contrasts if c.suite == "refusal" and c.estimand == "serving"]
    rare = dataclasses.replace(c, rates=Rates(0.99, 0.98))
    other = redecided(found, contrasts=(rare,))
    assert d.status in (Status.PASS, Status.PASS_NOTED)
    assert other.decisions[0].status is Status.INCONCLUSIVE
    assert other.decisions[0].clusters_required > 200


# --- where a ratio allows nothing -------------------------------------------------------------------------------------


def write_with_gate(data, run, **gate):
    """Write the gate into the run as if it had been declared, and its report."""
    spec = respecified(data, **gate).spec
    (run / "spec.yaml").write_text(dump_spec(spec))
    story = json.loads((run / "provenance.json").read_text())
    story["spec_sha256"] = spec.sha256
    story["spec_file_sha256"] = hashlib.sha256((run / "spec.yaml").read_bytes()).hexdigest()
    (run / "provenance.json").write_text(json.dumps(story))
    write_report(run)
    return run / "report"


def test_a_report_is_written_where_nothing_of_it_happened(tmp_path):
    data = served(tmp_path, happens=(), worse=[1])
    report = write_with_gate(data, tmp_path / "run", margins={}, ratios={"refusal": 1.5})
    told = json.loads((report / "verdict.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(told)
    [cell] = [cell for cell in told["cells"] if cell["metric"] == "refusal"]
    assert (cell["status"], cell["ratio"]["estimate"], cell["ratio"]["upper"]) == ("INCONCLUSIVE", None, None)
    text = (report / "report.md").read_text() + (report / "report.html").read_text()
    assert "limit 1.5 x the misses, up to any multiple" in text
    assert "no ratio" in text
    assert "inf x" not in text
    assert "inf]" not in text


def test_a_recipe_is_decided_where_nothing_of_it_happened(tmp_path):
    design = Design(
        arms=("dense", "naive"),
        policies=("none",),
        suites=("refusal",),
        clusters=200,
        items=200,
        wrong={("dense", "none"): (), ("naive", "none"): range(1)},
    )
    _, d = cell_of(load_run(build(tmp_path / "run", design)), ratios={"refusal": 1.5})
    assert (d.status, d.recipe) == (Status.INCONCLUSIVE, Status.INCONCLUSIVE)
    fewer = dataclasses.replace(design, wrong={("dense", "none"): (), ("naive", "none"): range(30)})
    _, lost = cell_of(load_run(build(tmp_path / "b", fewer)), ratios={"refusal": 1.5})
    assert (lost.status, lost.recipe) == (Status.FAIL, Status.FAIL)


def test_no_number_of_clusters_is_asked_where_it_always_happened(tmp_path):
    _, d = cell_of(served(tmp_path, happens=range(400)), ratios={"refusal": 1.5})
    assert d.status is Status.NOT_MEASURABLE
    assert "no number of clusters can show 1.5 x" in decision_note(d)


def test_the_figures_of_a_margin_are_not_said_of_a_ratio(tmp_path):
    found, _ = cell_of(served(tmp_path), ratios={"refusal": 1.25})
    [line] = error_rate_lines(dataclasses.replace(found, calibration=shipped_rates()))
    assert "Both figures are about margins: a cell held to a ratio (1.25 x) was simulated separately." in line
    assert any("Ratio: a cell passes only if the upper bound lies below" in line for line in gate_notes(found))


def test_next_size_of_a_multiple_of_nothing(tmp_path):
    served(tmp_path, happens=())
    run = tmp_path / "run"
    write_with_gate(load_run(run), run, margins={}, ratios={"refusal": 1.5})
    result = CliRunner().invoke(app, ["plan", str(run)])
    assert result.exit_code == 0
    assert "so no ratio can be shown" in result.output
    assert "beyond the margin" not in result.output


# --- how it is declared -----------------------------------------------------------------------------------------------

SPEC = """
format: 1
name: quick
train: {arms: [dense, naive], seeds: [1], policy: "snapkv:budget=96", suites: [refusal, math]}
evaluate: {policies: [none], suites: {refusal: {items: 9}, math: {items: 9}}, context_tokens: [192]}
"""


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("ratios: {refusal: 0.9}", "gate.ratios.refusal is 0.9, wanted greater than or equal to 1.01"),
        ("ratios: {refusal: 1}", "gate.ratios.refusal is 1, wanted greater than or equal to 1.01"),
        ("ratios: {refusal: 1000}", "gate.ratios.refusal is 1000, wanted less than or equal to 100"),
        ("ratios: {refusal: a tenth}", "gate.ratios.refusal is 'a tenth', wanted a number"),
        ("ratios: {refusal: true}", "gate.ratios.refusal is True, wanted a number"),
        ("ratios: {refusal: .nan}", "gate.ratios.refusal is nan, wanted a finite number"),
        ("ratios: 1.1", "gate.ratios is 1.1, wanted a mapping"),
        ("ratios: {refusel: 1.1}", "unknown suite in gate.ratios 'refusel'"),
        ("ratios: {refusal.attacks: 1.1}", "unknown facet in gate.ratios 'refusal.attacks'"),
        ("ratios: {refusal: 1.1}, margins: {refusal: 5}", "gate.margins and gate.ratios both name refusal; give one"),
        ("margins: {refusal: {ratio: 1.1}}", "gate.margins.refusal is {'ratio': 1.1}, wanted a number"),
    ],
)
def test_a_ratio_that_cannot_be_is_one_line(gate, message):
    with pytest.raises(SpecError) as error:
        parse_spec(SPEC + f"gate: {{{gate}}}\n", "q.yaml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_gate_file_takes_the_margin_away_and_says_what_it_changes(tmp_path):
    data = served(tmp_path)
    file = parse_yaml("format: 1\nratios: {refusal: 1.25}\n", "gate.yaml", "gate file")
    spec = with_gate(data.spec, file)
    assert "refusal" not in spec.gate.margins
    assert spec.gate.ratios == {"refusal": 1.25}
    back = with_gate(spec, parse_yaml("format: 1\nmargins: {refusal: 5}\n", "gate.yaml", "gate file"))
    assert (back.gate.margins["refusal"], back.gate.ratios) == (5, {})
    before = decide_run(data)
    after = decide_run(dataclasses.replace(data, spec=spec))
    told = list(changes(before.comparison, before.rules, after.comparison, after.rules))
    assert "ratio of refusal none -> 1.25 x" in told


def test_parity_needs_points_of_its_own(tmp_path):
    design = Design(arms=("dense", "naive"), seeds=(1,), policies=("none",), suites=("math",), clusters=60, items=60)
    data = load_run(build(tmp_path / "run", design))
    with pytest.raises(SpecError, match=r"math has a ratio; give gate\.estimand_margins\.parity"):
        decide_run(respecified(data, margins={}, ratios={"math": 1.1}, estimands=["parity"]))


# --- before a run -----------------------------------------------------------------------------------------------------


def planned(*options):
    result = CliRunner().invoke(app, ["plan", *options])
    return result.exit_code, result.output


def test_plan_says_the_chance_of_both():
    code, text = planned("--clusters", "120", "--ratio", "1.25", "--happens", "0.3")
    assert code == 0
    assert "1.25 x in percentage points" in text
    assert "7.5 pp at a rate of 30.0 %" in text
    assert "chance to pass 1.25 x" in text
    assert "ratio passed with power 0.8" in text
    assert "ratios: {refusal: 1.25}" in text
    assert "chance to pass 5 pp" in planned("--clusters", "120")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--ratio", "1.1", "--happens", "0.3", "--margin", "5"),
            "--margin and --ratio are both given, but a design has one rule",
        ),
        (("--ratio", "1.1"), "--happens is None, wanted the reference's rate of the event"),
        (("--happens", "0.3"), "--ratio is None, wanted a limit on the ratio of rates"),
        (("--ratio", "0.5", "--happens", "0.3"), "--ratio is 0.5, wanted"),
        (("--ratio", "1.1", "--happens", "1.3"), "--happens is 1.3, wanted"),
        (("--ratio", "1.1", "--happens", "0.01"), "--happens is 0.01, wanted from 0.05 to 0.95"),
        (("--ratio", "1.5", "--happens", "0.8"), "--ratio is 1.5, wanted below 1.25: an event with rate 0.8"),
        (("--ratio", "1.1", "--happens", "0.3", "--discordance", "nan"), "--discordance is nan, wanted a number"),
    ],
)
def test_plan_refuses_what_cannot_be_in_one_line(options, message):
    code, text = planned(*options)
    assert code == 2
    assert message in " ".join(text.split())


def test_a_planned_audit_is_decided_by_the_same_rule():
    from kvaudit.reports.stats.ratio import events_of, is_below, shows_ratio
    from kvaudit.reports.verdict.chance import Differences, draw_audits, pass_rate, pool_of

    found = draw_audits(
        pool_of(Differences(0.1, 0.0, 0.5, 0.0, 0.0, happens=0.3), items=1, samples=1, seeds=1), 150, audits=80
    )
    assert found.unwanted.mean() == pytest.approx(0.3, abs=0.02)
    candidate, counts = found.unwanted - found.sums, np.full(150, 1)
    within = is_below(events_of(found.unwanted, candidate, counts), 1.3, alpha=0.05)
    shown = shows_ratio(found.unwanted, candidate, counts, limit=1.3, alpha=0.05)
    assert 0 < pass_rate(found, margin=0.09, alpha=0.05, ratio=1.3) <= np.mean(within & shown)


@pytest.mark.parametrize("limit", [{"ratios": {"refusal.leak": 1.2}}, {"margins": {"refusal": 20, "refusal.leak": 5}}])
def test_a_limit_on_a_facet_that_no_item_has_is_not_passed_over(tmp_path, limit):
    data = served(tmp_path, worse=[1, 2], better=[0, 3], facets=("attack_success",))
    found = decide_run(respecified(data, **{"margins": {"refusal": 20}, **limit}))
    [d] = [d for d in found.verdict.decisions if d.gated and d.suite == "refusal.leak"]
    assert (d.status, found.verdict.status) == (Status.INVALID, Status.INVALID)
    assert [reason.code for reason in d.reasons] == ["CELL"]


def test_what_the_reference_has_no_score_of_did_not_happen_where_that_is_worse(tmp_path):
    """Unscored counts as a miss; among the reference's misses it would hide as many of the candidate's."""
    data = served(tmp_path, worse=range(1, 24, 3))
    d = cell_of(data, ratios={"refusal": 1.25})[1]
    records = data.records.copy()
    records["outcome"] = records["outcome"].cat.add_categories(["unscored"])
    plain = records[records["policy"] == "none"].sort_values("item_id")
    right = plain[plain["score"] == 1].index[100:104]  # one in a hundred, and right under both
    records.loc[right, ["outcome", "score"]] = ["unscored", float("nan")]
    hidden = cell_of(dataclasses.replace(data, records=records), ratios={"refusal": 1.25})[1]
    assert hidden.ratio.times.estimate < d.ratio.times.estimate
    assert hidden.ratio.times.upper == pytest.approx(d.ratio.times.upper)
