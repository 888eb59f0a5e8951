"""Run folders: one spec each, shared by processes, written whole or not at all."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.core import files as runs
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import mutex, read_json, write_json
from kvaudit.core.spec import RunSpec, parse_spec

SPEC = "{name: a, evaluate: {policies: [none], suites: {math: {items: 2}}, context_tokens: [64]}}"


@pytest.fixture
def spec() -> RunSpec:
    return parse_spec(SPEC, "spec", NAMES)


def test_a_new_run_holds_its_spec_and_where_it_was_made(tmp_path: Path, spec: RunSpec) -> None:
    run = open_run(tmp_path / "new" / "run", spec, resume=True)
    provenance = run.provenance()
    assert provenance["spec_sha256"] == spec.sha256
    assert provenance["versions"]["torch"]
    assert (tmp_path / "new" / "run" / "spec.yaml").exists()


def test_a_run_is_not_continued_by_accident(tmp_path: Path, spec: RunSpec) -> None:
    open_run(tmp_path / "run", spec, resume=False)
    with pytest.raises(RunError, match="already holds this run; add --resume"):
        open_run(tmp_path / "run", spec, resume=False)
    assert open_run(tmp_path / "run", spec, resume=True).spec == spec


def test_a_folder_of_another_spec_is_refused_and_left_alone(tmp_path: Path, spec: RunSpec) -> None:
    open_run(tmp_path / "run", spec, resume=False)
    before = (tmp_path / "run" / "spec.yaml").read_bytes()
    with pytest.raises(RunError, match=r"holds another spec \(a .*, yours is a "):
        open_run(tmp_path / "run", spec.limited(1), resume=True)
    assert (tmp_path / "run" / "spec.yaml").read_bytes() == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path, spec: RunSpec) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        open_run(tmp_path, spec, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_start_that_was_cut_short_can_start_again(tmp_path: Path, spec: RunSpec) -> None:
    run = open_run(tmp_path / "run", spec, resume=False)
    (run.path / "spec.yaml").unlink()
    assert open_run(tmp_path / "run", spec, resume=False).spec == spec


def test_notes_merge_one_level_deep(tmp_path: Path, spec: RunSpec) -> None:
    run = open_run(tmp_path / "run", spec, resume=False)
    run.note(checkpoints={"dense/1": "a"})
    run.note(checkpoints={"naive/1": "b"}, device="cpu")
    assert run.provenance()["checkpoints"] == {"dense/1": "a", "naive/1": "b"}
    assert run.provenance()["device"] == "cpu"


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    path.write_text('{"a"')
    with pytest.raises(DataError, match="is not JSON"):
        read_json(path)


def test_a_file_system_without_locks_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(runs.fcntl, "flock", refuse)
    with (
        pytest.raises(RunError, match=r"has no locks \(No locks available\); mount it with locks"),
        mutex(tmp_path / "x"),
    ):
        pass
