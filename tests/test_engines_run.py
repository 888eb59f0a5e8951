"""Runs with units that an engine serves: equal to our own cache if uncompressed, recorded and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from test_pilot import Memory, played_once

from kvaudit.audit.engines import Condition, GenerationRequest, Reply
from kvaudit.audit.engines.base import EngineFailed, Session
from kvaudit.audit.engines.weights import check_weights_fit
from kvaudit.audit.engines.worker_client import WorkerSession
from kvaudit.audit.runs import evaluate
from kvaudit.audit.runs.batches import engine_batches, whole_templates
from kvaudit.audit.runs.engine_slot import check_engine_unchanged
from kvaudit.audit.runs.evaluate import evaluation_items, grid
from kvaudit.audit.runs.folder import RunFolder, open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.prepare import check_engines, prepare_run
from kvaudit.audit.runs.units import Unit
from kvaudit.audit.sampling.chat import Chat
from kvaudit.audit.sampling.model import load_chat
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.records import Item, Record
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.reports.records.load import load_run
from kvaudit.reports.verdict.comparison import comparison_of
from kvaudit.reports.verdict.drift import drift_of
from kvaudit.suites.base import SUITES

pytest.importorskip("openvino_genai", reason="needs kvaudit[openvino]")

F32 = "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=f32,cache_size=2"
U4 = "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=u4,cache_size=2"
SPEC = """
name: engines
evaluate:
  policies: [none, {engine: openvino, KV_CACHE_PRECISION: u4}]
  suites: {refusal: {items: 16}, agent: {items: 16}}
  context_tokens: [96]
  floor: 8
  pilot: 0
engines: {openvino: {at_once: 4}}
"""


def spec_of(old: str = "", new: str = "") -> RunSpec:
    assert old in SPEC
    return parse_spec(SPEC.replace(old, new), "spec", NAMES)


def worked(path: Path, spec: RunSpec) -> RunFolder:
    run = open_run(path, spec, resume=True)
    Pipeline(run, Console(quiet=True), threads=1).work_on("evaluate")
    return run


@pytest.fixture(scope="module")
def memory() -> Memory:
    """The answers of our own cache in the uninterrupted run."""
    return {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, memory: Memory) -> RunFolder:
    """The uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "play", played_once(memory))
        return worked(tmp_path_factory.mktemp("engines") / "whole", spec_of())


