"""OpenVINO on the embedded model: equal to our own cache in f32, further from it with fewer bits."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_world import World, world
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from kvaudit.audit.engines import ENGINES, GenerationRequest, Reply, parse_condition
from kvaudit.audit.engines.base import EngineContext, EngineFailed
from kvaudit.audit.engines.exports.openvino import OPENVINO_METHOD, export_openvino
from kvaudit.audit.engines.inside import worker
from kvaudit.audit.engines.openvino import OpenVino
from kvaudit.audit.engines.weights import CONVERSION, convert_checkpoint, convert_once
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import install_command

pytest.importorskip("openvino_genai", reason="needs kvaudit[openvino]")
openvino = pytest.importorskip("openvino")

EVICTING = "start_size=32,recent_size=32,max_cache_size=128,snapkv_window_size=0"
CONDITIONS = {
    "f32": "openvino:KV_CACHE_PRECISION=f32",
    "u8": "openvino",
    "u4": "openvino:KV_CACHE_PRECISION=u4",
    "k": "openvino:KEY_CACHE_PRECISION=u4,VALUE_CACHE_PRECISION=u8",
    "v": "openvino:KEY_CACHE_PRECISION=u8,VALUE_CACHE_PRECISION=u4",
    "by token": "openvino:KV_CACHE_PRECISION=u4,KEY_CACHE_QUANT_MODE=BY_TOKEN",
}


@pytest.fixture(scope="module")
def here() -> World:
    return world()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for logs of engines."""
    return tmp_path_factory.mktemp("openvino")


@pytest.fixture(scope="module")
def replies(here: World, logs: Path) -> dict[str, list[Reply]]:
    """The replies of every condition to the same requests."""
    by_condition = {}
    for name, text in CONDITIONS.items():
        with here.start(text, logs) as session:
            by_condition[name] = session.answer(here.asked)
    return by_condition


def test_f32_matches_our_own_cache(here: World, replies: dict[str, list[Reply]]) -> None:
    assert here.matches(replies["f32"])
    assert max(here.gaps(replies["f32"])) < 1e-5  # float32, another order of sums


def test_the_default_compresses_and_is_written_out() -> None:
    condition = parse_condition(CONDITIONS["u8"])
    assert condition.canonical == "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=u8,cache_size=2"
    assert condition.compressing == ["KV_CACHE_PRECISION"]
    assert condition.reference.canonical == "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=f32,cache_size=2"


def test_fewer_bits_move_the_log_probs_further(here: World, replies: dict[str, list[Reply]]) -> None:
    assert 1e-4 < here.mean_gap(replies["u8"]) < here.mean_gap(replies["u4"])


def test_keys_and_values_are_quantised_separately(replies: dict[str, list[Reply]]) -> None:
    logprobs = {tuple(reply.logprob for reply in batch) for batch in replies.values()}
    assert len(logprobs) == len(CONDITIONS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("openvino:KV_CACHE_PRECISON=u4", "device CPU has no property KV_CACHE_PRECISON"),
        ("openvino:KV_CACHE_PRECISION=u5", "u5"),
        ("openvino:KV_CACHE_PRECISION=u4,KEY_CACHE_QUANT_MODE=BY_HEAD", "Expected AUTO/BY_CHANNEL/BY_TOKEN"),
        ("openvino:KEY_CACHE_PRECISION=u4,VALUE_CACHE_PRECISION=f32", "key_cache_type u4 with value_cache_type f32 is"),
        (f"openvino:{EVICTING},aggregation_mode=MEAN", "openvino_genai has SUM, NORM_SUM"),
        (
            f"openvino:{EVICTING},kvcrush_config.budget=1,kvcrush_config.anchor_point_mode=TOP",
            "openvino_genai has RANDOM",
        ),
        (
            f"openvino:{EVICTING},kvcrush_config.budget=1,kvcrush_config.seed=7",
            "openvino_genai's has anchor_point_mode",
        ),
        ("openvino:sparse_attention_config.mode=A_SHAPE", "openvino_genai has TRISHAPE, XATTENTION"),
        ("openvino:sparse_attention_config.threshold=.5", "has no threshold; openvino_genai's has mode, num_last"),
    ],
)
def test_unknown_settings_are_rejected_by_the_engine(here: World, logs: Path, text: str, message: str) -> None:
    with pytest.raises(EngineFailed) as error:
        here.start(text, logs)
    assert message in str(error.value)
    assert str(error.value).startswith("engine openvino refuses: ")
    assert str(error.value).isprintable()


