"""Checkpoints as GGUF files, and llama.cpp: equal to our own cache in f32 and f16, further from it with fewer bits."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine_world import World, world
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvaudit.audit.engines import Reply, parse_condition
from kvaudit.audit.engines.base import EngineFailed
from kvaudit.audit.engines.exports.llama_cpp import GGUF_FILE, export_gguf
from kvaudit.audit.sampling.weights import check_gguf
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec

PYTHON = os.environ.get("KVAUDIT_PYTHON_LLAMA_CPP")
needs_it = pytest.mark.skipif(PYTHON is None, reason="KVAUDIT_PYTHON_LLAMA_CPP names no python that has llama_cpp")
needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs kvaudit[llama-cpp]")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**{**SIZES, "head_dim": 16}),
}


def random_model(config: object) -> torch.nn.Module:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # including biases, which are 0 at first
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@needs_gguf
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_file_holds_every_tensor_of_the_model(family: str, tmp_path: Path) -> None:
    import gguf

    model = random_model(FAMILIES[family])
    used = export_gguf(model, tmp_path)
    check_gguf(tmp_path / GGUF_FILE)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / GGUF_FILE).tensors}
    state = model.state_dict()
    tied = FAMILIES[family].tie_word_embeddings
    assert ("output.weight" in found) is not tied
    assert len(found) == len(state) - tied + (family == "llama3")
    assert (found["token_embd.weight"] == state["model.embed_tokens.weight"].numpy()).all()
    assert set(used) == {"gguf", "torch"}


@needs_gguf
def test_queries_and_keys_of_a_llama_are_interleaved(tmp_path: Path) -> None:
    import gguf

    model = random_model(FAMILIES["llama"])
    export_gguf(model, tmp_path)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / GGUF_FILE).tensors}
    rows = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    order = [head * 8 + half * 4 + place for head in range(4) for place in range(4) for half in (0, 1)]
    assert (found["blk.0.attn_q.weight"] == rows[order]).all()
    assert (found["blk.0.attn_v.weight"] == model.state_dict()["model.layers.0.self_attn.v_proj.weight"].numpy()).all()


@needs_gguf
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(**SIZES, sliding_window=16), "some of its layers do not use full attention"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "its hidden_act is gelu, expected silu"),
        (
            Qwen2Config(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
            "qwen2 has no positions of the kind linear there",
        ),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}),
            "its yarn positions",
        ),
    ],
)
def test_models_that_llama_cpp_would_compute_differently_are_errors(
    config: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message) as error:
        export_gguf(random_model(config), tmp_path)
    assert "give a GGUF file of it as engines.llama.cpp.weights" in str(error.value)


@needs_gguf
def test_an_unknown_architecture_is_an_error(tmp_path: Path) -> None:
    from transformers import GPT2Config

    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(
        SpecError, match=r"its architecture is gpt2, supported: llama, mistral, qwen2, qwen3; give a GGUF"
    ):
        export_gguf(model, tmp_path)


def test_both_types_and_flash_attention_are_written_out() -> None:
    found = parse_condition({"engine": "llama.cpp", "type_v": "q4_0"})
    assert found.canonical == "llama.cpp:flash_attn=true,type_k=f16,type_v=q4_0"
    assert found.compressing == ["type_v"]
    assert found.reference.canonical == "llama.cpp:flash_attn=true,type_k=f16,type_v=f16"


# --- the engine itself ----------------------------------------------------------------------------------------------

PART = EngineSpec(python=PYTHON, at_once=4, start=300.0)
EXACT = "llama.cpp:flash_attn=false,type_k=f32,type_v=f32"


@pytest.fixture(scope="module")
def here() -> World:
    return world()


@pytest.fixture(scope="module")
def replies(here: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Reply]]:
    """The replies of each cache type to the same requests."""
    by_kind = {}
    for kind in ("f16", "bf16", "q8_0", "q4_0"):
        with here.start(f"llama.cpp:type_k={kind},type_v={kind}", tmp_path_factory.mktemp("llama"), PART) as session:
            by_kind[kind] = session.answer(here.asked)
            assert (session.described["type_k"], session.described["type_v"]) == (kind, kind)
            assert session.described["flash_attn"] == "enabled"
            assert session.described["K rotated"] == "0"  # heads of 32 are never rotated, heads of 64 by default
    return by_kind


@needs_it
@pytest.mark.engines
def test_f32_matches_our_own_cache(here: World, tmp_path: Path) -> None:
    with here.start(EXACT, tmp_path, PART) as session:
        found = session.answer(here.asked)
    assert here.matches(found)
    assert max(here.gaps(found)) < 1e-5  # float32, another order of sums


@needs_it
@pytest.mark.engines
def test_f16_matches_our_own_cache_and_fewer_bits_move_the_log_probs_further(
    here: World, replies: dict[str, list[Reply]]
) -> None:
    assert here.matches(replies["f16"])
    assert max(here.gaps(replies["f16"])) < 2e-3  # flash attention rounds queries to 11 bits too
    assert here.mean_gap(replies["f16"]) < here.mean_gap(replies["q8_0"]) < here.mean_gap(replies["q4_0"])
    assert here.mean_gap(replies["f16"]) < here.mean_gap(replies["bf16"]) < here.mean_gap(replies["q4_0"])


@needs_it
@pytest.mark.engines
def test_more_requests_than_sequences_are_answered_in_their_order(here: World, tmp_path: Path) -> None:
    asked = [
        one._replace(max_tokens=limit) for one, limit in zip(here.asked * 2, (5, 1, 7, 3, 2, 9, 4, 6), strict=True)
    ]
    with here.start(EXACT, tmp_path, PART.model_copy(update={"at_once": 3})) as session:
        found = session.answer(asked)
    assert [len(reply.ids) for reply in found] == [5, 1, 7, 3, 2, 9, 4, 6]
    assert [reply.ids for reply in found] == [
        own.ids[: one.max_tokens] for own, one in zip(here.own * 2, asked, strict=True)
    ]


@needs_it
@pytest.mark.engines
def test_a_long_prompt_is_read_in_several_batches(here: World, tmp_path: Path) -> None:
    with here.start(f"{EXACT},n_batch=16,n_ubatch=8", tmp_path, PART) as session:
        assert here.matches(session.answer(here.asked))


@needs_it
@pytest.mark.engines
def test_answers_depend_on_the_seed_and_end_at_a_stop_token(here: World, tmp_path: Path) -> None:
    sampled = [one._replace(temperature=1.0, top_p=0.9) for one in here.asked]
    with here.start(EXACT, tmp_path, PART) as session:
        first = session.answer(sampled)
        assert session.answer(sampled) == first
        assert session.answer([one._replace(seed=one.seed + 100) for one in sampled]) != first
        stop = here.own[0].ids[2]
        (found,) = session.answer([here.asked[0]._replace(stops=(stop,))])
    assert found.finish == "stop"
    assert found.ids == here.own[0].ids[: here.own[0].ids.index(stop) + 1]


@needs_it
@pytest.mark.engines
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("type_k=q6_K", "type_k is 'q6_K', expected f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl"),
        ("type_v=8", "type_v is '8', expected f32"),
        ("type_v=q8_0,flash_attn=false", "quantized V cache requires flash_attn to be enabled"),
        ("flash_attn=yes", "flash_attn is 'yes', expected true, false, auto"),
        ("n_batch=many", "n_batch is 'many'"),
        ("n_ctx=-5", "n_ctx is -5, out of range"),
        ("cb_eval=1", "cb_eval cannot be set by text"),
    ],
)
def test_unknown_settings_are_errors(here: World, tmp_path: Path, settings: str, message: str) -> None:
    with pytest.raises(EngineFailed) as error:
        here.start(f"llama.cpp:{settings}", tmp_path, PART)
    assert message in str(error.value)
    assert str(error.value).isprintable()


@needs_it
@pytest.mark.engines
def test_a_request_beyond_the_context_is_an_error(here: World, tmp_path: Path) -> None:
    with (
        here.start("llama.cpp:n_ctx=256", tmp_path, PART.model_copy(update={"at_once": 1})) as session,
        pytest.raises(EngineFailed, match=r"a request takes \d+ tokens, n_ctx_seq is 256"),
    ):
        session.answer([here.asked[0]._replace(ids=here.asked[0].ids * 100)])


@needs_it
@pytest.mark.engines
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_matches_transformers(family: str, tmp_path: Path) -> None:
    """Compare the log-prob of one token after each of three prompts."""
    from types import SimpleNamespace
    from typing import Any, cast

    from kvaudit.audit.engines import GenerationRequest
    from kvaudit.audit.engines.base import ENGINES, EngineContext

    model = random_model(FAMILIES[family])
    prompts = [tuple(range(3, 3 + size)) for size in (2, 20, 50)]
    with torch.no_grad():
        wanted = [cast(Any, model)(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1).max() for ids in prompts]
    loaded = cast(Any, SimpleNamespace(model=model, sha256=family.ljust(64, "0"), name=family, dtype=model.dtype))
    settings = dict(parse_condition(EXACT).settings)
    with ENGINES.get("llama.cpp").start(settings, EngineContext(loaded, PART, tmp_path / "log", 1)) as session:
        found = session.answer([GenerationRequest(ids, 1, (), 0.0, 1.0, 0) for ids in prompts])
    assert [reply.logprob for reply in found] == pytest.approx([float(worth) for worth in wanted], abs=1e-4)