@pytest.fixture
def same_again(whole: RunFolder, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs like ``whole`` faster: no trial of engines, and the recorded answers of our own cache."""
    monkeypatch.setattr("kvaudit.audit.runs.prepare.try_out_engines", lambda *_: {})
    monkeypatch.setattr(evaluate, "play", played_once(memory))


@pytest.fixture(scope="module")
def chat() -> Chat:
    return load_chat()


def records_in(folder: Path, policy: str) -> list[Record]:
    """Return the records of a condition, file by file in the order of writing."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [record for record in map(Record.from_json, lines) if record.policy == policy]


def transcripts(records: Sequence[Record]) -> dict[tuple[str, str], list[str]]:
    return {(r.suite, r.item_id): [m.content for m in r.transcript] for r in records}


def timeless(folder: Path) -> dict[str, list[dict[str, object]]]:
    """Return every record without its seconds."""
    rows = {file.name: list(map(json.loads, file.read_text().splitlines())) for file in folder.rglob("*.jsonl")}
    return {
        name: [{k: v for k, v in row.items() if k != "seconds"} for row in file_rows]
        for name, file_rows in rows.items()
    }


def test_an_uncompressed_engine_matches_our_own_cache(whole: RunFolder) -> None:
    ours, theirs = records_in(whole.records, "none"), records_in(whole.records, F32)
    assert len(transcripts(theirs)) == 32
    assert transcripts(theirs) == transcripts(ours)
    assert {r.item_id: r.new_tokens for r in theirs} == {r.item_id: r.new_tokens for r in ours}
    assert {r.item_id: r.facets for r in theirs} == {r.item_id: r.facets for r in ours}


def test_a_quantised_cache_changes_every_log_prob(whole: RunFolder) -> None:
    plain = {r.item_id: r.logprob for r in records_in(whole.records, F32)}
    coded = {r.item_id: r.logprob for r in records_in(whole.records, U4)}
    assert None not in coded.values()
    assert sum(plain[item] != coded[item] for item in plain) >= 30  # of 32


def test_facts_that_an_engine_does_not_report_are_absent(whole: RunFolder) -> None:
    record = records_in(whole.records, U4)[0]
    assert (record.retention, record.kv_bytes_peak, record.kv_bytes_dense, record.kv_bytes_live) == (None,) * 4
    assert dict(record.survival) == {}


def test_repeated_requests_in_the_same_order_get_bitwise_equal_answers(whole: RunFolder) -> None:
    recorded = {(r.suite, r.item_id): r for r in records_in(whole.records, U4)}
    again = records_in(whole.path / "floor" / "again", U4)
    assert len(again) == 2 * 8
    for record in again:
        before = recorded[record.suite, record.item_id]
        assert (record.transcript, record.logprob) == (before.transcript, before.logprob)


def test_the_shuffled_floor_has_the_same_items_in_another_order(whole: RunFolder) -> None:
    again, shuffled = (records_in(whole.path / "floor" / kind, U4) for kind in ("again", "shuffled"))
    assert sorted(r.item_id for r in again) == sorted(r.item_id for r in shuffled)
    assert [r.item_id for r in again] != [r.item_id for r in shuffled]


def test_our_own_cache_has_no_floor(whole: RunFolder) -> None:
    assert not records_in(whole.path / "floor" / "again", "none")


def test_provenance_holds_the_description_of_the_engine(whole: RunFolder) -> None:
    engines = whole.provenance()["engines"]
    assert set(engines) == {F32, U4}
    assert engines[U4]["KV_CACHE_PRECISION"] == "u4"
    assert engines[U4]["version"].startswith("openvino_genai 20")
    assert "enable_prefix_caching False" in engines[U4]["scheduler"]
    assert whole.provenance()["policies"][U4] == next(iter(records_in(whole.records, U4))).policy_hash


def test_the_units_of_a_condition_are_consecutive() -> None:
    served = [unit.policy.canonical for unit in grid(spec_of())]
    assert served == ["none", "none", U4, U4, F32, F32]


class Killed(BaseException):
    """Simulates a kill: nothing catches it."""


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[WorkerSession], None]], None]:
    """A function that makes something happen before the engine answers its nth batch."""

    def arm(number: int, happen: Callable[[WorkerSession], None]) -> None:
        answer, batches = WorkerSession.answer, [0]

        def patched(self: WorkerSession, rows: Sequence[GenerationRequest]) -> list[Reply]:
            batches[0] += 1
            if batches[0] == number:
                happen(self)
            return answer(self, rows)

        monkeypatch.setattr(WorkerSession, "answer", patched)

    return arm


@pytest.mark.usefixtures("same_again")
def test_a_killed_run_resumes_to_the_same_records(whole: RunFolder, tmp_path: Path, after: Callable[..., None]) -> None:
    def die(_: WorkerSession) -> None:
        raise Killed

    after(2, die)
    with pytest.raises(Killed):
        worked(tmp_path / "run", spec_of())
    assert not workers()
    run = worked(tmp_path / "run", spec_of())
    assert timeless(run.path) == timeless(whole.path)


@pytest.mark.usefixtures("same_again")
def test_a_killed_engine_is_restarted_without_lost_or_repeated_records(
    whole: RunFolder, tmp_path: Path, after: Callable[..., None]
) -> None:
    after(2, lambda session: os.kill(children_of(session._process._process.pid)[0], signal.SIGKILL))
    run = worked(tmp_path / "run", spec_of())
    assert timeless(run.path) == timeless(whole.path)
    assert not workers()


def workers() -> list[str]:
    """Return the command lines of engines that this process has started and not ended."""
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if f" {os.getpid()} " in f" {line} " and "supervisor.py" in line]


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()[1:]]
    return [int(child) for child, parent in rows if int(parent) == pid]