# settings that have an effect on long prompts only: eviction, and prefill in several chunks
ON_LONG = {
    "f32": "",
    "evicting": EVICTING,
    "crush": f"{EVICTING},kvcrush_config.budget=1,kvcrush_config.anchor_point_mode=MEAN",
    "crush by chance": f"{EVICTING},kvcrush_config.budget=1",
    "crush by another": f"{EVICTING},kvcrush_config.budget=1,kvcrush_config.rng_seed=1",
    "tri": "sparse_attention_config.mode=TRISHAPE,sparse_attention_config.num_last_dense_tokens_in_prefill=16,"
    "sparse_attention_config.num_retained_start_tokens_in_cache=32,"
    "sparse_attention_config.num_retained_recent_tokens_in_cache=32",
    "x": "sparse_attention_config.mode=XATTENTION,sparse_attention_config.num_last_dense_tokens_in_prefill=16,"
    "sparse_attention_config.xattention_threshold=0.1,sparse_attention_config.xattention_block_size=32",
    "tri that keeps all": "use_sparse_attention=true",
}


@pytest.fixture(scope="module")
def long_prompt(here: World) -> GenerationRequest:
    words = [f"{name} {n * n}" for n in range(24) for name in ("alpha", "bravo", "charlie", "delta")]
    return here.asked[0]._replace(ids=tuple(here.model.chat.tokenizer(" ".join(words)).input_ids))  # 640 tokens


@pytest.fixture(scope="module")
def on_long(here: World, logs: Path, long_prompt: GenerationRequest) -> dict[str, tuple[list[Reply], dict[str, str]]]:
    """The replies to a prompt of 640 tokens, and the descriptions, under ``ON_LONG``."""
    results = {}
    for name, settings in ON_LONG.items():
        text = f"openvino:KV_CACHE_PRECISION=f32,max_num_batched_tokens=64{settings and ','}{settings}"
        with here.start(text, logs) as session:
            results[name] = session.answer([long_prompt]), dict(session.described)
    return results


def test_kvcrush_and_sparse_prefill_settings_have_an_effect(
    on_long: dict[str, tuple[list[Reply], dict[str, str]]],
) -> None:
    logprobs = {name: replies[0].logprob for name, (replies, _) in on_long.items()}
    assert logprobs.pop("tri that keeps all") == logprobs["f32"], "it keeps the first 128 and last 1920 tokens"
    assert len(set(logprobs.values())) == len(logprobs), logprobs


def test_trishape_reads_a_prompt_of_one_chunk_whole_and_xattention_does_not(
    here: World, logs: Path, long_prompt: GenerationRequest
) -> None:
    logprobs = {}
    for name in ("f32", "tri", "x"):
        settings = ON_LONG[name]
        text = f"openvino:KV_CACHE_PRECISION=f32,max_num_batched_tokens=1024{settings and ','}{settings}"
        with here.start(text, logs) as session:
            logprobs[name] = session.answer([long_prompt])[0].logprob
    assert logprobs["tri"] == logprobs["f32"]
    assert logprobs["x"] != logprobs["f32"]


def test_adaptive_rkv_fails_in_the_engine(here: World, logs: Path, long_prompt: GenerationRequest) -> None:
    """As of 2026.4.1; once it works, remove the remark in docs/audit-an-engine.md."""
    with (
        here.start(f"openvino:KV_CACHE_PRECISION=f32,{EVICTING},aggregation_mode=ADAPTIVE_RKV", logs) as session,
        pytest.raises(EngineFailed, match="Diversity score size mismatch"),
    ):
        session.answer([long_prompt])


def test_the_description_holds_the_resolved_settings(on_long: dict[str, tuple[list[Reply], dict[str, str]]]) -> None:
    crush, sparse, plain = (on_long[name][1] for name in ("crush", "x", "f32"))
    assert (crush["kvcrush_config.budget"], crush["kvcrush_config.anchor_point_mode"]) == ("1", "MEAN")
    assert "max_cache_size: 128" in crush["eviction"]
    assert sparse["sparse_attention_config.mode"] == "XATTENTION"
    assert sparse["sparse_attention_config.xattention_threshold"].startswith("0.1")
    assert plain["scheduler"].endswith("eviction off")
    assert not [name for name in plain if "config" in name or name == "eviction"]


