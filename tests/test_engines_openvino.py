"""OpenVINO on the embedded model: our own cache's tokens in f32, and a code that acts, more bits less."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from engine_world import World, world

from kvaudit.audit.engines import ENGINES, GenerationRequest, Reply, parse_condition
from kvaudit.audit.engines.base import EngineFailed, EngineContext
from kvaudit.audit.engines.exports.openvino import OPENVINO_METHOD, export_openvino
from kvaudit.audit.engines.inside import worker
from kvaudit.audit.engines.openvino import OpenVino
from kvaudit.audit.engines.weights import CONVERSION, convert_once, convert_checkpoint
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import install_line

pytest.importorskip("openvino_genai", reason="needs kvaudit[openvino]")

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
    """A folder for what engines write."""
    return tmp_path_factory.mktemp("openvino")


@pytest.fixture(scope="module")
def replies(here: World, logs: Path) -> dict[str, list[Reply]]:
    """What every condition says to the same requests."""
    found = {}
    for name, text in CONDITIONS.items():
        with here.start(text, logs) as session:
            found[name] = session.answer(here.asked)
    return found


def test_f32_says_what_our_own_cache_says(here: World, replies: dict[str, list[Reply]]) -> None:
    assert here.says_the_same(replies["f32"])
    assert max(here.gaps(replies["f32"])) < 1e-5  # float32, another order of sums


def test_by_itself_it_serves_a_compressed_cache_and_that_is_written_out() -> None:
    found = parse_condition(CONDITIONS["u8"])
    assert found.canonical == "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=u8,cache_size=2"
    assert found.compressing == ["KV_CACHE_PRECISION"]
    assert found.reference.canonical == "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=f32,cache_size=2"


def test_fewer_bits_move_the_log_probs_further(here: World, replies: dict[str, list[Reply]]) -> None:
    assert 1e-4 < here.mean_gap(replies["u8"]) < here.mean_gap(replies["u4"])


def test_keys_and_values_are_coded_apart(replies: dict[str, list[Reply]]) -> None:
    worths = {name: tuple(one.logprob for one in found) for name, found in replies.items()}
    assert len({worths[name] for name in CONDITIONS}) == len(CONDITIONS)


@pytest.mark.parametrize(
    ("text", "words"),
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
def test_what_the_engine_does_not_know_is_said_in_its_words(here: World, logs: Path, text: str, words: str) -> None:
    with pytest.raises(EngineFailed) as error:
        here.start(text, logs)
    assert words in str(error.value)
    assert str(error.value).startswith("engine openvino refuses: ")
    assert str(error.value).isprintable()


# what acts on long prompts alone: an eviction, and a prefill in more chunks than one; f32 in all else
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
    """What evicts or reads sparsely says to a prompt of some hundred tokens, and what it says of itself."""
    found = {}
    for name, settings in ON_LONG.items():
        text = f"openvino:KV_CACHE_PRECISION=f32,max_num_batched_tokens=64{settings and ','}{settings}"
        with here.start(text, logs) as session:
            found[name] = session.answer([long_prompt]), dict(session.described)
    return found


def test_kvcrush_and_sparse_prefill_act_as_they_are_told(
    on_long: dict[str, tuple[list[Reply], dict[str, str]]],
) -> None:
    worths = {name: replies[0].logprob for name, (replies, _) in on_long.items()}
    assert worths.pop("tri that keeps all") == worths["f32"], "its 128 first and 1920 last tokens are all there are"
    assert len(set(worths.values())) == len(worths), worths


def test_a_prompt_of_one_chunk_is_read_whole_by_trishape_and_not_by_xattention(
    here: World, logs: Path, long_prompt: GenerationRequest
) -> None:
    found = {}
    for name in ("f32", "tri", "x"):
        settings = ON_LONG[name]
        text = f"openvino:KV_CACHE_PRECISION=f32,max_num_batched_tokens=1024{settings and ','}{settings}"
        with here.start(text, logs) as session:
            found[name] = session.answer([long_prompt])[0].logprob
    assert found["tri"] == found["f32"]
    assert found["x"] != found["f32"]


def test_adaptive_rkv_fails_in_the_words_of_the_engine(here: World, logs: Path, long_prompt: GenerationRequest) -> None:
    """Of 2026.4.1; once it answers, docs/audit-an-engine.md says too much."""
    with (
        here.start(f"openvino:KV_CACHE_PRECISION=f32,{EVICTING},aggregation_mode=ADAPTIVE_RKV", logs) as session,
        pytest.raises(EngineFailed, match="Diversity score size mismatch"),
    ):
        session.answer([long_prompt])


def test_it_says_what_it_made_of_them(on_long: dict[str, tuple[list[Reply], dict[str, str]]]) -> None:
    crush, sparse, plain = (on_long[name][1] for name in ("crush", "x", "f32"))
    assert (crush["kvcrush_config.budget"], crush["kvcrush_config.anchor_point_mode"]) == ("1", "MEAN")
    assert "max_cache_size: 128" in crush["eviction"]
    assert sparse["sparse_attention_config.mode"] == "XATTENTION"
    assert sparse["sparse_attention_config.xattention_threshold"].startswith("0.1")
    assert plain["scheduler"].endswith("eviction off")
    assert not [name for name in plain if "config" in name or name == "eviction"]


def test_the_reference_neither_evicts_nor_reads_sparsely() -> None:
    found = parse_condition(f"openvino:KV_CACHE_PRECISION=f32,{ON_LONG['crush']},{ON_LONG['x']}")
    assert found.reference.canonical == "openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=f32,cache_size=2"
    assert "use_sparse_attention" in found.compressing
    assert parse_condition("openvino:KV_CACHE_PRECISION=f32,use_sparse_attention=false").compressing == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("max_cache_size=128", "wants start_size, recent_size, max_cache_size beside it; add start_size, recent_size"),
        ("kvcrush_config.budget=1", "wants start_size, recent_size, max_cache_size beside it"),
        (f"{EVICTING},kvcrush_config.rng_seed=1", "does nothing without a kvcrush_config.budget above 0"),
        (f"{EVICTING},kvcrush_config.budget=1,aggregation_mode=ADAPTIVE_RKV", "does nothing under aggregation_mode"),
        ("use_sparse_attention=false,sparse_attention_config.mode=TRISHAPE", "does nothing with use_sparse_attention"),
    ],
)
def test_settings_of_a_part_that_is_off_are_refused(settings: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_condition(f"openvino:{settings}")


def test_it_says_what_it_is(here: World, logs: Path) -> None:
    with here.start(CONDITIONS["u4"], logs) as session:
        assert session.described["KV_CACHE_PRECISION"] == "u4"
        assert session.described["version"].startswith("openvino_genai 202")
        assert "float32, traced" in session.described["weights"]


def test_answers_are_drawn_by_seed(here: World, logs: Path) -> None:
    heat = [one._replace(temperature=1.0) for one in here.asked]
    with here.start(CONDITIONS["f32"], logs) as session:
        first = session.answer(heat)
        assert session.answer(heat) == first
        assert session.answer([one._replace(seed=one.seed + 100) for one in heat]) != first


TELLS = """
import openvino
from openvino.tools.ovc import telemetry_utils
def start(setup):
    return {"sends by": telemetry_utils.tm.__name__}, None