class Broken(Session):
    """An engine that fails at every request."""

    def __init__(self) -> None:
        self.stopped = 0
        self.described = {"version": "1"}

    def answer(self, requests: Sequence[GenerationRequest]) -> list[Reply]:
        raise EngineFailed(f"engine stand-in: it ended while answering {len(requests)} requests")

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.usefixtures("same_again")
def test_an_engine_that_fails_three_times_ends_the_run_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Broken] = []

    def start(*_: object) -> Session:
        started.append(Broken())
        return started[-1]

    monkeypatch.setattr("kvaudit.audit.runs.engine_slot.start_engine", start)
    with pytest.raises(RunError, match="stand-in: it ended while answering 2 requests; finished work is kept: go on"):
        worked(tmp_path / "run", spec_of("at_once: 4", "at_once: 1"))
    assert len(started) == 3
    assert all(session.stopped for session in started)


@pytest.mark.usefixtures("same_again")
def test_a_failed_restart_ends_the_run_and_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Broken] = []

    def start(*_: object) -> Session:
        if started:
            raise RunError("engine stand-in: it ended while starting")
        started.append(Broken())
        return started[-1]

    monkeypatch.setattr("kvaudit.audit.runs.engine_slot.start_engine", start)
    with pytest.raises(RunError, match="it ended while starting; finished work is kept: go on with --resume"):
        worked(tmp_path / "run", spec_of("at_once: 4", "at_once: 1"))


@pytest.mark.usefixtures("same_again")
def test_a_run_is_not_resumed_with_another_version_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: Callable[..., None]
) -> None:
    def die(_: WorkerSession) -> None:
        raise Killed

    after(1, die)
    with pytest.raises(Killed):
        worked(tmp_path / "run", spec_of())
    monkeypatch.undo()
    path = tmp_path / "run" / "provenance.json"
    path.write_text(path.read_text().replace("openvino_genai 20", "openvino_genai 19"))
    with pytest.raises(RunError, match=r"engine openvino reported version 'openvino_genai 19.* when the run began"):
        worked(tmp_path / "run", spec_of())


