"""A run whose arms an engine draws for, from its spec to its records."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvaudit.audit.runs.folder import RunFolder, open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.prepare import prepare_run
from kvaudit.core.errors import AuditError, RunError
from kvaudit.core.files import read_json
from kvaudit.core.spec import RunSpec, parse_spec

pytest.importorskip("openvino_genai", reason="needs kvaudit[openvino]")

U4 = "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=u4,cache_size=2"
F32 = U4.replace("u4", "f32")
SPEC = """
name: rollouts
train:
  rollouts: {engine: openvino, KV_CACHE_PRECISION: u4}
  arms: [dense, smd]
  seeds: [1]
  suites: [refusal]
  context_tokens: 96
  steps: 1
  prompts_per_step: 2
  group: 2
  ledger_every: 1
engines: {openvino: {at_once: 4}}
evaluate:
  policies: [{engine: openvino, KV_CACHE_PRECISION: u4}]
  suites: {refusal: {items: 4}}
  context_tokens: [96]
  pilot: 0
  floor: 0
"""


def spec_of(old: str = "", new: str = "") -> RunSpec:
    assert old in SPEC
    return parse_spec(SPEC.replace(old, new), "spec", NAMES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    found = open_run(tmp_path_factory.mktemp("rollouts") / "run", spec_of(), resume=True)
    pipeline = Pipeline(found, Console(quiet=True), threads=1)
    pipeline.work_on("train", "evaluate")
    return found


def test_what_the_engines_were_stands_in_the_provenance(run: RunFolder) -> None:
    told = run.provenance()["engines"]
    assert set(told) == {f"rollouts of {U4}", f"rollouts of {F32}", U4, F32}
    assert told[f"rollouts of {U4}"]["KV_CACHE_PRECISION"] == "u4"


def test_a_checkpoint_says_what_drew_its_rollouts(run: RunFolder) -> None:
    for arm, condition in (("dense", F32), ("smd", U4)):
        provenance = read_json(run.checkpoint(arm, 1) / "provenance.json")
        assert provenance["recipe"]["rollouts"] == condition
        assert provenance["ledgers"] == {}


def test_one_engine_serves_all_checkpoints_in_turn(run: RunFolder) -> None:
    text = "".join(path.read_text() for path in run.records.glob("*.jsonl"))
    assert text.count("\n") == 2 * 2 * 4  # checkpoints, the setting and its reference, items


def test_a_spec_reads_back_as_it_was_written() -> None:
    spec = spec_of()
    assert spec.train is not None
    assert (spec.train.rollouts, spec.train.policy) == (U4, "none")
    assert RunSpec.model_validate(spec.written(), context=NAMES) == spec
    assert spec.engine(U4).at_once == 4


def test_a_spec_without_rollouts_is_written_as_before() -> None:
    old = spec_of("rollouts: {engine: openvino, KV_CACHE_PRECISION: u4}", 'policy: "streaming:budget=64"')
    assert old.train is not None
    assert "rollouts" not in old.written()["train"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "  seeds: [1]",
            "  seeds: [1]\n  policy: int8",
            "rollouts of an engine and a policy of our own cache; give one",
        ),
        ("  seeds: [1]", "  seeds: [1]\n  policies: [int8]", "rollouts of an engine and a policy of our own cache"),
        ("{engine: openvino, KV_CACHE_PRECISION: u4}\n  arms", "int8\n  arms", "unknown engine 'int8'"),
        (
            "{engine: openvino, KV_CACHE_PRECISION: u4}\n  arms",
            "{engine: openvimo}\n  arms",
            "unknown engine 'openvimo'",
        ),
        ("engines: {openvino", "engines: {vllm", "unknown engine in engines 'vllm'"),
        ("{engine: openvino, KV", "{KV", "train.rollouts is .*, which names no engine; wanted {engine: vllm"),
        ("{engine: openvino, KV_CACHE_PRECISION: u4}\n  arms", "[openvino]\n  arms", "which names no engine"),
    ],
)
def test_what_a_spec_cannot_ask_for_is_one_line(old: str, new: str, words: str) -> None:
    with pytest.raises(AuditError, match=words) as error:
        spec_of(old, new)
    assert "\n" not in str(error.value)


def test_a_setting_that_the_engine_refuses_is_said_before_the_dense_arm_is_trained() -> None:
    old = "{engine: openvino, KV_CACHE_PRECISION: u4}\n  arms: [dense, smd]"
    spec = spec_of(old, old.replace("u4", "u5").replace("smd", "naive"))
    with pytest.raises(RunError, match=r"openvino refuses: .*train.rollouts openvino:.*u5"):
        prepare_run(spec)