def test_the_reference_neither_evicts_nor_reads_sparsely() -> None:
    condition = parse_condition(f"openvino:KV_CACHE_PRECISION=f32,{ON_LONG['crush']},{ON_LONG['x']}")
    assert condition.reference.canonical == "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=f32,cache_size=2"
    assert "use_sparse_attention" in condition.compressing
    assert parse_condition("openvino:KV_CACHE_PRECISION=f32,use_sparse_attention=false").compressing == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("max_cache_size=128", "requires start_size, recent_size, max_cache_size; add start_size, recent_size"),
        ("kvcrush_config.budget=1", "requires start_size, recent_size, max_cache_size; add"),
        (f"{EVICTING},kvcrush_config.rng_seed=1", "has no effect without a kvcrush_config.budget above 0"),
        (f"{EVICTING},kvcrush_config.budget=1,aggregation_mode=ADAPTIVE_RKV", "has no effect with aggregation_mode"),
        ("use_sparse_attention=false,sparse_attention_config.mode=TRISHAPE", "has no effect with use_sparse_attention"),
    ],
)
def test_settings_without_effect_are_rejected(settings: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_condition(f"openvino:{settings}")


def test_the_description_holds_version_precision_and_weights(here: World, logs: Path) -> None:
    with here.start(CONDITIONS["u4"], logs) as session:
        assert session.described["KV_CACHE_PRECISION"] == "u4"
        assert session.described["version"].startswith("openvino_genai 202")
        assert "float32, traced" in session.described["weights"]


def test_answers_are_drawn_by_seed(here: World, logs: Path) -> None:
    sampled = [request._replace(temperature=1.0) for request in here.asked]
    with here.start(CONDITIONS["f32"], logs) as session:
        first = session.answer(sampled)
        assert session.answer(sampled) == first
        assert session.answer([request._replace(seed=request.seed + 100) for request in sampled]) != first


def test_a_model_with_as_many_key_heads_as_query_heads_is_converted(tmp_path: Path) -> None:
    config = GPTNeoXConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    export_openvino(GPTNeoXForCausalLM(config), tmp_path)
    operations = openvino.Core().read_model(tmp_path / "openvino_model.xml").get_ops()
    caches = [node for node in operations if node.get_type_name() == "ReadValue"]
    assert [node.output(0).get_partial_shape().to_string() for node in caches] == ["[?,4,?,8]"] * 4


REPORT_TELEMETRY = """
import openvino
from openvino.tools.ovc import telemetry_utils
def start(setup):
    return {"telemetry": telemetry_utils.tm.__name__}, None
"""


class Looks(MetaPathFinder):
    """Refuses to import openvino, and notes whether it would have found the module of its telemetry."""

    def __init__(self) -> None:
        self.sends: list[bool] = []

    def find_spec(self, name: str, *_: object) -> None:
        if name == "openvino":
            self.sends.append("openvino_telemetry" not in sys.modules)
            raise ImportError("looked at")


def test_a_conversion_imports_openvino_without_its_telemetry(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What openvino does without that module, the next test sees."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("openvino", "openvino_telemetry")]:
        monkeypatch.delitem(sys.modules, name)
    looks = Looks()
    monkeypatch.setattr(sys, "meta_path", [looks, *sys.meta_path])
    with pytest.raises(ImportError, match="looked at"):
        export_openvino(here.model.model, Path())
    assert looks.sends == [False]
    assert sys.modules["openvino_telemetry"] is None


def test_an_engine_sends_no_telemetry(tmp_path: Path) -> None:
    stub = "openvino.tools.ovc.telemetry_stub"
    (tmp_path / "telemetry.py").write_text(REPORT_TELEMETRY)
    command = [sys.executable, worker.__file__, str(tmp_path / "telemetry.py")]
    done = subprocess.run(command, input='{"start": {}}\n', capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["about"] == {"telemetry": stub}


# --- conversions ----------------------------------------------------------------------------------------------------


def test_a_truncated_conversion_is_an_error_and_an_unfinished_one_is_repeated(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert_checkpoint(
        "openvino", here.model, OPENVINO_METHOD, lambda path: export_openvino(here.model.model, path)
    ).path
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    folder = shutil.copytree(whole, tmp_path / "openvino" / whole.name)
    weights = folder / "openvino_model.bin"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(RunError, match=r"was changed after its conversion; delete it") as error:
        here.start(CONDITIONS["f32"], tmp_path)
    assert str(folder) in str(error.value)
    (folder / CONVERSION).unlink()  # as in an interrupted conversion
    here.start(CONDITIONS["f32"], tmp_path).stop()
    assert weights.stat().st_size == size


def test_rounded_weights_are_another_conversion(here: World) -> None:
    rounded = load_model(dtype="bfloat16")
    assert rounded.sha256 == here.model.sha256, "the hash is that of the file"

    def weights(model: LoadedModel) -> bytes:
        folder = convert_checkpoint(
            "openvino", model, OPENVINO_METHOD, lambda path: export_openvino(model.model, path)
        ).path
        return (folder / "openvino_model.bin").read_bytes()

    exact, other = weights(here.model), weights(rounded)
    assert len(exact) == len(other)
    assert exact != other


def test_another_config_or_tokenizer_is_another_conversion(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    model = replace(here.model, model=SimpleNamespace(config=copy.deepcopy(here.model.model.config)))

    def folder(model: LoadedModel) -> Path:
        return convert_checkpoint("test", model, "one", lambda _: {"by": "1"}).path

    first = folder(model)
    assert folder(replace(model, files=dict(reversed(model.files.items())))) == first
    assert folder(replace(model, files={**model.files, "tokenizer.json": "00"})) != first
    model.model.config.transformers_version = "0"
    assert folder(model) == first
    model.model.config.rms_norm_eps *= 2
    assert folder(model) != first


def test_a_failed_conversion_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))

    def half(folder: Path) -> dict[str, str]:
        (folder / "weights").write_text("half of th")
        raise OSError(28, "No space left on device")

    def whole(folder: Path) -> dict[str, str]:
        assert list(folder.iterdir()) == []
        (folder / "weights").write_text("all of them")
        return {"by": "1"}

    with pytest.raises(RunError, match=r"cannot be converted .*No space left on device.*KVAUDIT_CACHE"):
        convert_once("test", "ab" * 32, "one", half)
    assert list((tmp_path / "test").glob("*/")) == []
    first = convert_once("test", "ab" * 32, "one", whole)
    assert convert_once("test", "ab" * 32, "one", half).path == first.path  # not converted again
    assert convert_once("test", "ab" * 32, "another", whole).path != first.path


@pytest.mark.parametrize("place", ["a file", "a file/below"])
def test_an_unwritable_cache_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path / place))
    with pytest.raises(RunError, match=r"cannot be converted into .*Not a directory.*KVAUDIT_CACHE"):
        convert_once("test", "ab" * 32, "one", lambda _: {})


def test_a_library_that_cannot_write_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))

    def convert(_: Path) -> dict[str, str]:
        raise RuntimeError("basic_ios::clear: iostream error")

    with pytest.raises(RunError, match=r"iostream error\); check the free space"):
        convert_once("test", "ab" * 32, "one", convert)


