"""The grid: what is written, that it resumes to the same bytes, and that it refuses what is not its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvaudit.audit.runs.batches import batched
from kvaudit.audit.runs.evaluate import Evaluator, grid, row_seed
from kvaudit.audit.runs.folder import RunFolder, open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.prepare import check_contexts
from kvaudit.audit.runs.units import Unit, UnitFiles
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.records import Item, Message, Record, Role
from kvaudit.core.spec import RunSpec, parse_spec

SPEC = """
name: grid
model: tiny
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {math: {items: 5, max_new_tokens: 6}}
  context_tokens: [400]
  samples: 2
  temperature: 1.0
  batch_tokens: 2000
"""


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder))


@pytest.fixture
def spec() -> RunSpec:
    return parse_spec(SPEC, "spec", NAMES)


def evaluated(path: Path, spec: RunSpec, model: LoadedModel) -> RunFolder:
    run = open_run(path, spec, resume=True)
    evaluator = Evaluator(model, spec)
    for unit in grid(spec):
        evaluator.answer_units([unit], run, lambda *_: None)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: LoadedModel) -> RunFolder:
    """The grid, evaluated in one go; tests that damage it work on ``run``."""
    return evaluated(tmp_path_factory.mktemp("grid") / "whole", parse_spec(SPEC, "spec", NAMES), model)


@pytest.fixture
def run(whole: RunFolder, spec: RunSpec, tmp_path: Path) -> RunFolder:
    return open_run(shutil.copytree(whole.path, tmp_path / "run"), spec, resume=True)


def timeless(path: Path) -> list[Record]:
    return [replace(Record.from_json(line), seconds=0.0) for line in path.read_text().splitlines()]


def item(name: str) -> Item:
    return Item("x", name, name, (Message(Role.USER, name),), 10, "none")


def test_records_say_how_the_turns_of_a_conversation_were_read(tmp_path: Path) -> None:
    text = (
        SPEC.replace("items: 5", "items: 1")
        .replace("}}", "}, agent: {items: 1}}")
        .replace("model: tiny", "model: embedded")
    )
    spec = parse_spec(text.replace("[400]", "[200]"), "spec", NAMES)
    run = evaluated(tmp_path / "run", spec, load_model())
    read = {(row.suite, row.turns_read) for path in run.records.glob("*.jsonl") for row in timeless(path)}
    assert read == {("math", ""), ("agent", "one cache")}


def test_grid_crosses_everything_and_keeps_a_checkpoint_together() -> None:
    units = grid(parse_spec(SPEC.replace("[400]", "[300, 400]"), "spec", NAMES))
    assert len(units) == 4
    assert len({unit.name for unit in units}) == 4
    assert [unit.context_tokens for unit in units] == [300, 300, 400, 400]


def test_batches_hold_like_lengths_and_at_most_the_given_tokens() -> None:
    lengths = {"a": 10, "b": 40, "c": 11, "d": 100, "e": 12}
    batches = batched([item(name) for name in lengths], lengths, 40)
    assert [[one.item_id for one in batch] for batch in batches] == [["a", "c", "e"], ["b"], ["d"]]


def test_row_seeds_differ_by_item_and_sample_and_know_no_policy_or_arm() -> None:
    seeds = {row_seed(seed, item(name), sample) for seed in (1, 2) for name in "ab" for sample in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_spec_may_let_a_suite_answer_longer(model: LoadedModel, tmp_path: Path) -> None:
    asked = {}
    for longest in ("", ", max_new_tokens: 3"):
        spec = parse_spec(SPEC.replace("items: 5, max_new_tokens: 6", "items: 1" + longest), "spec", NAMES)
        run = evaluated(tmp_path / f"run{len(longest)}", spec, model)
        rows = [row for unit in grid(spec) for row in timeless(UnitFiles.of(run.records, unit).records)]
        asked[longest] = max(row.new_tokens for row in rows)
    assert asked == {"": 40, ", max_new_tokens: 3": 3}


def test_the_length_of_answers_is_part_of_a_spec_only_where_it_is_given() -> None:
    plain, longer = (
        parse_spec(SPEC.replace(", max_new_tokens: 6", more), "spec", NAMES) for more in ("", ", max_new_tokens: 96")
    )
    assert plain.sha256 != longer.sha256
    assert plain.written()["evaluate"]["suites"] == {"math": {"items": 5}}
    assert longer.limited(2).written()["evaluate"]["suites"] == {"math": {"items": 2, "max_new_tokens": 96}}


def test_an_answer_that_the_model_has_no_room_for_is_a_spec_error(model: LoadedModel) -> None:
    spec = parse_spec(SPEC.replace("max_new_tokens: 6", "max_new_tokens: 90000"), "spec", NAMES)
    with pytest.raises(SpecError, match="an answer of suite math need 90400 positions"):
        check_contexts(spec, model)


def test_records_are_sealed_and_name_where_they_come_from(whole: RunFolder, spec: RunSpec, model: LoadedModel) -> None:
    for unit in grid(spec):
        files = UnitFiles.of(whole.records, unit)
        seal = json.loads(files.seal.read_text())
        assert (seal["records"], seal["checkpoint"]) == (10, model.sha256)
        assert seal["sha256"] == hashlib.sha256(files.records.read_bytes()).hexdigest()
        records = timeless(files.records)
        assert {(r.arm, r.policy, r.policy_hash, r.checkpoint) for r in records} == {
            ("base", unit.policy.canonical, unit.policy.hash, model.sha256)
        }
        assert sorted((r.item_id, r.sample_index) for r in records) == sorted(
            {(r.item_id, sample) for r in records for sample in (0, 1)}
        )
        assert not files.lock.exists()


def test_policies_are_asked_the_same_items_and_only_compression_evicts(whole: RunFolder, spec: RunSpec) -> None:
    dense, streaming = (timeless(UnitFiles.of(whole.records, unit).records) for unit in grid(spec))
    assert [(r.item_id, r.sample_index) for r in dense] == [(r.item_id, r.sample_index) for r in streaming]
    assert [(r.retention, set(r.survival.values())) for r in dense] == [(1.0, {1.0})] * 10
    assert all(0 < r.kv_bytes_dense == r.kv_bytes_live <= r.kv_bytes_peak for r in dense)
    assert all((r.kv_bytes_live or 0) < r.kv_bytes_dense for r in streaming)
    assert all(r.retention == 64 / r.prompt_tokens for r in streaming)
    assert all(r.survival["system"] < 0.2 for r in streaming)


def test_records_do_not_depend_on_the_batch_size(
    tmp_path: Path, whole: RunFolder, spec: RunSpec, model: LoadedModel
) -> None:
    narrow_spec = parse_spec(SPEC.replace("batch_tokens: 2000", "batch_tokens: 1"), "spec", NAMES)
    narrow = evaluated(tmp_path / "narrow", narrow_spec, model)
    for unit in grid(spec):
        one, other = (timeless(UnitFiles.of(run.records, unit).records) for run in (whole, narrow))
        assert [(r.item_id, r.transcript, r.survival) for r in one] == [
            (r.item_id, r.transcript, r.survival) for r in other
        ]


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, model: LoadedModel) -> Path:
    """A run that ended after the first batch of its second unit."""
    spec = parse_spec(SPEC, "spec", NAMES)
    broken = open_run(tmp_path_factory.mktemp("grid") / "killed", spec, resume=False)

    with pytest.raises(Killed):
        Evaluator(model, spec).answer_units([grid(spec)[1]], broken, dying(4))
    return broken.path


@pytest.mark.parametrize("damage", [b"", b'{"format": 1, "run": "gr', b"\x00\x00\x00\n"])
def test_a_killed_unit_resumes_to_the_records_of_an_unbroken_one(
    tmp_path: Path, whole: RunFolder, killed: Path, spec: RunSpec, model: LoadedModel, damage: bytes
) -> None:
    broken = open_run(shutil.copytree(killed, tmp_path / "broken"), spec, resume=True)
    unit = grid(spec)[1]
    files = UnitFiles.of(broken.records, unit)
    with files.records.open("ab") as out:
        out.write(damage)
    Evaluator(model, spec).answer_units([unit], broken, lambda *_: None)
    assert timeless(files.records) == timeless(UnitFiles.of(whole.records, unit).records)


MORE = """
name: more
model: tiny
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8", int8, "snapkv:budget=80,window=8,chunk=256"]
  suites: {math: {items: 3, max_new_tokens: 6}}
  context_tokens: [400]
  temperature: 0.7
  batch_tokens: 1