"""


def test_nothing_is_sent_home_by_a_conversion_or_by_an_engine(tmp_path: Path) -> None:
    stub = "openvino.tools.ovc.telemetry_stub"
    export = "load_model().model, Path(sys.argv[1])"
    code = (
        "import sys; from pathlib import Path; from kvaudit.audit.sampling.model import load_model; "
        f"from kvaudit.audit.engines.exports.openvino import export_openvino; export_openvino({export}); "
        "from openvino.tools.ovc import telemetry_utils; print(telemetry_utils.tm.__name__)"
    )
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == stub
    (tmp_path / "tells.py").write_text(TELLS)
    command = [sys.executable, worker.__file__, str(tmp_path / "tells.py")]
    said = subprocess.run(command, input='{"start": {}}\n', capture_output=True, text=True, check=True)
    assert json.loads(said.stdout)["about"] == {"sends by": stub}


# --- conversions ----------------------------------------------------------------------------------------------------


def test_a_conversion_that_was_cut_short_is_refused_and_one_half_made_is_made_again(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert_checkpoint("openvino", here.model, OPENVINO_METHOD, lambda path: export_openvino(here.model.model, path)).path
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    folder = shutil.copytree(whole, tmp_path / "openvino" / whole.name)
    weights = folder / "openvino_model.bin"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(RunError, match=r"is not the conversion that was written there; delete it") as error:
        here.start(CONDITIONS["f32"], tmp_path)
    assert str(folder) in str(error.value)
    (folder / CONVERSION).unlink()  # as a kill leaves it
    here.start(CONDITIONS["f32"], tmp_path).stop()
    assert weights.stat().st_size == size


def test_weights_that_a_model_holds_rounded_are_another_conversion(here: World) -> None:
    rounded = load_model(dtype="bfloat16")
    assert rounded.sha256 == here.model.sha256, "which is of the file"

    def weights(model: LoadedModel) -> bytes:
        folder = convert_checkpoint("openvino", model, OPENVINO_METHOD, lambda path: export_openvino(model.model, path)).path
        return (folder / "openvino_model.bin").read_bytes()

    exact, other = weights(here.model), weights(rounded)
    assert len(exact) == len(other)
    assert exact != other


def test_a_conversion_that_fails_leaves_nothing_that_could_be_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    found = convert_once("test", "ab" * 32, "one", whole)
    assert convert_once("test", "ab" * 32, "one", half).path == found.path  # what is kept is not made again
    assert convert_once("test", "ab" * 32, "another way", whole).path != found.path


@pytest.mark.parametrize("place", ["a file", "a file/below"])
def test_a_cache_that_nobody_can_write_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path / place))
    with pytest.raises(RunError, match=r"cannot be converted into .*Not a directory.*KVAUDIT_CACHE"):
        convert_once("test", "ab" * 32, "one", lambda _: {})


def test_a_library_that_cannot_write_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))

    def convert(_: Path) -> dict[str, str]:
        raise RuntimeError("basic_ios::clear: iostream error")

    with pytest.raises(RunError, match=r"iostream error\); see whether there is room"):
        convert_once("test", "ab" * 32, "one", convert)


@pytest.mark.parametrize("story", ["{}", '{"of": 7, "files": []}', '{"files": null}'])
def test_a_conversion_whose_story_is_spoilt_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: str
) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    folder = convert_once("test", "ab" * 32, "one", lambda _: {"by": "1"}).path
    (folder / CONVERSION).write_text(story)
    with pytest.raises(RunError, match="is not the conversion that was written there; delete it"):
        convert_once("test", "ab" * 32, "one", lambda _: {"by": "1"})


def test_two_that_convert_at_once_get_one_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Thread

    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    made: list[Path] = []

    def convert(folder: Path) -> dict[str, str]:
        made.append(folder)
        return {"by": "1"}

    with ExitStack() as stack:
        for thread in [Thread(target=convert_once, args=("test", "cd" * 32, "one", convert)) for _ in range(3)]:
            thread.start()
            stack.callback(thread.join)
    assert len(made) == 1


def test_weights_of_the_users_own_are_served_as_they_are_or_refused(tmp_path: Path) -> None:
    from kvaudit.core.spec_evaluate import EngineSpec

    with pytest.raises(SpecError, match=r"wanted a folder that holds openvino_model.xml"):
        World(None, [], []).start(CONDITIONS["f32"], tmp_path, EngineSpec(weights=str(tmp_path)))  # type: ignore[arg-type]
    assert OpenVino.install == install_line("openvino")


def test_a_prompt_that_does_not_fit_the_cache_is_no_empty_answer(tmp_path: Path) -> None:
    model = load_model("embedded", device="cpu")
    settings = dict(parse_condition("openvino:num_kv_blocks=1,cache_size=0").settings)
    asked = GenerationRequest(tuple(range(5, 905)), 8, (1,), 0.0, 1.0, 0)
    work = EngineContext(model, EngineSpec(), tmp_path / "log", 1)
    said = r"ended after \d+ of 8 tokens without an end; the prompt has 900"
    with ENGINES.get("openvino").start(settings, work) as session, pytest.raises(EngineFailed, match=said):
        session.answer([asked])


@pytest.mark.parametrize(
    ("settings", "computes", "named"),
    [
        ({"INFERENCE_PRECISION_HINT": "bf16"}, ["FP32", "INT8"], "INFERENCE_PRECISION_HINT is bf16"),
        ({"INFERENCE_PRECISION_HINT": "f16"}, ["FP32", "BF16"], "INFERENCE_PRECISION_HINT is f16"),
        ({"KEY_CACHE_PRECISION": "bf16"}, ["FP32", "FP16"], "KEY_CACHE_PRECISION is bf16"),
        ({"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "f16"}, ["FP32", "BF16"], None),
        ({"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}, ["FP32"], None),  # stored, not computed in
    ],
)
def test_a_precision_that_the_processor_lacks_is_said(
    settings: dict[str, str], computes: list[str], named: str | None
) -> None:
    from kvaudit.audit.engines.inside.openvino_properties import _check_computes

    with nullcontext() if named is None else pytest.raises(ValueError, match=named):
        _check_computes("CPU", computes, settings)