@pytest.mark.parametrize("content", ["{}", '{"of": 7, "files": []}', '{"files": null}'])
def test_a_damaged_conversion_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    folder = convert_once("test", "ab" * 32, "one", lambda _: {"by": "1"}).path
    (folder / CONVERSION).write_text(content)
    with pytest.raises(RunError, match="was changed after its conversion; delete it"):
        convert_once("test", "ab" * 32, "one", lambda _: {"by": "1"})


def test_concurrent_conversions_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Thread

    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    folders: list[Path] = []

    def convert(folder: Path) -> dict[str, str]:
        folders.append(folder)
        return {"by": "1"}

    with ExitStack() as stack:
        for thread in [Thread(target=convert_once, args=("test", "cd" * 32, "one", convert)) for _ in range(3)]:
            thread.start()
            stack.callback(thread.join)
    assert len(folders) == 1


def test_a_configured_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"expected a folder that holds openvino_model.xml"):
        World(None, [], []).start(CONDITIONS["f32"], tmp_path, EngineSpec(weights=str(tmp_path)))  # type: ignore[arg-type]
    assert OpenVino.install == install_command("openvino")


def test_a_prompt_beyond_the_cache_is_an_error(tmp_path: Path) -> None:
    model = load_model("embedded", device="cpu")
    settings = dict(parse_condition("openvino:num_kv_blocks=1,cache_size=0").settings)
    request = GenerationRequest(tuple(range(5, 905)), 8, (1,), 0.0, 1.0, 0)
    context = EngineContext(model, EngineSpec(), tmp_path / "log", 1)
    message = r"ended after \d+ of 8 tokens without a stop token; the prompt has 900"
    with ENGINES.get("openvino").start(settings, context) as session, pytest.raises(EngineFailed, match=message):
        session.answer([request])


@pytest.mark.parametrize(
    ("settings", "capabilities", "message"),
    [
        ({"INFERENCE_PRECISION_HINT": "bf16"}, ["FP32", "INT8"], "INFERENCE_PRECISION_HINT is bf16"),
        ({"INFERENCE_PRECISION_HINT": "f16"}, ["FP32", "BF16"], "INFERENCE_PRECISION_HINT is f16"),
        ({"KEY_CACHE_PRECISION": "bf16"}, ["FP32", "FP16"], "KEY_CACHE_PRECISION is bf16"),
        ({"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "f16"}, ["FP32", "BF16"], None),
        (
            {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"},
            ["FP32"],
            None,
        ),  # precision of the store, not of computing
    ],
)
def test_an_unsupported_precision_is_an_error(
    settings: dict[str, str], capabilities: list[str], message: str | None
) -> None:
    from kvaudit.audit.engines.inside.openvino_properties import _check_precisions

    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        _check_precisions("CPU", capabilities, settings)