"""


def together(path: Path, model: LoadedModel, *, damaged: bool) -> list[list[Record]]:
    """The records of policies that are evaluated together; ``damaged``: two of them were killed at other batches."""
    spec = parse_spec(MORE, "spec", NAMES)
    run = open_run(path, spec, resume=False)
    units, evaluator = grid(spec), Evaluator(model, spec)
    if damaged:
        for unit, rows in ((units[1], 1), (units[3], 2)):
            with pytest.raises(Killed):
                evaluator.answer_units([unit], run, dying(rows))
    evaluator.answer_units(units, run, lambda *_: None)
    assert all(UnitFiles.of(run.records, unit).seal.exists() for unit in units)
    return [timeless(UnitFiles.of(run.records, unit).records) for unit in units]


def dying(rows: int) -> Callable[[Unit, int, int], None]:
    def die(_: Unit, done: int, __: int) -> None:
        if done == rows:
            raise Killed

    return die


def test_units_that_are_evaluated_together_have_the_records_of_each_alone(tmp_path: Path, model: LoadedModel) -> None:
    spec = parse_spec(MORE, "spec", NAMES)
    alone = evaluated(tmp_path / "alone", spec, model)
    wanted = [timeless(UnitFiles.of(alone.records, unit).records) for unit in grid(spec)]
    assert together(tmp_path / "whole", model, damaged=False) == wanted
    assert together(tmp_path / "damaged", model, damaged=True) == wanted


def test_a_unit_that_is_let_go_of_is_left_at_a_whole_batch(
    tmp_path: Path, whole: RunFolder, spec: RunSpec, model: LoadedModel
) -> None:
    run, units, asked = open_run(tmp_path / "run", spec, resume=False), grid(spec), list[Unit]()

    def keeps(unit: Unit) -> bool:
        asked.append(unit)
        return unit == units[0] or len(asked) < 4

    Evaluator(model, spec).answer_units(units, run, lambda *_: None, keeps)
    kept, left = (UnitFiles.of(run.records, unit) for unit in units)
    wanted = [timeless(UnitFiles.of(whole.records, unit).records) for unit in units]
    assert (timeless(kept.records), timeless(left.records)) == (wanted[0], wanted[1][:4])
    assert (kept.seal.exists(), left.seal.exists()) == (True, False)
    assert asked == [units[0], units[1], units[0], units[1], units[0]]


def test_rows_count_as_done_once_the_disk_has_them(
    tmp_path: Path, spec: RunSpec, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path / "run", spec, resume=True)
    unit = grid(spec)[0]
    path = UnitFiles.of(run.records, unit).records
    synced: list[int] = []  # bytes of the record file at each sync of it
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            synced.append(path.stat().st_size)

    def progress(_: Unit, done: int, __: int) -> None:
        assert synced[-1:] == ([path.stat().st_size] if done else [])

    monkeypatch.setattr(os, "fsync", watch)
    Evaluator(model, spec).answer_units([unit], run, progress)
    assert len(synced) == 3  # batches


def test_a_cut_inside_a_batch_repeats_that_batch_only(run: RunFolder, spec: RunSpec, model: LoadedModel) -> None:
    unit = grid(spec)[0]
    files = UnitFiles.of(run.records, unit)
    lines = files.records.read_bytes().splitlines(keepends=True)
    files.seal.unlink()
    files.records.write_bytes(b"".join(lines[:7]))  # batches of two items, two samples each: 4, 8, 10
    starts: list[int] = []
    Evaluator(model, spec).answer_units([unit], run, lambda _, done, __: starts.append(done))
    assert starts == [4, 8, 10]
    assert files.records.read_bytes().splitlines(keepends=True)[:4] == lines[:4]


def test_a_batch_that_two_processes_wrote_is_kept_once(run: RunFolder, spec: RunSpec, model: LoadedModel) -> None:
    unit = grid(spec)[0]
    files = UnitFiles.of(run.records, unit)
    whole = timeless(files.records)
    lines = files.records.read_bytes().splitlines(keepends=True)
    files.seal.unlink()
    files.records.write_bytes(b"".join(lines[:4] + lines[:4]))
    starts: list[int] = []
    Evaluator(model, spec).answer_units([unit], run, lambda _, done, __: starts.append(done))
    assert starts == [4, 8, 10]
    assert timeless(files.records) == whole


def test_a_file_that_another_process_writes_too_is_not_sealed(
    tmp_path: Path, spec: RunSpec, model: LoadedModel
) -> None:
    run = open_run(tmp_path / "run", spec, resume=False)
    unit = grid(spec)[0]
    files = UnitFiles.of(run.records, unit)

    def intrude(_: Unit, done: int, __: int) -> None:
        if done == 8:
            with files.records.open("ab") as out:
                out.write(files.records.read_bytes().splitlines(keepends=True)[-1])

    with pytest.raises(
        DataError, match=r"has \d+ bytes, but this process wrote \d+: another process has written to it"
    ):
        Evaluator(model, spec).answer_units([unit], run, intrude)
    assert not files.seal.exists()


def test_records_of_another_checkpoint_are_never_continued(run: RunFolder, spec: RunSpec, model: LoadedModel) -> None:
    unit = grid(spec)[0]
    UnitFiles.of(run.records, unit).seal.unlink()
    with pytest.raises(DataError, match="records of another checkpoint"):
        Evaluator(replace(model, sha256="f" * 64), spec).answer_units([unit], run, lambda *_: None)


def test_a_context_beyond_the_models_positions_is_a_spec_error(model: LoadedModel) -> None:
    with pytest.raises(SpecError, match=r"evaluate.context_tokens 4095 .* model .* has 4096; lower context_tokens"):
        check_contexts(parse_spec(SPEC.replace("[400]", "[400, 4095]"), "spec", NAMES), model)


def test_a_spec_without_training_asks_the_base_model_only(spec: RunSpec) -> None:
    assert {unit.arm for unit in grid(spec)} == {"base"}
