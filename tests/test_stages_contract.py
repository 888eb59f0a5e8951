"""Every stage of a run: its work leaves it done for whoever looks, done again it writes nothing, and what others wrote
before it stays. A new stage of the table is held to this without a word here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import SPEC

from kvaudit.audit.runs.folder import RunFolder, open_run, utc_now
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import STAGES, Pipeline, Stage
from kvaudit.core.provenance import ANYWAY, PROVENANCE
from kvaudit.core.spec import parse_spec


def process(run: RunFolder) -> Pipeline:
    """Another process that comes to a run."""
    return Pipeline(run, Console(quiet=True), 1)


def written(run: RunFolder) -> dict[str, bytes]:
    """What lies in a run's folder, claims and mutexes left out."""
    files = (path for path in run.path.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(run.path).as_posix(): path.read_bytes() for path in files if path.name[0] != "."}


def faults(stage: Stage, run: RunFolder) -> Iterator[str]:
    """What is wrong with a stage whose turn it is, a line each."""
    before = written(run)
    if stage.is_done(process(run)):
        yield "done before it was worked on"
    stage.work(process(run))
    now = written(run)
    if not stage.is_done(process(run)):
        yield "not done by its work"
    for name in (name for name, raw in before.items() if name != PROVENANCE and now.get(name) != raw):
        yield f"changes {name}, which an earlier stage wrote"
    stage.work(process(run))
    if written(run) != now:
        yield "writes more once it is done"


@pytest.fixture
def run(tmp_path: Path, tiny_folder: Path) -> RunFolder:
    """A run that is begun; a random model has nothing to lose, so it is told to go on anyway."""
    found = open_run(tmp_path / "run", parse_spec(SPEC.format(model=tiny_folder), "spec", NAMES), resume=False)
    found.note(**{ANYWAY: utc_now()})
    return found


def test_every_stage_keeps_the_contract_in_its_turn(run: RunFolder) -> None:
    assert not process(run).is_done
    assert {name: list(faults(stage, run)) for name, stage in STAGES.items()} == {name: [] for name in STAGES}
    assert process(run).is_done


def adding(text: str) -> Callable[[Pipeline], None]:
    def work(pipeline: Pipeline) -> None:
        with (pipeline._run.records / "own.jsonl").open("a") as file:
            file.write(text)

    return work


def is_there(pipeline: Pipeline) -> bool:
    return (pipeline._run.records / "own.jsonl").exists()


def overwriting(pipeline: Pipeline) -> None:
    (pipeline._run.records / "own.jsonl").touch()
    (pipeline._run.records / "earlier.jsonl").write_text("{}\n")


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (Stage(lambda _: None, is_there), "not done by its work"),
        (Stage(adding(""), lambda _: True), "done before it was worked on"),
        (Stage(adding("{}\n"), is_there), "writes more once it is done"),
        (Stage(overwriting, is_there), "changes records/earlier.jsonl, which an earlier stage wrote"),
    ],
)
def test_a_wrong_stage_is_caught(stage: Stage, says: str, run: RunFolder) -> None:
    (run.records / "earlier.jsonl").touch()
    assert list(faults(stage, run)) == [says]


def test_a_right_stage_is_not(run: RunFolder) -> None:
    assert list(faults(Stage(adding(""), is_there), run)) == []
