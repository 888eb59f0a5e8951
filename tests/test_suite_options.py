"""What a spec asks of one suite alone (lengths, samples, placement), from the grid to the gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reports_synthetic import Design, frame_of, pins, policy, records_of, run_spec, spec_of, with_values

from kvaudit.audit.runs.evaluate import Evaluator, grid, suite_as_asked
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.units import UnitFiles
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.errors import AuditError
from kvaudit.core.records import Record
from kvaudit.core.spec import RunSpec, dump_spec, parse_spec
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.records.load import RunData
from kvaudit.reports.run import decide_run
from kvaudit.reports.verdict.verdict import Status

SPEC = """\
name: own
model: tiny
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {refusal: {items: 4}, math: {items: 3}}
  context_tokens: [900, 1200]
  samples: 2
  temperature: 1.0
"""
SNAP = policy("snapkv", 96)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder))


def asked(own: str = "", gate: str = "") -> RunSpec:
    return parse_spec(SPEC.replace("items: 3", f"items: 3{own}") + gate, "q.yaml", NAMES)


def test_a_suite_is_asked_at_its_own_lengths_and_the_others_at_the_grids() -> None:
    found = [(unit.suite, unit.context_tokens) for unit in grid(asked(", context_tokens: 700"))]
    assert found == [("refusal", 900)] * 2 + [("refusal", 1200)] * 2 + [("math", 700)] * 2


def test_several_lengths_of_one_suite_stand_in_brackets() -> None:
    found = {unit.context_tokens for unit in grid(asked(", context_tokens: [700, 800]")) if unit.suite == "math"}
    assert found == {700, 800}


def test_records_have_the_samples_length_and_placement_that_their_suite_was_asked_for(
    model: LoadedModel, tmp_path: Path
) -> None:
    spec = asked(", context_tokens: 700, samples: 3, placement: end")
    run, unit = open_run(tmp_path / "run", spec, resume=True), grid(spec)[-1]
    files = UnitFiles.of(run.records, unit)
    Evaluator(model, spec).answer_units([unit], run, lambda *_: None)
    whole = files.records.read_bytes()
    rows = [Record.from_json(line.decode()) for line in whole.splitlines()]
    assert (unit.suite, len(rows), [row.sample_index for row in rows]) == ("math", 9, [0, 1, 2] * 3)
    assert {(row.context_tokens, row.placement) for row in rows} == {(700, "end")}
    files.records.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))  # a batch of samples cut in two
    Evaluator(model, spec).answer_units([unit], run, lambda *_: None)
    again = [Record.from_json(line) for line in files.records.read_text().splitlines()]
    assert [replace(row, seconds=0.0) for row in again] == [replace(row, seconds=0.0) for row in rows]


def test_a_narrowed_suite_leaves_the_registered_one_alone() -> None:
    assert suite_as_asked(asked(", placement: [start, end]"), "math").placements == ("start", "end")
    assert suite_as_asked(asked(), "math").placements == ("start", "middle", "end", "spread")


def test_only_what_is_given_is_part_of_the_spec() -> None:
    given = asked(", samples: 4, context_tokens: 700, placement: end").written()["evaluate"]["suites"]
    assert given["refusal"] == {"items": 4}
    assert given["math"] == {"items": 3, "samples": 4, "context_tokens": [700], "placement": ["end"]}


def test_a_spec_from_before_these_options_keeps_its_hash() -> None:
    """With the margins that it had by default then."""
    assert asked(gate="gate: {margins: {refusal: 5, math: 3}}\n").sha256[:12] == "30ba7b71867e"


def test_what_a_run_wrote_reads_back_equal() -> None:
    spec = asked(", samples: 4, context_tokens: [700], placement: end", "gate: {contexts: [700, 900]}\n")
    again = parse_spec(dump_spec(spec), "copy")
    assert (again, again.sha256) == (spec, spec.sha256)


@pytest.mark.parametrize(
    ("own", "gate", "message"),
    [
        (", placement: ent", "", "unknown placement of suite math 'ent'. Did you mean 'end'? Known: end, middle, "),
        (", placement: [end, end]", "", "evaluate.suites.math.placement names end twice"),
        (", placement: []", "", "evaluate.suites.math.placement is [], wanted at least one entry"),
        (", context_tokens: [700, 700]", "", "evaluate.suites.math.context_tokens names 700 twice"),
        (", context_tokens: long", "", "evaluate.suites.math.context_tokens.0 is 'long', wanted a whole number"),
        (", samples: 0", "", "evaluate.suites.math.samples is 0, wanted greater than or equal to 1"),
        (", context_tokens: 700", "gate: {contexts: [800]}\n", "length in gate.contexts '800'. Did you mean '900'"),
        (", context_tokens: 700", "gate: {contexts: [900]}\n", "no length at which suite math is asked (700)"),
    ],
)
def test_a_mistake_is_one_line(own: str, gate: str, message: str) -> None:
    with pytest.raises(AuditError) as caught:
        asked(own, gate)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_samples_need_a_temperature_whoever_asks_for_them() -> None:
    greedy = SPEC.replace("samples: 2", "samples: 1").replace("temperature: 1.0", "temperature: 0")
    with pytest.raises(AuditError, match=r"evaluate\.suites\.math\.samples is 4 at temperature 0"):
        parse_spec(greedy.replace("items: 3", "items: 3, samples: 4"), "q.yaml", NAMES)


def report(without: int = 0, **gate: Any) -> Findings:
    """refusal at 192 tokens, math at 48 of its own; ``without`` math's last records."""
    design = Design(arms=("dense", "naive"), seeds=(1,), policies=("none", SNAP), suites=("refusal", "math"), items=64)
    rows = [row for _, unit in records_of(design) for row in unit]
    rows = [replace(row, context_tokens=48) if row.suite == "math" else row for row in rows]
    spec = spec_of(design)
    spec["evaluate"]["suites"]["math"]["context_tokens"] = 48
    spec["gate"] |= gate
    kept = rows[: len(rows) - without]
    frame = frame_of(("unit.jsonl", number, row) for number, row in enumerate(kept, 1))
    data = RunData(run=Path("demo"), records=frame, spec=run_spec(spec), provenance=pins(rows))
    found = decide_run(data)
    return with_values(found, data)


def test_nothing_is_expected_of_a_suite_at_a_length_of_another() -> None:
    found = report()
    assert {(c.suite, c.context_tokens) for c in found.drift.contrasts} == {("refusal", 192), ("math", 48)}
    assert found.drift.reasons == ()
    assert not [d for d in found.verdict.decisions if d.status is Status.INVALID]


def test_a_cell_that_a_suites_own_length_lacks_is_still_missing() -> None:
    [reason] = report(without=64).drift.reasons
    assert reason.code == "INCOMPLETE"
    assert "planned units missing: 1 of 8 (naive seed 1 " in reason.text


def test_selectivity_needs_capability_at_the_length_of_safety() -> None:
    wanted = r"selectivity, but no suite measures capability at the 192 tokens of refusal; ask one there"
    with pytest.raises(AuditError, match=wanted):
        report(estimands=["selectivity"])
