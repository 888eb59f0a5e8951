"""Whatever the records hold, the report has a verdict; and reports never load a model library."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reports_synthetic import Design, frame_of, policy, records_of, run_spec, spec_of, with_values

from kvaudit.core.records import Outcome
from kvaudit.reports.page.formats import markdown
from kvaudit.reports.page.formats.json_files import render_drift
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import RunData
from kvaudit.reports.run import decide_run

SNAP = policy("snapkv", 96)
DESIGN = Design(
    arms=("dense", "naive"), seeds=(1, 2), policies=("none", SNAP), suites=("refusal",), clusters=6, items=8
)
BASE = [row for _, rows in records_of(DESIGN) for row in rows]
OUTCOMES = {o: (None if o is Outcome.UNSCORED else float(o is Outcome.DESIRED)) for o in Outcome}

rows = st.builds(
    lambda base, arm, seed, served, item, cluster, outcome, sample: dataclasses.replace(
        base,
        arm=arm,
        train_seed=seed,
        policy=served,
        item_id=item,
        cluster_id=cluster,
        outcome=outcome,
        score=OUTCOMES[outcome],
        sample_index=sample,
    ),
    st.sampled_from(BASE),
    st.sampled_from(["dense", "naive", "base", "", "x\x1b"]),
    st.integers(-1, 3),
    st.sampled_from(["none", SNAP, "snapkv", "odd:=,=:"]),
    st.text(max_size=3),
    st.text(max_size=2),
    st.sampled_from(list(Outcome)),
    st.integers(0, 2),
)


def data_of(records, spec):
    frame = frame_of(("u.jsonl", i, r) for i, r in enumerate(records, 1))
    return RunData(run=Path("demo"), records=frame, spec=run_spec(spec))


def check(records, spec):
    data = data_of(records, spec)
    report = decide_run(data)
    verdict = report.verdict
    report = with_values(report, data)
    assert verdict.exit_code in (0, 3, 4, 5, 6)
    for contrast in report.drift.contrasts:
        assert (contrast.effect is None) == bool(contrast.reasons)
        if contrast.effect:
            e = contrast.effect
            assert e.low <= e.lower <= e.estimate <= e.upper <= e.high
    json.loads(render_drift(page_of(report)))
    assert markdown.render(page_of(report))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(rows, min_size=1, max_size=30))
def test_any_records_have_a_verdict(found):
    check(found, spec_of(DESIGN))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_run_with_random_damage_has_a_verdict(data):
    kept = data.draw(st.lists(st.sampled_from(BASE), min_size=1, max_size=len(BASE), unique_by=id))
    flips = data.draw(st.lists(st.sampled_from(list(Outcome)), min_size=len(kept), max_size=len(kept)))
    check(
        [dataclasses.replace(r, outcome=o, score=OUTCOMES[o]) for r, o in zip(kept, flips, strict=True)],
        spec_of(DESIGN),
    )


def test_reports_load_no_model_library():
    code = "import sys, kvaudit.reports.run; print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    assert done.stdout.strip() == "[]"
