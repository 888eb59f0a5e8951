"""Training on rollouts that vLLM draws, by the python of KVAUDIT_PYTHON_VLLM."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import World, world

from kvaudit.audit.engines import ENGINES, parse_condition
from kvaudit.audit.engines.base import Drawer, DrawnRollout, EngineContext
from kvaudit.audit.engines.rollouts import model_weights
from kvaudit.audit.training.engine_rollouts import engine_rollout
from kvaudit.audit.training.learner import read_tokens
from kvaudit.core.spec_evaluate import EngineSpec

HEAT = 0.7
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM's fp8 on a CPU wants AVX-512"
    ),
]


@pytest.fixture(scope="module")
def here() -> World:
    return world()


@pytest.fixture(scope="module")
def python() -> str:
    path = os.environ.get("KVAUDIT_PYTHON_VLLM")
    if not path:
        pytest.skip("KVAUDIT_PYTHON_VLLM names no python that holds vllm")
    return path


@pytest.fixture(scope="module", params=["fp8_e4m3", "fp8_e5m2"])
def drawer(
    request: pytest.FixtureRequest, here: World, python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drawer]:
    settings = dict(parse_condition(f"vllm:kv_cache_dtype={request.param}").settings)
    log = tmp_path_factory.mktemp("vllm") / "log"
    found = ENGINES.get("vllm").drawer(settings, EngineContext(here.model, EngineSpec(python=python), log, 1))
    found.settings = settings  # type: ignore[attr-defined]
    yield found
    found.stop()


def gap(drawer: Any, here: World, model: Any, drawn: Sequence[DrawnRollout], kind: Any) -> float:
    """Root mean square over tokens of the engine's log-probs less a view of the learner."""
    store = ENGINES.get("vllm").store(drawer.settings)
    pairs = zip(here.asked, drawn, strict=True)
    rows = [engine_rollout(here.model.model.config, asked.ids, one, store) for asked, one in pairs]
    with torch.no_grad():
        read = read_tokens(model, rows, 1, kind, HEAT).logprobs
    said = torch.cat([row.sampler_logprobs[row.sampled] for row in rows])
    return float((said - read).square().mean().sqrt())


def test_the_replay_explains_it_and_pushed_weights_are_those_it_draws_by(drawer: Drawer, here: World) -> None:
    asked = [one._replace(temperature=HEAT) for one in here.asked]
    first = drawer.draw(asked, keep=len(asked))
    assert gap(drawer, here, here.model.model, first, "shadow") < 2e-5
    assert gap(drawer, here, here.model.model, first, "dense") > 1e-3
    changed = copy.deepcopy(here.model.model)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model_weights(changed).values():
            weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=draws))
    drawer.push(model_weights(changed))
    later = drawer.draw(asked, keep=len(asked))
    assert gap(drawer, here, changed, later, "shadow") < 2e-5
    assert gap(drawer, here, here.model.model, later, "shadow") > 1e-2
    drawer.push(model_weights(here.model.model))
    assert [one.ids for one in drawer.draw(asked, keep=0)] == [one.ids for one in first]


TELEMETRY = "run/checkpoints/smd/seed-1/telemetry.jsonl"
# 16 rollouts of 300 tokens a step: more than vLLM reads at once on a processor; agents speak in turns
SPEC = """
name: rollouts
evaluate: {base: true, policies: [none], suites: {refusal: {items: 8}}, context_tokens: [300]}
engines: {vllm: {python: PYTHON}}
train:
  rollouts: {engine: vllm, kv_cache_dtype: fp8_e5m2}
  arms: [smd]
  seeds: [1]
  suites: [refusal, agent]
  context_tokens: 300
  steps: 2
  prompts_per_step: 4
  group: 4
  learning_rate: 1.0e-3
  ledger_every: 1
"""


@pytest.mark.parametrize("how", ["", "  adapter: {rank: 4}"], ids=["plain", "adapter"])
def test_turns_are_replayed_without_and_with_an_adapter(how: str, python: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("PYTHON", json.dumps(python)) + how)
    words = ["run", "spec.yaml", "--out", "run", "--only", "train", "--threads", "1", "--anyway"]
    subprocess.run([sys.executable, "-m", "kvaudit", *words], cwd=tmp_path, check=True)
    told = [json.loads(line) for line in (tmp_path / TELEMETRY).read_text().splitlines()]
    assert len(told) == 2
    for row in told:
        assert row["engine/replay_rms"] < 2e-5
        assert row["engine/dense_rms"] > 1e-3
        assert row["mismatch/max_abs_gap"] < 1e-4
