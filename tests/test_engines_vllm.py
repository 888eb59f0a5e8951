"""vLLM where it is not installed: what is said to it before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvaudit.audit.engines.base import EngineContext
from kvaudit.audit.engines.vllm import Vllm, _flags, _own_gpu
from kvaudit.audit.engines.weights import safetensors_folder
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec


@pytest.mark.parametrize(
    ("device", "shown", "settings", "wanted"),
    [
        ("cpu", None, {}, None),
        ("cuda:3", None, {}, "3"),
        ("cuda", None, {}, "2"),  # a rank's, which has set the third
        ("cuda", "4,6,7", {}, "7"),
        ("cuda:1", "4,6,7", {}, "6"),  # numbers of torch are places among those that this process sees
        ("cuda:1", "GPU-a,GPU-b", {}, "GPU-b"),
        ("cuda:1", None, {"tensor_parallel_size": "1"}, "1"),
        ("cuda:1", "4,6,7", {"tensor_parallel_size": "2"}, None),  # it takes several, which is the user's to say
    ],
)
def test_an_engine_that_draws_is_put_on_the_learner_s_gpu(
    device: str, shown: str | None, settings: dict[str, str], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    work: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
    assert _own_gpu(settings, work) == ({} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted})


def test_on_a_processor_prompts_are_read_whole_unless_the_settings_say_how() -> None:
    def said(device: str, **settings: str) -> list[str]:
        model = SimpleNamespace(device=torch.device(device), max_positions=8192)
        return _flags(settings, EngineContext(model, EngineSpec(), Path("log"), 1))  # type: ignore[arg-type]

    whole = ["--no-enable-chunked-prefill", "--max-num-batched-tokens=8192"]
    assert said("cpu", kv_cache_dtype="fp8")[-3:] == ["--kv-cache-dtype=fp8", *whole]
    assert said("cpu", max_model_len="512")[-1] == "--max-num-batched-tokens=4096"
    assert said("cuda") == said("cpu")[:-2]
    # each for itself: with one of them alone a row with a seed would end it again
    assert "--no-enable-chunked-prefill" in said("cpu", max_num_batched_tokens="64")
    assert "--max-num-batched-tokens=64" in said("cpu", max_num_batched_tokens="64")
    assert "--enable-chunked-prefill" in said("cpu", enable_chunked_prefill="true")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enable_prefix_caching", "true", "keeps keys and values of weights"),
        ("tensor_parallel_size", "2", "tensor_parallel_size is 2, .* take train.ranks"),
        ("pipeline_parallel_size", "2", "wanted 1"),
        ("data_parallel_size", "4", "wanted 1"),
    ],
)
def test_what_it_cannot_draw_by_is_refused_by_name(name: str, value: str, words: str) -> None:
    Vllm.check_drawing({name: "false" if value == "true" else "1"})
    with pytest.raises(SpecError, match=words):
        Vllm.check_drawing({name: value})


def test_a_folder_whose_weights_the_model_has_rounded_is_not_served_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    whole, rounded = load_model(), load_model(dtype="bfloat16")
    assert whole.sha256 == rounded.sha256, "which is of the file"
    as_it_lies, other = (
        safetensors_folder(EngineContext(one, EngineSpec(), tmp_path / "log", 1), "vllm") for one in (whole, rounded)
    )
    assert "as they lie" in as_it_lies.origin
    assert "of bfloat16" in other.origin
    served = load_file(other.path / "model.safetensors")
    own = rounded.model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in served.items())
    # what is held wider than it lies there is the same numbers
    wider = load_model(str(other.path))
    assert wider.dtype == torch.float32
    assert safetensors_folder(EngineContext(wider, EngineSpec(), tmp_path / "log", 1), "vllm").path == other.path.resolve()
