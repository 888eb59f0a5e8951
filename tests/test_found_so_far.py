"""What a run tells of its answers while it goes on: counted from what is on disk, half a line left for later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.progress import FoundSoFar
from kvaudit.audit.runs.units import UnitFiles
from kvaudit.core.spec import RunSpec, parse_spec

SPEC = """
name: told
evaluate:
  base: true
  policies: [none, "{int8}"]
  suites: {{refusal: {{items: {items}}}}}
  context_tokens: [192]
"""


def line(number: int, score: float | None) -> str:
    return json.dumps({"item_id": f"i{number}", "sample_index": 0, "score": score}) + "\n"


def spec_of(items: object) -> RunSpec:
    return parse_spec(SPEC.format(items=items, int8=parse_policy("int8").canonical), "spec.yaml")


def write(folder: Path, spec: RunSpec, policy: str, text: str, place: str = "records") -> None:
    (unit,) = [unit for unit in grid(spec) if unit.policy.canonical.partition(":")[0] == policy]
    path = UnitFiles.of(folder / place, unit).records
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_lost_and_gained_are_counted_where_both_sides_have_answered(tmp_path: Path) -> None:
    spec = spec_of(12)
    found = FoundSoFar(spec, tmp_path)
    assert found.lines() == []
    write(tmp_path, spec, "none", line(0, 1.0) + line(1, 1.0) + line(2, 0.0) + line(3, None))
    assert found.lines() == []
    write(tmp_path, spec, "int8", line(0, 1.0) + line(1, 0.0)[:9])
    assert found.lines() == ["int8: no loss so far in 1 of 12 answers"]
    write(tmp_path, spec, "int8", line(1, 0.0)[9:] + line(2, 1.0) + line(3, 1.0) + line(4, 1.0))
    assert found.lines() == ["int8: 1 lost, 1 gained so far in 3 of 12 answers"]


@pytest.mark.parametrize("items", ["all", "auto"])
def test_of_a_suite_whose_size_is_not_known_yet_no_total_is_told(tmp_path: Path, items: str) -> None:
    spec = spec_of(items)
    for policy in ("none", "int8"):
        write(tmp_path, spec, policy, line(0, 1.0))
    assert FoundSoFar(spec, tmp_path).lines() == ["int8: no loss so far in 1 answers"]


def test_rows_of_rounds_count_while_a_round_is_asked(tmp_path: Path) -> None:
    spec = spec_of("all")
    found = FoundSoFar(spec, tmp_path)
    for policy, score in (("none", 1.0), ("int8", 0.0)):
        write(tmp_path, spec, policy, line(0, 1.0), "rounds/1")
        write(tmp_path, spec, policy, line(1, score), "rounds/1")
    assert found.lines() == ["int8: 1 lost so far in 2 answers"]
    for policy in ("none", "int8"):
        write(tmp_path, spec, policy, line(2, 1.0), "rounds/2")
    assert found.lines() == ["int8: 1 lost so far in 3 answers"]
