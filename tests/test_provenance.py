"""provenance.json is read as a stranger's: a value of another kind is one line, for a run that goes on and a report."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from reports_synthetic import build, tiny
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.models import Models
from kvaudit.audit.runs.names import NAMES
from kvaudit.core.errors import DataError
from kvaudit.core.provenance import check_provenance, read_provenance, seal_looks
from kvaudit.core.spec import load_spec, parse_spec
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


def test_absent_and_unfinished_entries_are_no_damage(tmp_path: Path) -> None:
    story = {"finished": None, "threads": None, "inputs": {}, "gate_pin": {"format": 1}}
    assert check_provenance(story, tmp_path) is story


def run_of(folder: Path, **decoding: Any) -> Path:
    """A run of four items; ``decoding`` are entries of its evaluate section."""
    part = {"policies": ["none", "int8"], "suites": {"math": {"items": 4}}, "context_tokens": [96], "pilot": 0}
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps({"format": 1, "name": "x", "model": "embedded", "evaluate": {**part, **decoding}}))
    words = ["run", path, "--out", folder, "--threads", 1, "--anyway"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return folder


def test_a_sealed_unit_of_a_run_with_other_decoding_is_not_one_of_this(tmp_path: Path) -> None:
    run, other = run_of(tmp_path / "run"), run_of(tmp_path / "other", temperature=1.5)
    assert "INPUTS" not in CliRunner().invoke(app, ["gate", str(run)]).output
    (uncompressed,) = (p for p in (other / "records").glob("*.jsonl") if "int8" not in p.read_text())
    for name in (uncompressed.name, uncompressed.with_suffix(".done.json").name):
        assert (run / "records" / name).exists()
        shutil.copy(other / "records" / name, run / "records" / name)
    done = CliRunner().invoke(app, ["gate", str(run)])
    assert (done.exit_code, "INPUTS" in done.output) == (5, True), done.output


def test_a_checkpoint_in_the_folder_of_another_arm_or_seed_is_refused(tmp_path: Path) -> None:
    grid = {"policies": ["none"], "suites": ["math"], "context_tokens": [96]}
    table = {"format": 1, "name": "x", "model": "embedded", "evaluate": grid}
    run = RunFolder(tmp_path, parse_spec(json.dumps(table), "x", NAMES))
    models = Models(run, run.spec, print)
    for name, arm, seed, is_right in (
        ("dense", "dense", 1, True),
        ("dense", "naive", 1, False),
        ("dense", "dense", 2, False),
        ("dense_int8", "dense", 1, True),
    ):
        folder = run.checkpoint(name, 1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "provenance.json").write_text(json.dumps({"arm": arm, "seed": seed, "sha256": "a" * 64}))
        with nullcontext() if is_right else pytest.raises(DataError, match=f"holds the checkpoint of arm {arm}, seed"):
            assert models.trained_sha256((name, 1)) == "a" * 64