def test_long_texts_are_shown_from_their_first_difference_on(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", spec_of(), resume=False)
    check_engine_unchanged(run, "c", "vllm", {"flags": "--a=1 " * 30 + "--old"})
    with pytest.raises(
        RunError, match=r"vllm reported flags '\.\.\..*--old' when the run began, and reports '\.\.\..*--new'"
    ):
        check_engine_unchanged(run, "c", "vllm", {"flags": "--a=1 " * 30 + "--new"})
    with pytest.raises(RunError, match="reported flags '--a=1 --a=1 "):
        check_engine_unchanged(run, "c", "vllm", {"flags": "--b" + "--a=1 " * 30})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("KV_CACHE_PRECISION: u5", "openvino refuses"),
        ("KV_CASH_PRECISION: u4", "device CPU has no property KV_CASH_PRECISION"),
    ],
)
def test_an_unknown_setting_is_an_error_before_the_run_folder_is_made(setting: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        prepare_run(spec_of("KV_CACHE_PRECISION: u4", setting))


class Scored(SUITES.get("refusal")):  # type: ignore[misc]
    """A suite that scores given answers, as a suite of another harness may."""

    def options(self, item: Item) -> tuple[str, ...]:
        return "I must refuse.", "The code"


def test_a_suite_that_scores_given_answers_is_an_error(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    items = evaluation_items(spec_of(), SUITES.get("refusal")(), 96, chat.count_tokens)
    monkeypatch.setattr("kvaudit.audit.runs.prepare.suite_as_asked", lambda *_: Scored())
    with pytest.raises(SpecError, match="suite refusal scores given answers by their likelihood"):
        check_engines(spec_of(), {("refusal", 96): [items]})


def unit_of(spec: RunSpec) -> Unit:
    return next(unit for unit in grid(spec) if isinstance(unit.policy, Condition))


def batches_of(spec: RunSpec, chat: Chat, kind: str) -> Iterator[list[str]]:
    suite, unit = SUITES.get("refusal")(), unit_of(spec)
    items = evaluation_items(spec, suite, 96, chat.count_tokens)
    for batch in engine_batches(spec, suite, items, unit, kind):
        yield [item.item_id for item in batch]


def test_the_pilot_of_an_engine_consists_of_batches_of_its_grid(chat: Chat) -> None:
    spec = spec_of("items: 16}, agent", "items: 120}, agent")
    spec = spec.model_copy(update={"evaluate": spec.evaluate.model_copy(update={"pilot": 24})})
    pilot, grid_batches = list(batches_of(spec, chat, "pilot")), list(batches_of(spec, chat, "records"))
    assert grid_batches[: len(pilot)] == pilot
    assert sum(map(len, pilot)) >= 24
    suite = SUITES.get("refusal")()
    items = evaluation_items(spec, suite, 96, chat.count_tokens)
    assert sorted(name for batch in pilot for name in batch) == sorted(
        item.item_id for item in whole_templates(suite, items, 24)
    )
    assert sorted(name for batch in grid_batches for name in batch) == sorted(item.item_id for item in items)


def test_the_floor_asks_as_many_items_as_it_says(chat: Chat) -> None:
    spec = spec_of("items: 16}, agent", "items: 120}, agent")
    spec = spec.model_copy(update={"evaluate": spec.evaluate.model_copy(update={"pilot": 48, "floor": 18})})
    suite = SUITES.get("refusal")()
    items = evaluation_items(spec, suite, 96, chat.count_tokens)
    repeated = list(batches_of(spec, chat, "again"))
    assert sum(map(len, repeated)) == len(whole_templates(suite, items, 18)) == 18
    assert list(batches_of(spec, chat, "records"))[: len(repeated)] == repeated


def test_a_batch_holds_twice_the_concurrent_requests(chat: Chat) -> None:
    assert [len(batch) for batch in batches_of(spec_of(), chat, "records")] == [8, 8]
    assert [len(batch) for batch in batches_of(spec_of(), chat, "again")] == [8]


def test_weights_beyond_the_free_memory_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.bin").write_bytes(b"0" * (3 << 20))
    monkeypatch.setattr("kvaudit.audit.sampling.memory.free_bytes", lambda _: 2 << 20)
    with pytest.raises(SpecError, match=r"engine openvino needs 0\.0 GiB for the weights in .* memory are free"):
        check_weights_fit(tmp_path, "openvino")
    monkeypatch.setattr("kvaudit.audit.sampling.memory.free_bytes", lambda _: 4 << 20)
    check_weights_fit(tmp_path, "openvino")


ARMS = """
name: arms
train: {arms: [dense, smd], seeds: [1], policy: "streaming:budget=48,sink=4,window=8", suites: [math],
  context_tokens: 72, steps: 1, prompts_per_step: 1, group: 2, warmup_steps: 1}
evaluate:
  policies: [none, {engine: openvino, KV_CACHE_PRECISION: u4}]
  suites: {refusal: {items: 6}}
  context_tokens: [96]
  pilot: 0
  floor: 0
gate: {margins: {refusal: 20}}
"""


def test_an_engine_serves_trained_checkpoints(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", parse_spec(ARMS, "spec", NAMES), resume=True)
    pipeline = Pipeline(run, Console(quiet=True), threads=1)
    pipeline.work_on("train", "evaluate")
    data = load_run(run.path)
    drift = drift_of(data, comparison_of(data.spec, data.records, data.provenance), 0.05)
    kinds = {(c.estimand, c.policy) for c in drift.contrasts if c.arm == "smd" and c.suite == "refusal"}
    assert kinds == {
        ("alike", "none"),
        ("deployed", "none"),
        *((e, p) for e in ("alike", "deployed") for p in (F32, U4)),
        ("serving", U4),
        ("interaction", U4),
    }
    served = {arm: transcripts([r for r in records_in(run.records, F32) if r.arm == arm]) for arm in ("dense", "smd")}
    ours = {arm: transcripts([r for r in records_in(run.records, "none") if r.arm == arm]) for arm in ("dense", "smd")}
    assert served == ours
    trained = run.provenance()["checkpoints"]
    assert {f"{r.arm}/1": r.checkpoint for r in records_in(run.records, U4)} == trained
