"""Every stage of a run: its work leaves it done, done again it writes nothing, and what earlier stages wrote stays.

A new stage of the table is tested here without any change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import SPEC

from kvaudit.audit.runs import pipeline, stages
from kvaudit.audit.runs.folder import RunFolder, open_run, utc_now
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import STAGES, Pipeline
from kvaudit.audit.runs.stages.base import RunContext, Stage
from kvaudit.core.provenance import ANYWAY, PROVENANCE
from kvaudit.core.spec import parse_spec

MOST_LINES = {"pipeline.py": 400, "stages": 350}


def process(run: RunFolder) -> Pipeline:
    """Another process that comes to a run."""
    return Pipeline(run, Console(quiet=True), 1)


def files_of(run: RunFolder) -> dict[str, bytes]:
    """The files in a run's folder, without claims and mutexes."""
    files = (path for path in run.path.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(run.path).as_posix(): path.read_bytes() for path in files if path.name[0] != "."}


def is_done(name: str, run: RunFolder) -> bool:
    return STAGES[name](process(run)._context).is_done


def faults(name: str, run: RunFolder) -> Iterator[str]:
    """What is wrong with the next stage of a run, a line each."""
    before = files_of(run)
    if is_done(name, run):
        yield "done before it was worked on"
    process(run).work_on(name)
    now = files_of(run)
    if not is_done(name, run):
        yield "not done by its work"
    for file in (file for file, raw in before.items() if file != PROVENANCE and now.get(file) != raw):
        yield f"changes {file}, which an earlier stage wrote"
    process(run).work_on(name)
    if files_of(run) != now:
        yield "writes more once it is done"


@pytest.fixture
def run(tmp_path: Path, tiny_folder: Path) -> RunFolder:
    """A run that has begun; a random model has nothing to lose, so it goes on anyway."""
    folder = open_run(tmp_path / "run", parse_spec(SPEC.format(model=tiny_folder), "spec", NAMES), resume=False)
    folder.note(**{ANYWAY: utc_now()})
    return folder


def test_every_stage_keeps_the_contract_in_its_turn(run: RunFolder) -> None:
    assert not process(run).is_done
    assert {name: list(faults(name, run)) for name in STAGES} == {name: [] for name in STAGES}
    assert process(run).is_done


class Right(Stage):
    """Leaves one file."""

    appends = ""

    @property
    def is_done(self) -> bool:
        return self._file.exists()

    def work(self) -> RunContext:
        with self._file.open("a") as file:
            file.write(self.appends)
        return self.context

    @property
    def _file(self) -> Path:
        return self.context.run.records / "own.jsonl"


class Idle(Right):
    def work(self) -> RunContext:
        return self.context


class AlwaysDone(Right):
    is_done = True


class Appending(Right):
    appends = "{}\n"


class Overwriting(Right):
    def work(self) -> RunContext:
        self._file.with_name("earlier.jsonl").write_text("{}\n")
        return super().work()


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Right, []),
        (Idle, ["not done by its work"]),
        (AlwaysDone, ["done before it was worked on"]),
        (Appending, ["writes more once it is done"]),
        (Overwriting, ["changes records/earlier.jsonl, which an earlier stage wrote"]),
    ],
)
def test_a_wrong_stage_is_caught_and_a_right_one_is_not(
    stage: type[Stage], expected: list[str], run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.records / "earlier.jsonl").touch()
    monkeypatch.setitem(STAGES, "another", stage)
    assert list(faults("another", run)) == expected


def test_a_context_cannot_be_changed(run: RunFolder) -> None:
    with pytest.raises(FrozenInstanceError):
        process(run)._context.takeover = True  # type: ignore[misc]


def test_a_stage_sets_attributes_of_itself_alone() -> None:
    """What a stage learns is in its own object or in what its work returns."""
    for path in Path(stages.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert ast.unparse(node.value) == "self", f"{path.name}:{node.lineno} sets {ast.unparse(node)}"


def test_the_pipeline_and_its_stages_stay_small() -> None:
    assert len(Path(pipeline.__file__).read_text(encoding="utf-8").splitlines()) < MOST_LINES["pipeline.py"]
    for path in Path(stages.__file__).parent.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES["stages"], path.name
