"""A run as it is decided: a gate file that came after it is never milder, human labels decide the cells they are of."""

import dataclasses
import hashlib
import json

import pytest
import yaml
from reports_synthetic import Design, build, policy
from typer.testing import CliRunner

from audit.cli import app
from reports.formats import markdown
from reports.gate import Status, decide
from reports.gate_file import Asked, load_gate_file
from reports.load import load_run
from reports.run_report import run_report

SNAP = policy("snapkv", 96)


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """naive loses 30 points of refusal uncompressed; everything else holds."""
    design = Design(
        arms=("dense", "naive"),
        seeds=(1,),
        policies=("none", SNAP),
        suites=("refusal",),
        seed_sd=0.0,
        items=600,
        clusters=100,
        drops={("naive", "refusal"): 0.3},
        estimands=("E1",),
    )
    return build(tmp_path_factory.mktemp("runs") / "run", design)


@pytest.fixture(scope="module")
def passing(tmp_path_factory):
    design = Design(
        arms=("dense", "smd"),
        seeds=(1,),
        policies=("none",),
        suites=("refusal",),
        seed_sd=0.0,
        items=600,
        clusters=100,
        estimands=("E1",),
    )
    return build(tmp_path_factory.mktemp("runs") / "run", design)


def gate_file(folder, text):
    path = folder / "gate.yaml"
    path.write_text("format: 1\n" + text)
    return path


def decided(run, path, **more):
    report = run_report(load_run(run), Asked(gate=load_gate_file(path), **more))
    return report, decide(report)


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("text", ["margins: {refusal: 60}\n", "primary: [none]\nmargins: {refusal: 60}\n"])
def test_a_gate_file_after_the_run_never_makes_fail_a_pass(failing, tmp_path, text):
    path = gate_file(tmp_path, text)
    report, verdict = decided(failing, path)
    assert (verdict.status, verdict.exit_code) == (Status.FAIL, 3)
    assert report.plan.margins == {"refusal": 0.05}
    assert (report.other_rules.status, report.other_rules.exit_code) == ("PASS*", 0)
    assert "margin refusal 5 pp -> 60 pp" in verdict.annotations[0]
    said = "By gate.yaml the verdict would be PASS* (exit 0), by the rules that the run began with it is FAIL, "
    assert verdict.annotations[1].startswith(f"{said}which counts.")
    done = call("gate", failing, "--gate", path)
    assert done.exit_code == 3
    assert "By gate.yaml the verdict would be PASS* (exit 0)" in done.output
    assert "verdict: FAIL" in done.output


def test_a_gate_file_after_the_run_never_hides_an_invalid_cell(tmp_path):
    design = Design(arms=("dense", "smd"), seeds=(1,), policies=("none", SNAP), suites=("refusal",), items=600)
    run = build(tmp_path / "run", dataclasses.replace(design, clusters=100, seed_sd=0.0, estimands=("E1",)))
    hidden = next(
        unit
        for unit in sorted((run / "records").glob("smd-*.jsonl"))
        if json.loads(unit.read_text().splitlines()[0])["policy"] == SNAP
    )
    hidden.unlink()
    hidden.with_name(hidden.name.removesuffix(".jsonl") + ".done.json").unlink()
    report, verdict = decided(run, gate_file(tmp_path, "primary: [none]\n"))
    assert (verdict.status, verdict.exit_code) == (Status.INVALID, 5)
    assert report.other_rules is not None


def test_a_gate_file_after_the_run_may_be_stricter(passing, tmp_path):
    report, verdict = decided(passing, gate_file(tmp_path, "margins: {refusal: 1}\n"))
    assert (verdict.status, verdict.exit_code) == (Status.INCONCLUSIVE, 4)
    assert report.plan.margins == {"refusal": 0.01}
    assert "By the rules the run began with (spec.yaml) the verdict is PASS (exit 0)" in verdict.annotations[1]
    text = markdown.render(report)
    assert "rules that were declared after the run, no milder than those it began with" in text
    assert "fixed before the numbers were seen" not in text


def test_an_open_verdict_stays_blocked_by_a_profile_that_came_after(passing, tmp_path):
    spec = yaml.safe_load((passing / "spec.yaml").read_text())
    data = dataclasses.replace(load_run(passing), spec={**spec, "gate": {**spec["gate"], "margins": {"refusal": 1}}})
    path = gate_file(tmp_path, "profile: pr\n")
    verdict = decide(run_report(data, Asked(gate=load_gate_file(path))))
    assert (verdict.status, verdict.exit_code) == (Status.INCONCLUSIVE, 4)


def test_a_gate_file_kept_with_the_run_decides_alone(failing):
    text = "format: 1\nmargins: {refusal: 60}\n"
    kept = {"name": "gate.yaml", "sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
    data = load_run(failing)
    report = run_report(dataclasses.replace(data, provenance={**data.provenance, "gate_file": kept}))
    assert report.other_rules is None
    assert decide(report).status is Status.PASS_NOTED


def test_a_run_that_declares_no_gate_is_decided_by_the_file(failing, tmp_path):
    data = load_run(failing)
    bare = dataclasses.replace(data, spec={key: value for key, value in data.spec.items() if key != "gate"})
    path = gate_file(tmp_path, "reference: dense\nmargins: {refusal: 60}\nestimands: [E1]\n")
    report = run_report(bare, Asked(gate=load_gate_file(path)))
    assert report.other_rules is None
    assert decide(report).status is Status.PASS_NOTED
