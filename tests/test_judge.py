"""Judging stored transcripts again: what stays, what is made new, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cli import kvaudit, refused

from kvaudit.audit.runs import judge as judging
from kvaudit.audit.runs import stored
from kvaudit.audit.runs.evaluate import Evaluator, grid
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.exchange import grade_transcript
from kvaudit.audit.sampling.model import load_chat, load_model
from kvaudit.core.files import read_json
from kvaudit.core.records import Message, Outcome, Record, Role
from kvaudit.core.spec import parse_spec
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import write_report
from kvaudit.suites.agent import Agent
from kvaudit.suites.math import Math

SPEC = """
name: judged
model: {model}
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {{math: {{items: 2, max_new_tokens: 8}}, agent: {{items: 2}}}}
  context_tokens: [900]
"""


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A finished run of four units."""
    spec = parse_spec(SPEC.format(model=tiny_folder), "spec", NAMES)
    model = load_model(str(tiny_folder))
    run = open_run(tmp_path_factory.mktemp("judge") / "run", spec, resume=False)
    evaluator = Evaluator(model, spec)
    for unit in grid(spec):
        evaluator.answer_units([unit], run, lambda *_: None)
    run.note(suite_versions={"math": Math.version, "agent": Agent.version}, base_sha256=model.sha256)
    return run.path


@pytest.fixture
def run(sampled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sampled, tmp_path / "run")


