"""vLLM without an installation: its flags, environment and weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTNeoXConfig

from kvaudit.audit.engines.base import EngineContext
from kvaudit.audit.engines.vllm import Vllm, _environment, _flags, _learner_gpu
from kvaudit.audit.engines.weights import safetensors_folder
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec


def test_a_model_with_as_many_key_heads_as_query_heads_is_given_its_cache() -> None:
    layers, width, positions = 4, 1024, 1 << 17
    config = GPTNeoXConfig(hidden_size=width, num_attention_heads=8, num_hidden_layers=layers)
    model = SimpleNamespace(model=SimpleNamespace(config=config), max_positions=positions)
    context = EngineContext(model, EngineSpec(), Path("log"), 1)  # type: ignore[arg-type]
    # keys and values of every layer in float32
    assert _environment({}, context)["VLLM_CPU_KVCACHE_SPACE"] == str(2 * layers * width * 4 * positions >> 30)
    assert _environment({"max_model_len": "²"}, context)["VLLM_CPU_KVCACHE_SPACE"] == "4"


@pytest.mark.parametrize(
    ("device", "visible", "settings", "expected"),
    [
        ("cpu", None, {}, None),
        ("cuda:3", None, {}, "3"),
        ("cuda", None, {}, "2"),  # of a rank, whose current device is 2
        ("cuda", "4,6,7", {}, "7"),
        ("cuda:1", "4,6,7", {}, "6"),  # torch numbers the visible devices
        ("cuda:1", "GPU-a,GPU-b", {}, "GPU-b"),
        ("cuda:1", None, {"tensor_parallel_size": "1"}, "1"),
        ("cuda:1", "4,6,7", {"tensor_parallel_size": "2"}, None),  # several GPUs: the user selects them
    ],
)
def test_rollouts_use_the_gpu_of_the_learner(
    device: str, visible: str | None, settings: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    context: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
    assert _learner_gpu(settings, context) == ({} if expected is None else {"CUDA_VISIBLE_DEVICES": expected})


def test_on_a_cpu_prompts_are_not_chunked_by_default() -> None:
    def flags(device: str, **settings: str) -> list[str]:
        model = SimpleNamespace(device=torch.device(device), max_positions=8192)
        return _flags(settings, EngineContext(model, EngineSpec(), Path("log"), 1))  # type: ignore[arg-type]

    unchunked = ["--no-enable-chunked-prefill", "--max-num-batched-tokens=8192"]
    assert flags("cpu", kv_cache_dtype="fp8")[-3:] == ["--kv-cache-dtype=fp8", *unchunked]
    assert flags("cpu", max_model_len="512")[-1] == "--max-num-batched-tokens=4096"
    assert flags("cuda") == flags("cpu")[:-2]
    # either default stays if the other is overridden: both are needed against the crash
    assert "--no-enable-chunked-prefill" in flags("cpu", max_num_batched_tokens="64")
    assert "--max-num-batched-tokens=64" in flags("cpu", max_num_batched_tokens="64")
    assert "--enable-chunked-prefill" in flags("cpu", enable_chunked_prefill="true")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enable_prefix_caching", "true", "would reuse keys and values of an earlier"),
        ("tensor_parallel_size", "2", "tensor_parallel_size is 2, .* remove it from train.rollouts"),
        ("pipeline_parallel_size", "2", "expected 1"),
        ("data_parallel_size", "4", "expected 1"),
    ],
)
def test_settings_that_cannot_draw_rollouts_are_errors(name: str, value: str, message: str) -> None:
    Vllm.check_drawing({name: "false" if value == "true" else "1"})
    with pytest.raises(SpecError, match=message):
        Vllm.check_drawing({name: value})


def test_a_model_with_rounded_weights_is_not_served_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    whole, rounded = load_model(), load_model(dtype="bfloat16")
    assert whole.sha256 == rounded.sha256, "the hash is that of the file"
    as_it_lies, other = (
        safetensors_folder(EngineContext(one, EngineSpec(), tmp_path / "log", 1), "vllm") for one in (whole, rounded)
    )
    assert "as they lie" in as_it_lies.origin
    assert "of bfloat16" in other.origin
    served = load_file(other.path / "model.safetensors")
    state = rounded.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in served.items())
    # a wider dtype than that of the file holds the same numbers
    wider = load_model(str(other.path))
    assert wider.dtype == torch.float32
    assert (
        safetensors_folder(EngineContext(wider, EngineSpec(), tmp_path / "log", 1), "vllm").path == other.path.resolve()
    )
