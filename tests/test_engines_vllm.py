"""vLLM where it is not installed: what is said to it before it starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvaudit.audit.engines.vllm import _own_gpu


@pytest.mark.parametrize(
    ("device", "shown", "settings", "wanted"),
    [
        ("cpu", None, {}, None),
        ("cuda:3", None, {}, "3"),
        ("cuda", None, {}, "0"),
        ("cuda:1", "4,6,7", {}, "6"),  # numbers of torch are places among those that this process sees
        ("cuda:1", "GPU-a,GPU-b", {}, "GPU-b"),
        ("cuda:1", None, {"tensor_parallel_size": "1"}, "1"),
        ("cuda:1", "4,6,7", {"tensor_parallel_size": "2"}, None),  # it takes several, which is the user's to say
    ],
)
def test_an_engine_that_draws_is_put_on_the_learner_s_gpu(
    device: str, shown: str | None, settings: dict[str, str], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    work: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
    assert _own_gpu(settings, work) == ({} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted})