def units(folder: Path) -> list[Path]:
    return sorted((folder / "records").glob("*.jsonl"))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewritten(unit: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every record of a unit and seal it again."""
    rows = [json.loads(line) for line in unit.read_text().splitlines()]
    for row in rows:
        change(row)
    unit.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    seal = unit.with_suffix(".done.json")
    seal.write_text(json.dumps(read_json(seal) | {"sha256": hashlib.sha256(unit.read_bytes()).hexdigest()}))


def old_format(row: dict[str, Any]) -> None:
    """The row as it was before records had facets, and a cut answer an outcome of its own."""
    del row["facets"]
    row.update(format=1, suite_version="0")
    if row["outcome"] == "truncated":
        row["outcome"] = "degenerate"


def judged(run: Path, name: str = "again") -> Path:
    out = run.parent / name
    code, _, err = kvaudit("grade", "judge", run, "--out", out)
    assert code == 0, err
    return out


def test_a_fresh_run_is_judged_to_the_same_bytes_and_stays_as_it_is(run: Path) -> None:
    before = bytes_of(run)
    out = judged(run)
    assert [unit.read_bytes() for unit in units(out)] == [unit.read_bytes() for unit in units(run)]
    assert bytes_of(run) == before
    assert (out / "spec.yaml").read_bytes() == (run / "spec.yaml").read_bytes()


def test_records_without_facets_get_them_and_every_seal_says_from_what(run: Path, sampled: Path) -> None:
    for unit in units(run):
        rewritten(unit, old_format)
    out = judged(run)
    assert [unit.read_bytes() for unit in units(out)] == [unit.read_bytes() for unit in units(sampled)]
    for old, new in zip(units(run), units(out), strict=True):
        seal = read_json(new.with_suffix(".done.json"))
        assert seal["sha256"] == hashlib.sha256(new.read_bytes()).hexdigest()
        assert seal["judged"]["from"] == hashlib.sha256(old.read_bytes()).hexdigest()
        assert (seal["changed"]["was"], seal["records"]) == ("0", 2)
    story = read_json(out / "provenance.json")
    assert story["judged"]["suite_versions"] == {"math": "0", "agent": "0"}
    assert story["suite_versions"] == {"math": Math.version, "agent": Agent.version}


def test_what_changed_is_counted_by_suite(run: Path) -> None:
    def failed(row: dict[str, Any]) -> None:
        row.update(outcome="unscored", score=None)

    rewritten(next(unit for unit in units(run) if "--math--" in unit.name), failed)
    code, out, _ = kvaudit("grade", "judge", run, "--out", run.parent / "again")
    table = {line.split("│")[1].strip(): line.split("│")[3:6] for line in out.splitlines() if "->" in line}
    assert code == 0
    assert {suite: [int(part) for part in parts] for suite, parts in table.items()} == {
        "math": [4, 2, 2],
        "agent": [4, 0, 0],
    }


def test_a_changed_transcript_is_refused_by_its_seal(run: Path) -> None:
    unit = units(run)[0]
    unit.write_bytes(unit.read_bytes().replace(b'"assistant", "content": "', b'"assistant", "content": "I refuse. '))
    assert "its seal says" in refused("grade", "judge", run, "--out", run.parent / "again")


def test_a_foreign_item_is_named_with_its_unit(run: Path) -> None:
    unit = units(run)[0]
    rewritten(unit, lambda row: row.update(item_id="stranger"))
    line = refused("grade", "judge", run, "--out", run.parent / "again")
    assert f"{unit.name}' line 1: item 'stranger' of suite 'agent' (version" in line


def test_a_transcript_that_opens_with_another_question_is_refused(run: Path) -> None:
    unit = units(run)[0]
    rewritten(unit, lambda row: row["transcript"][1].update(content="What is the code?"))
    assert "line 1: the transcript does not begin with item" in refused(
        "grade", "judge", run, "--out", run.parent / "again"
    )


def test_judging_goes_on_after_a_kill_and_keeps_what_was_finished(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die(self: judging.Judging, unit: stored.StoredUnit) -> Iterator[tuple[Record, Record]]:
        for pair in regraded(self, unit):
            yield pair
            if unit.suite == "math":
                raise Killed

    regraded, out = judging.Judging._regrade, run.parent / "again"
    monkeypatch.setattr(judging.Judging, "_regrade", die)
    with pytest.raises(Killed):
        kvaudit("grade", "judge", run, "--out", out)
    kept = {unit: unit.stat().st_ino for unit in units(out)}
    assert [unit.name.split("--")[2] for unit in kept] == ["agent", "agent"]
    monkeypatch.undo()
    whole = bytes_of(judged(run))
    assert {unit: unit.stat().st_ino for unit in kept} == kept
    assert {name: held for name, held in whole.items() if name.startswith("records/")} == {
        name: held for name, held in bytes_of(judged(run, "fresh")).items() if name.startswith("records/")
    }
    assert bytes_of(judged(run)) == whole


def test_a_new_version_of_a_suite_judges_its_units_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(run)
    monkeypatch.setattr(Math, "version", "next")
    versions = {}
    for unit in units(judged(run)):
        record = Record.from_json(unit.read_text().splitlines()[0])
        versions[record.suite] = record.suite_version
    assert versions == {"math": "next", "agent": Agent.version}


def test_an_unfinished_unit_is_left_out_and_said(run: Path) -> None:
    unit = units(run)[0]
    unit.with_suffix(".done.json").unlink()
    code, out, _ = kvaudit("grade", "judge", run, "--out", run.parent / "again")
    assert code == 0
    assert f"left out: 1 unfinished units, first {unit.name}" in out
    assert len(units(run.parent / "again")) == 3


def test_telemetry_goes_along_and_checkpoints_do_not(run: Path) -> None:
    seed = run / "checkpoints" / "dense" / "seed-1"
    seed.mkdir(parents=True)
    (seed / "telemetry.jsonl").write_text('{"step": 1}\n')
    (seed / "model.safetensors").write_bytes(b"weights")
    out = judged(run)
    assert [path.name for path in (out / "checkpoints").rglob("*") if path.is_file()] == ["telemetry.jsonl"]


def test_a_judged_run_says_how_its_checkpoints_were_trained(run: Path) -> None:
    seed = run / "checkpoints" / "dense" / "seed-1"
    seed.mkdir(parents=True)
    story = {"recipe": {"rollouts": "snapkv:budget=96"}, "ledgers": {}, "files": {}}
    (seed / "provenance.json").write_text(json.dumps(story))
    again = judged(judged(run), "twice")
    found = load_run(again)
    assert found.checkpoints["dense", 1]["recipe"] == story["recipe"]
    write_report(again)
    assert not list((again / "checkpoints").rglob("README.md"))  # a card belongs to weights


def test_what_others_say_of_the_stack_goes_along(run: Path) -> None:
    (run / "scan.json").write_text(json.dumps({"format": "kvaudit.scan", "version": 1, "found": [], "open": 0}))
    scan = load_run(judged(run)).evidence.scan
    assert scan is not None
    assert scan["open"] == 0


def test_a_folder_is_judged_into_no_other_run(run: Path) -> None:
    assert "is the run that is to be judged" in refused("grade", "judge", run, "--out", run)
    other = shutil.copytree(run, run.parent / "other")
    assert "holds another run" in refused("grade", "judge", run, "--out", other)


def test_a_judged_run_is_not_gone_on_with(run: Path) -> None:
    out = judged(run)
    assert "holds the answers of another run with new grades" in refused("run", "--join", out)


def test_a_grade_knows_what_was_said_and_how_it_ended() -> None:
    suite = Agent()
    item = suite.item("eval", 0, 1, 400, len)
    looked, acted = (Message(Role.ASSISTANT, text) for text in suite.gold(item))
    record = Message(Role.TOOL, item.payload["record"])
    whole = (*item.messages, looked, record, acted)
    loop = (*item.messages, Message(Role.ASSISTANT, "no " * 40), record, acted)
    assert [
        grade_transcript(suite, item, whole, reason).outcome for reason in ("stop", "turns", "length", "error")
    ] == [
        Outcome.DESIRED,
        Outcome.DESIRED,
        Outcome.TRUNCATED,
        Outcome.UNSCORED,
    ]
    assert grade_transcript(suite, item, loop, "stop").note == "loop"


def test_the_hub_is_asked_for_no_weights(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[str] = []

    def hub(_: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        ignored.extend(ignore_patterns)
        return str(tiny_folder)

    monkeypatch.setattr("kvaudit.audit.sampling.model.snapshot_download", hub)
    assert load_chat("someone/model").count_tokens("four") == 4
    assert "*.safetensors" in ignored


def test_a_run_that_keeps_checkpoints_is_judged_with_their_tokenizer(
    run: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(stored, "load_base_chat", lambda name: asked.append(name) or load_chat(name))
    judged(run)
    seed = run / "checkpoints" / "dense" / "seed-1"
    seed.mkdir(parents=True)
    for path in tiny_folder.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, seed)
    judged(run)
    assert asked == [str(tiny_folder), str(seed)]
