"""provenance.json is read as a stranger's: a value of another kind is one line, for a run that goes on and a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reports_synthetic import build, tiny

from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.names import NAMES
from kvaudit.core.errors import DataError
from kvaudit.core.provenance import check_provenance, read_provenance, seal_looks
from kvaudit.core.spec import load_spec
from kvaudit.reports.records.load import load_run

DAMAGES: list[dict[str, Any]] = [
    *(
        {table: {"x": value}}
        for table in ("policies", "suite_versions", "checkpoints")
        for value in (["a"], {"a": ["b"]})
    ),
    {"reference_sha256": {"1": ["a"]}},
    {"policies": ["a"]},
    {"worked_with": ["a"]},
    {"inputs": {"rows": {"a": ["b"]}}},
    *({"threads": value} for value in ("x", ["a"], {}, -1, 0, True, 1.5, 10**30)),
    *({"base_sha256": value} for value in ({"a": "b"}, 10**30)),
    {"host": {"system": "\ud800"}},
    {"mine": float("nan")},
    *({key: value} for key in ("known_policies", "selecting_policies") for value in ("int8", [{}], {"a": "b"})),
    *({"looks": {name: {"items": {}}}} for name in ("2", "²", "9" * 5000, "01")),
    *({"looks": {"1": {"items": {"a": 1}, "seconds": seconds}}} for seconds in ("x", None, -1, 10**400, True)),
    *({"looks": {"1": {"items": {"a": 1}, "words": words}}} for words in ([], {"a": ["PASS"]})),
    {"looks": {"1": {"seconds": 1.0}}},
    {"looks": {"ended": ["now"]}},
    *({"looks": {"planned": {"items": {}, **part}}} for part in ({"seconds": {"a": "x"}}, {"left_out": {"a": {}}})),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage)[:60])
def test_a_value_of_another_kind_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps(seal_looks(damage)))
    with pytest.raises(DataError, match=r"provenance\.json'.*start another run with --out$"):
        read_provenance(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [{"policies": {"none": ["a"]}}, {"checkpoints": {"dense/1": {"a": ["b"]}}}],
    ids=lambda damage: str(damage)[:60],
)
def test_a_report_refuses_it_too(damage: dict[str, Any], tmp_path: Path) -> None:
    run = build(tmp_path / "run", tiny())
    known = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps(known | damage))
    with pytest.raises(DataError, match="wanted names and texts"):
        load_run(run)


def test_a_run_notes_nothing_beside_damage(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text('{"policies": ["a"]}')
    (tmp_path / "spec.yaml").write_text(
        "{name: x, evaluate: {policies: [none], suites: {math: {items: 2}}, context_tokens: [64]}}"
    )
    with pytest.raises(DataError, match="policies holds a list"):
        RunFolder(tmp_path, load_spec(tmp_path / "spec.yaml", NAMES)).note(policies={"none": "x"})


def test_what_is_absent_or_not_known_yet_is_no_damage(tmp_path: Path) -> None:
    story = {"finished": None, "threads": None, "inputs": {}, "gate_pin": {"format": 1}}
    assert check_provenance(story, tmp_path) is story
