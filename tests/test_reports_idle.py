"""Where nothing was compressed: told by bytes, of gated cells alone, and read with the verdict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from reports_synthetic import build, policy, tiny

from kvaudit.audit.runs.evaluate import selecting_policies
from kvaudit.audit.runs.names import NAMES
from kvaudit.core.spec import parse_spec
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.page.terminal import terminal_lines
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections
from kvaudit.reports.sections.base import Inputs
from kvaudit.reports.sections.idle import IdleSection
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import Status

WIDE = policy("streaming", 4096)
DESIGN = dataclasses.replace(
    tiny(), arms=("dense", "naive"), policies=("none", policy("snapkv", 96), WIDE), suites=("refusal",), telemetry=0
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return build(tmp_path / "run", DESIGN)


def inputs(run: Path) -> Inputs:
    data = load_run(run)
    return Inputs(decide_run(data), data)


def noted(run: Path, **more: Any) -> None:
    path = run / "provenance.json"
    told = {**json.loads(path.read_text()), **more}
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


def test_a_policy_with_room_for_everything_is_named(run: Path) -> None:
    found = IdleSection().compute(inputs(run)) or ()
    assert {(one.policy, one.suite) for one in found} == {(WIDE, "refusal")}
    assert all(one.live == 4096 * one.context_tokens for one in found)
    both = inputs(run)
    lines = [
        line for line in remarks(with_report_sections(both.data, both.decided)) if line.startswith("NOTHING COMPRESSED")
    ]
    assert len(lines) == 1
    assert "streaming 4096 in refusal" in lines[0]
    assert "snapkv" not in lines[0]


def test_one_byte_less_in_one_answer_is_something(run: Path) -> None:
    both = inputs(run)
    cells = tuple(
        dataclasses.replace(cell, kv_bytes_live=cell.kv_bytes_live - 1 / cell.n_samples)
        if cell.policy == WIDE and cell.kv_bytes_live
        else cell
        for cell in both.decided.drift.cells
    )
    drift = dataclasses.replace(both.decided.drift, cells=cells)
    assert IdleSection().compute(Inputs(dataclasses.replace(both.decided, drift=drift), both.data)) is None


def test_layers_with_a_window_are_held_to_what_none_held(run: Path) -> None:
    both = inputs(run)

    def less(policies: set[str]) -> tuple[Any, ...] | None:
        cells = tuple(
            dataclasses.replace(cell, kv_bytes_live=cell.kv_bytes_dense * 0.8)
            if cell.policy in policies and cell.kv_bytes_dense
            else cell
            for cell in both.decided.drift.cells
        )
        drift = dataclasses.replace(both.decided.drift, cells=cells)
        return IdleSection().compute(Inputs(dataclasses.replace(both.decided, drift=drift), both.data))

    assert {one.policy for one in less({"none", WIDE}) or ()} == {WIDE}
    assert less({WIDE}) is None


def test_what_holds_all_and_reads_a_part_is_left_out(run: Path) -> None:
    noted(run, selecting_policies=[WIDE])
    assert IdleSection().compute(inputs(run)) is None


def test_a_run_that_no_longer_says_what_selects_is_told_all_the_same(run: Path) -> None:
    noted(run, selecting_policies=None)
    assert {one.policy for one in IdleSection().compute(inputs(run)) or ()} == {WIDE}


def test_a_run_notes_what_selects_also_where_it_is_drawn() -> None:
    policies = ["none", "quest:budget=32", "int8", "snapkv:budget=64", "quest:budget=32|none"]
    grid = {"policies": policies, "suites": ["math"], "context_tokens": [96]}
    found = selecting_policies(
        parse_spec(json.dumps({"name": "x", "model": "embedded", "evaluate": grid}), "x.yaml", NAMES)
    )
    assert len(found) == 2
    assert all("quest" in text for text in found)


def test_what_compressed_nothing_does_not_pass(tmp_path: Path) -> None:
    """Served under two policies: one that keeps 96 of 192 tokens, and one with room for all of them."""
    served = dataclasses.replace(
        DESIGN, arms=("base",), train=False, clusters=120, items=240, wrong={"none": range(20), WIDE: range(20)}
    )
    decided = decide_run(load_run(build(tmp_path / "served", served)))
    by_policy = {d.policy: d for d in decided.verdict.gated if d.suite == "refusal"}
    assert [reason.code for reason in by_policy[WIDE].reasons][:1] == [ReasonCode.IDLE]
    assert by_policy[WIDE].status is Status.INCONCLUSIVE
    assert not any(reason.code is ReasonCode.IDLE for reason in by_policy[policy("snapkv", 96)].reasons)
    line = next(line for line in terminal_lines(decided) if "streaming 4096" in line and "lost" in line)
    assert "undecided, nothing was compressed: ask longer prompts" in line
