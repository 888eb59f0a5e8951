"""Random records through the whole path, files included: only AuditError, and a verdict that no order changes."""

import dataclasses
import hashlib
import json
import tempfile
from datetime import date
from pathlib import Path

import numpy as np
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from reports_synthetic import Design, pins, policy, records_of, run_spec, spec_of, write_unit

from kvaudit.core.errors import AuditError
from kvaudit.core.files import parse_yaml
from kvaudit.core.records import Outcome
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.verdict.rules import GateOverrides
from kvaudit.reports.verdict.verdict import Status, parse_waivers

SNAP = policy("snapkv", 96)
DESIGN = Design(
    arms=("dense", "naive"),
    seeds=(1, 2),
    policies=("none", SNAP),
    suites=("refusal", "math"),
    clusters=7,
    items=14,
    estimands=("alike", "deployed", "worst", "selectivity", "parity"),
)
BASE = [row for _, rows in records_of(DESIGN) for row in rows]
SCORES = {Outcome.DESIRED: 1.0, Outcome.UNDESIRED: 0.0, Outcome.DEGENERATE: 0.0, Outcome.TRUNCATED: 0.0}
SCORES[Outcome.UNSCORED] = None
calm = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))


def one_line(error):
    text = str(error)
    assert "\n" not in text
    return text


def run_folder(folder, lines, rows, spec=None):
    """One unit per cell, in the order given; ``lines`` are raw bytes that stand among them."""
    run = Path(folder) / "run"
    (run / "records").mkdir(parents=True)
    (run / "spec.yaml").write_text(yaml.safe_dump(spec or spec_of(DESIGN)))
    story = {
        "spec_sha256": run_spec(spec or spec_of(DESIGN)).sha256,
        "spec_file_sha256": hashlib.sha256((run / "spec.yaml").read_bytes()).hexdigest(),
        "suite_kinds": {"refusal": "safety", "math": "capability"},
        **pins(rows),
    }
    (run / "provenance.json").write_text(json.dumps(story))
    write_unit(run / "records" / "all.jsonl", "".join(lines))
    return run


def verdict_of(lines, rows, asked=None):
    """Everything that a verdict decides, without the order of its cells; the error's text where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            verdict = decide_run(load_run(run_folder(folder, lines, rows)), asked).verdict
        except AuditError as error:
            return "refused", 2, frozenset({one_line(error)}), {}
    assert verdict.exit_code in (0, 3, 4, 5, 6)
    cells = {(d.estimand, d.arm, d.suite, d.policies or (d.policy,), d.gated): d.status for d in verdict.decisions}
    return verdict.status, verdict.exit_code, {r.code for r in verdict.reasons}, cells


def damaged(seed):
    """The made-up run with other outcomes, and some of its rows lost, copied, renamed or broken on disk."""
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.05, 1.0, size=8)
    rows = []
    for i, row in enumerate(BASE):
        good = rng.random() < rates[i * 8 // len(BASE)]
        found = Outcome.DESIRED if good else [*Outcome][rng.integers(len(Outcome))]
        rows.append(dataclasses.replace(row, outcome=found, score=SCORES[found]))
    for kind in rng.choice(["lose", "copy", "arm", "cluster_id", "checkpoint"], size=rng.integers(0, 4)):
        i = int(rng.integers(len(rows)))
        if kind == "lose":
            del rows[i]
        elif kind == "copy":
            rows.append(rows[i])
        else:
            rows[i] = dataclasses.replace(rows[i], **{str(kind): ["", "x", "\u202e", "dense"][rng.integers(4)]})
    lines = [row.to_json() + "\n" for row in rows]
    for junk in rng.choice(["{\n", "null\n", "\n", '{"format": 1}\n', "NaN\n"], size=rng.integers(0, 3)):
        lines.insert(int(rng.integers(len(lines) + 1)), str(junk))
    return rows, lines


seeds = st.integers(0, 2**32 - 1)


@calm
@given(seeds)
def test_the_order_of_records_changes_no_verdict(seed):
    rows, lines = damaged(seed)
    first = verdict_of(lines, rows)
    second = verdict_of([lines[i] for i in np.random.default_rng(seed).permutation(len(lines))], rows)
    if "DUPLICATE" in first[2]:  # of two rows for one sample the first is kept: INVALID all the same
        assert first[:2] == second[:2] == (Status.INVALID, 5)
    else:
        assert first == second


@calm
@given(seeds)
def test_a_nan_score_is_never_a_number(seed):
    rows, lines = damaged(seed)
    scored = [i for i, line in enumerate(lines) if '"score": 1.0' in line and lines.count(line) == 1]
    assume(scored)
    lines[scored[0]] = lines[scored[0]].replace('"score": 1.0', '"score": NaN')
    status, code, reasons, _ = verdict_of(lines, rows)
    assert (status, code) == (Status.INVALID, 5)
    assert "INCOMPLETE" in reasons


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats()
    | st.dates()
    | st.sampled_from(
        ["none", SNAP, "alike", "worst", "refusal", "math", "dense", "pr", "release", "warn", "\n\x1b[31m"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
KEYS = ["profile", "alpha", "margins", "primary", "contexts", "deployable", "estimands", "pin"]
KEYS += ["reference", "on_inconclusive", "estimand_margins", "gate_file", "other"]
LINES = [row.to_json() + "\n" for row in BASE]


@calm
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=4))
def test_any_gate_file_decides_or_is_refused_in_one_line(table):
    from kvaudit.reports.verdict.rules import load_gate_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gate.yaml"
        path.write_text(yaml.safe_dump({"format": 1, **table}))
        try:
            gate = load_gate_file(path)
        except AuditError as error:
            one_line(error)
            return
    verdict_of(LINES, BASE, GateOverrides(gate=gate))


@calm
@given(st.text(max_size=60))
def test_any_text_is_a_mapping_or_refused_in_one_line(text):
    try:
        assert isinstance(parse_yaml(text, "gate.yaml", "gate file").table, dict)
    except AuditError as error:
        one_line(error)


@calm
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["who", "why", "expires", "status", "cells", "other"]), values, max_size=6),
        max_size=3,
    )
    | values
)
def test_any_waivers_hold_or_are_refused_in_one_line(rows):
    with tempfile.TemporaryDirectory() as folder:
        plan = decide_run(load_run(run_folder(folder, LINES, BASE))).comparison if not PLANS else PLANS[0]
        PLANS.append(plan)
    try:
        parse_waivers(
            parse_yaml(yaml.safe_dump({"waivers": rows}), "waivers.yaml", "waiver file"), plan, date(2026, 1, 1)
        )
    except AuditError as error:
        one_line(error)


PLANS: list = []
