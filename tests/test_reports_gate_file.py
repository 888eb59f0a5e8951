"""Gate files, waivers and what is done with INCONCLUSIVE: what they change, what they may not, bad input."""

import dataclasses
import hashlib
import json
from datetime import date
from pathlib import Path

import pytest
from report_text import page_text
from reports_synthetic import Design, build, loaded, policy, redecided, respecified

from kvaudit.core.errors import AuditError, DataError, SpecError
from kvaudit.reports import run as way
from kvaudit.reports.page.formats import markdown
from kvaudit.reports.page.formats.json_files import render_drift
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.page.run_page import page_of, run_banner
from kvaudit.reports.records.load import load_run
from kvaudit.reports.verdict.reasons import Reason
from kvaudit.reports.verdict.rules import GateOverrides, declared_rules, load_gate_file
from kvaudit.reports.verdict.verdict import Status, active_waivers, read_waivers

SNAP = policy("snapkv", 96)
TODAY = date(2026, 5, 1)
WAIVER = """\
waivers:
- who: Ada Byron
  why: known, mended on the branch that ships
  expires: 2026-12-31
  status: [FAIL]
  cells: {{suite: refusal, arm: {arm}}}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """naive fails on refusal, smd passes; on math both are open."""
    design = Design(
        arms=("dense", "naive", "smd"),
        seeds=(1,),
        policies=("none", SNAP),
        suites=("refusal", "math"),
        seed_sd=0.0,
        items=600,
        clusters=100,
        drops={("naive", "refusal"): 0.3},
        estimands=("alike",),
        margins={"refusal": 5, "math": 5},
    )
    return load_run(build(tmp_path_factory.mktemp("runs") / "run", design))


@pytest.fixture(scope="module")
def comparison(data):
    """What the cells of a waiver are looked up in."""
    return declared_rules(data, GateOverrides())[0]


def gate_file(tmp_path, text, name="gate.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return load_gate_file(path)


def decided(data, **asked):
    report = way.decide_run(data, GateOverrides(today=TODAY, **asked))
    return report, report.verdict


def gated(verdict):
    return {(d.arm, d.policy, d.suite): d for d in verdict.decisions if d.gated}


def test_a_gate_file_decides_and_says_that_it_came_after_the_run(data, tmp_path):
    text = "format: 1\nprofile: release\nmargins: {refusal: 8}\nprimary: [none]\n"
    report, verdict = decided(data, gate=gate_file(tmp_path, text))
    sha = hashlib.sha256(text.encode()).hexdigest()
    assert report.rules.sha256 == sha
    assert report.rules.alpha == 0.025
    assert report.rules.margins == {"refusal": 0.08, "math": 0.05}
    assert {p for _, p, _ in gated(verdict)} == {"none"}
    [line] = [line for line in run_banner(report).lines if line.startswith("Gate: ")]
    assert f"gate.yaml, sha256 {sha[:12]}, declared after the run, which changes profile none -> release; alpha" in line
    assert "margin refusal 5 pp -> 8 pp" in line
    assert "gated policies none, snapkv 96 -> none" in line
    assert sha in render_drift(page_of(report))
    assert "declared after the run" in markdown.render(page_of(report))


def test_a_gate_file_kept_with_the_run_is_declared_with_it(data, tmp_path):
    text = "format: 1\nprofile: release\n"
    kept = {"name": "gate.yaml", "sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
    run = dataclasses.replace(data, provenance={**data.provenance, "gate_file": kept})
    for asked in ({}, {"gate": gate_file(tmp_path, text)}):
        report, _ = decided(run, **asked)
        assert report.rules.alpha == 0.025
        [line] = [line for line in remarks(report) if line.startswith("Gate: ")]
        assert line.endswith("declared with the run.")
    other = decided(run, gate=gate_file(tmp_path, text + "# the same rules\n"))[0]
    assert "declared after the run, which changes nothing that decides." in next(remarks(other))
    milder = decided(run, gate=gate_file(tmp_path, text.replace("release", "pr")))[0]
    assert "profile release -> pr" in next(remarks(milder))
    forged = {**kept, "text": text + "margins: {refusal: 50}\n"}
    with pytest.raises(DataError, match="does not match its recorded sha256"):
        decided(dataclasses.replace(data, provenance={**data.provenance, "gate_file": forged}))


def test_a_run_whose_kept_gate_file_is_gone_is_refused(data):
    with pytest.raises(DataError, match=r"provenance\.json holds none"):
        decided(respecified(data, gate_file="gate.yaml"))


def small(tmp_path, **more):
    """30 templates: every cell is open."""
    options = {"arms": ("dense", "smd"), "seeds": (1,), "policies": ("none",), "suites": ("refusal",), "clusters": 30}
    return loaded(tmp_path / "small", Design(**{**options, "items": 120, **more}))


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("", Status.INCONCLUSIVE, 4),  # no profile: as ever
        ("profile: release\n", Status.INCONCLUSIVE, 4),
        ("profile: pr\n", Status.INCONCLUSIVE, 0),
        ("profile: pr\non_inconclusive: block\n", Status.INCONCLUSIVE, 4),
        ("profile: release\non_inconclusive: warn\n", Status.INCONCLUSIVE, 0),
    ],
)
def test_exit_code_of_an_open_verdict(tmp_path, text, status, code):
    report, verdict = decided(small(tmp_path), gate=gate_file(tmp_path, "format: 1\n" + text))
    assert (verdict.status, verdict.exit_code) == (status, code)
    assert any(line.startswith("WARNING: the gate lets INCONCLUSIVE through") for line in remarks(report)) == (
        code == 0
    )


def test_the_command_line_has_the_last_word_on_inconclusive(tmp_path):
    run = small(tmp_path)
    assert decided(run, on_inconclusive="warn")[1].exit_code == 0
    loud = decided(run, gate=gate_file(tmp_path, "format: 1\nprofile: pr\n"), on_inconclusive="block")[1]
    assert loud.exit_code == 4


def test_warn_downgrades_neither_fail_nor_invalid(data, tmp_path):
    report, verdict = decided(data, on_inconclusive="warn")
    assert (verdict.status, verdict.exit_code) == (Status.FAIL, 3)
    broken = redecided(report, reasons=(Reason("HASH", "two weights"),))
    assert (broken.status, broken.exit_code) == (Status.INVALID, 5)


def waivers(tmp_path, text):
    path = tmp_path / "waivers.yaml"
    path.write_text(text)
    return read_waivers(path)


def test_a_waiver_lets_a_fail_through_and_keeps_it_in_sight(data, tmp_path):
    report, verdict = decided(data, waivers=waivers(tmp_path, WAIVER.format(arm="naive")))
    cells = [d for d in gated(verdict).values() if d.waiver]
    assert {(d.arm, d.suite, d.status, d.standing) for d in cells} == {("naive", "refusal", Status.FAIL, Status.WAIVED)}
    assert (verdict.unwaived, verdict.status) == (Status.FAIL, Status.WAIVED)
    assert verdict.exit_code == 0
    text = page_text(page_of(report))
    assert "Ada Byron" in text
    assert "FAIL, waived" in text
    assert "Without waivers the verdict is FAIL." in text
    body = json.loads(render_drift(page_of(report)))["verdict"]
    assert (body["status"], body["unwaived"]) == ("WAIVED", "FAIL")
    assert {(d["status"], d["waiver"]["who"]) for d in body["decisions"] if d["waiver"]} == {("FAIL", "Ada Byron")}


def test_a_waiver_that_fits_nothing_does_nothing_and_says_so(data, tmp_path):
    report, verdict = decided(data, waivers=waivers(tmp_path, WAIVER.format(arm="smd")))
    assert (verdict.status, verdict.exit_code) == (Status.FAIL, 3)
    assert any("matches no cell and does nothing" in line for line in remarks(report))


def test_a_waiver_of_inconclusive_waives_no_fail(data, tmp_path):
    text = WAIVER.format(arm="naive").replace("[FAIL]", "INCONCLUSIVE")
    assert decided(data, waivers=waivers(tmp_path, text))[1].status is Status.FAIL


def test_a_waiver_never_silences_invalid(data, tmp_path):
    every = WAIVER.format(arm="naive").replace("[FAIL]", "[FAIL, INCONCLUSIVE]")
    report, _ = decided(data, waivers=waivers(tmp_path, every))
    blank = tuple(
        dataclasses.replace(c, effect=None, recipe=None, rates=None, sums=(), reasons=(Reason("HASH", "two weights"),))
        if c.arm == "naive" and c.suite == "refusal"
        else c
        for c in report.drift.contrasts
    )
    verdict = redecided(report, contrasts=blank)
    assert (verdict.status, verdict.exit_code) == (Status.INVALID, 5)
    assert not [d for d in verdict.decisions if d.waiver]


def test_a_waiver_holds_through_its_last_day(data, tmp_path):
    file = waivers(tmp_path, WAIVER.format(arm="naive"))
    last = GateOverrides(waivers=file, today=date(2026, 12, 31))
    assert way.decide_run(data, last).verdict.status is Status.WAIVED
    with pytest.raises(SpecError, match=r"waiver 1 by Ada Byron expired on 2026-12-31 \(today is 2027-01-01\)"):
        way.decide_run(data, GateOverrides(waivers=file, today=date(2027, 1, 1)))


def test_a_waiver_by_policy_does_not_reach_the_worst_of_several(data, tmp_path):
    gate = gate_file(tmp_path, f"format: 1\nestimands: [worst]\ndeployable: [none, '{SNAP}']\n")
    [worst] = [d for d in decided(data, gate=gate)[1].decisions if d.gated and d.status is Status.FAIL]
    by_policy = WAIVER.format(arm="naive").replace("arm: naive", f"policy: '{worst.policy}'")
    assert decided(data, gate=gate, waivers=waivers(tmp_path, by_policy))[1].status is Status.FAIL
    by_estimand = WAIVER.format(arm="naive").replace("arm: naive", "estimand: worst")
    assert decided(data, gate=gate, waivers=waivers(tmp_path, by_estimand))[1].status is not Status.FAIL


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{n}: &{n} [{', '.join([f'*{m}'] * 9)}]\n" for m, n in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile: pr", "format is None, wanted 1"),
        ("format: 2", "format is 2, wanted 1"),
        ("format: 1\nmargins: {refusel: 5}", "unknown suite in gate.margins 'refusel'. Did you mean 'refusal'?"),
        ("format: 1\nmargins: {refusal: 0}", "gate.yaml line 2: gate.margins.refusal is 0, wanted greater than 0"),
        ("format: 1\nmargins: {refusal: -5}", "gate.margins.refusal is -5, wanted greater than 0"),
        ("format: 1\nmargins: {refusal: .nan}", "gate.margins.refusal is nan, wanted a finite number"),
        ("format: 1\nmargins: [5]", "gate.margins is [5], wanted a mapping"),
        ("format: 1\nmargin: {refusal: 5}", "unknown key in gate.yaml 'margin'. Did you mean 'margins'?"),
        ("format: 1\nprofile: nightly", "gate.profile is 'nightly', wanted 'pr' or 'release'"),
        ("format: 1\nprofile: [pr]", "gate.profile is ['pr'], wanted"),
        ("format: 1\nprofile: release\nalpha: 0.05", "gate.alpha is 0.05, profile release has 0.025"),
        (
            "format: 1\nestimands: [E9]",
            "gate.estimands.0 is 'E9', wanted serving, alike, deployed, worst, selectivity or parity",
        ),
        ("format: 1\nestimands: []", "gate.estimands is [], wanted at least one entry"),
        ("format: 1\nestimand_margins: {selectivity: 0}", "gate.estimand_margins.selectivity is 0"),
        (
            "format: 1\nestimand_margins: {alike: 3}",
            "gate.estimand_margins.alike is 'alike', wanted 'selectivity' or 'parity'",
        ),
        ("format: 1\nprimary: ['h2o:budget=9']", "unknown policy in gate.primary 'h2o:budget=9'"),
        ("format: 1\ndeployable: [nine]", "unknown policy in gate.deployable 'nine'"),
        ("format: 1\ncontexts: [4096]", "unknown length in gate.contexts '4096'. Known: 192"),
        ("format: 1\ncontexts: [long]", "gate.contexts.0 is 'long', wanted a whole number"),
        ("format: 1\non_inconclusive: pass", "gate.on_inconclusive is 'pass', wanted 'block' or 'warn'"),
        ("format: 1\nreference: [dense]", "gate.reference is ['dense'], wanted text"),
        ("format: 1\nreference: other", "unknown gate.reference 'other'"),
        ("format: 1\npin: 7", "gate.pin is 7, wanted text"),
        ("format: 1\nformat: 1", "line 2: not a usable gate file: key 'format' is given twice"),
        ("format: [1", "not a usable gate file"),
        ("- format", "wanted a gate file, a mapping, got list"),
        ("", "wanted a gate file, a mapping, got nothing"),
        (
            "format: 1\nx: !!python/object/apply:os.system [ls]",
            "line 2: tags are not allowed, got 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        ("format: 1\nwhen: 2026-13-45", "not a usable gate file"),
        (BOMB, "gate.yaml line 2: aliases are not allowed"),
        ("a: &a [*a]", "aliases are not allowed"),
        ("[" * 3000 + "]" * 3000, "line 1: nested more than 20 levels deep"),
        ("format: 1\n\x00", "not a usable gate file"),
    ],
)
def test_a_gate_file_that_cannot_be_used_is_one_line(data, tmp_path, text, message):
    with pytest.raises(AuditError) as caught:
        decided(data, gate=gate_file(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def entry(**changed):
    fields = {"who": "Ada", "why": "known", "expires": "2026-12-31", "status": "[FAIL]", "cells": "{suite: refusal}"}
    lines = [f"  {key}: {value}" for key, value in {**fields, **changed}.items() if value is not None]
    return "waivers:\n-" + "\n".join(lines)[1:] + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (entry(cells="{suite: poetry}"), "unknown suite in waivers.yaml: waiver 1 'poetry'. Known: math, refusal"),
        (entry(cells="{arm: naif}"), "unknown arm in waivers.yaml: waiver 1 'naif'. Did you mean 'naive'?"),
        (entry(cells="{policy: 'h2o:budget=9'}"), "unknown policy in waivers.yaml"),
        (entry(cells="{context_tokens: '192'}"), "unknown context_tokens in waivers.yaml"),
        (entry(cells="{context_tokens: true}"), "unknown context_tokens in waivers.yaml"),
        (entry(cells="{estimand: E9}"), "unknown estimand in waivers.yaml"),
        (entry(cells="{suites: refusal}"), "unknown key in cells of waivers.yaml: waiver 1 'suites'"),
        (entry(cells="{}"), "wanted at least one of suite, arm, policy"),
        (entry(cells=None), "wanted at least one of suite, arm, policy"),
        (entry(who=None), "who is None, wanted text"),
        (entry(why="''"), "why is '', wanted text"),
        (entry(expires=None), "expires is None, wanted a date"),
        (entry(expires="soon"), "expires is 'soon', wanted a date"),
        (entry(expires="2026-12-31 10:00:00"), "wanted a date"),
        (entry(expires="2026-04-30"), "expired on 2026-04-30 (today is 2026-05-01)"),
        (entry(expires="9999-12-31"), "more than 366 days after today (2026-05-01)"),
        (entry(expires="2027-05-03"), "more than 366 days after today (2026-05-01)"),
        (entry(status="[INVALID]"), "INVALID is never waived"),
        (entry(status="PASS"), "wanted some of FAIL, NOT MEASURABLE, INCONCLUSIVE"),
        (entry(status="[[FAIL]]"), "wanted some of FAIL, NOT MEASURABLE, INCONCLUSIVE"),
        (entry(colour="red"), "unknown key in waivers.yaml: waiver 1 'colour'"),
        ("waivers: []", "wanted a list of at least one waiver"),
        ("waivers: {who: Ada}", "wanted a list of at least one waiver"),
        ("waivers: [Ada]", "waiver 1 is 'Ada', wanted a mapping"),
        ("waiver: []", "unknown key in waivers.yaml 'waiver'"),
        ("format: 2\nwaivers: [1]", "format is 2, wanted 1"),
        (BOMB, "aliases are not allowed"),
    ],
)
def test_a_waiver_file_that_cannot_be_used_is_one_line(comparison, tmp_path, text, message):
    with pytest.raises(AuditError) as caught:
        active_waivers(comparison, waivers(tmp_path, text), TODAY)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hostile_words_in_a_waiver_are_inert(data, tmp_path):
    text = WAIVER.format(arm="naive").replace("Ada Byron", '"<script>|\\e[31m\\u202e"')
    shown = markdown.render(page_of(decided(data, waivers=waivers(tmp_path, text))[0]))
    assert "<script>" not in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_files_that_cannot_be_read_are_one_line(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"format: 1 # \xe9")
    (tmp_path / "big.yaml").write_text("# " + "x" * 1_000_100)
    for name, message in (("none.yaml", "No such file"), ("latin.yaml", "not UTF-8"), ("big.yaml", "larger than")):
        with pytest.raises(DataError, match=message):
            load_gate_file(tmp_path / name)
    with pytest.raises(DataError, match="Is a directory"):
        load_gate_file(tmp_path)


def test_the_files_in_the_docs_can_be_used(data, tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "gate-in-ci.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```yaml\n")[1:]]
    [gate] = [block for block in blocks if block.startswith("format: 1\nprofile")]
    [waiver] = [block for block in blocks if block.startswith("waivers:")]
    text = gate.replace("agent: 5, ", "").replace(', "snapkv:budget=64"', "")  # what the made-up run does not have,
    text = text.replace("agent.attack_success", "refusal.over_refused")  # and what it has
    report, _ = decided(
        data, gate=gate_file(tmp_path, text.replace("pin: pin.json", "")), waivers=waivers(tmp_path, waiver)
    )
    assert report.rules.profile == "release"
    assert report.rules.estimands == ("serving", "alike", "deployed", "worst", "selectivity", "parity")
    assert report.waivers[0].who == "Ada Byron"
