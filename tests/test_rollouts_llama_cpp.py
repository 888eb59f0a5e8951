"""Training on rollouts that llama.cpp draws, by the python of KVAUDIT_PYTHON_LLAMA_CPP."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import World, world
from torch import Tensor
from training_world import config, rows, same_bits, sha256, silent

from kvaudit.audit.engines import ENGINES, parse_condition
from kvaudit.audit.engines.base import Drawer, DrawnRollout, EngineContext
from kvaudit.audit.engines.rollouts import WorkerDrawer, model_weights
from kvaudit.audit.training import grpo
from kvaudit.audit.training.engine_rollouts import EngineUse, engine_rollout
from kvaudit.audit.training.learner import read_tokens
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.spec_evaluate import EngineSpec

PYTHON = os.environ.get("KVAUDIT_PYTHON_LLAMA_CPP")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(PYTHON is None, reason="KVAUDIT_PYTHON_LLAMA_CPP names no python that has llama_cpp"),
]
PART = EngineSpec(python=PYTHON, at_once=4, start=300.0)
EXACT, COARSE = "llama.cpp:flash_attn=false,type_k=f32,type_v=f32", "llama.cpp:type_k=q4_0,type_v=q4_0"
HEAT = 0.7


@pytest.fixture(scope="module")
def here() -> World:
    return world()


@contextmanager
def started(here: World, condition: str, folder: Path, part: EngineSpec = PART) -> Iterator[Drawer]:
    settings = dict(parse_condition(condition).settings)
    drawer = ENGINES.get("llama.cpp").drawer(settings, EngineContext(here.model, part, folder / "log", 1))
    try:
        yield drawer
    finally:
        drawer.stop()


def gap(here: World, model: Any, drawn: Sequence[DrawnRollout], heat: float = HEAT, view: str = "dense") -> float:
    """Largest distance of the engine's log-probs from those of a model, in nats."""
    return float(gaps(here, model, drawn, heat, view).abs().max())


def gaps(here: World, model: Any, drawn: Sequence[DrawnRollout], heat: float, view: str) -> Tensor:
    store = ENGINES.get("llama.cpp").store({})
    config = here.model.model.config
    found = [engine_rollout(config, one.ids, own, store) for one, own in zip(here.asked, drawn, strict=True)]
    with torch.no_grad():
        read = read_tokens(model, found, 1, view, heat).logprobs  # type: ignore[arg-type]
    return torch.cat([row.sampler_logprobs[row.sampled] for row in found]) - read


def test_it_says_of_every_token_what_the_learner_says_by_the_weights_that_were_pushed(
    here: World, tmp_path: Path
) -> None:
    changed, draws = copy.deepcopy(here.model.model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model_weights(changed).values():
            weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=draws))
    warm = [one._replace(temperature=HEAT) for one in here.asked]
    with started(here, EXACT, tmp_path) as drawer:
        greedy, first = drawer.draw(here.asked, keep=9), drawer.draw(warm, keep=0)
        assert [one.ids for one in greedy] == [own.ids for own in here.own]
        for one, own in zip(greedy, here.own, strict=True):
            assert one.logprobs == pytest.approx(own.logprobs, abs=1e-4)  # float32, another order of sums
        assert gap(here, here.model.model, greedy, 1.0, "shadow") < 1e-4
        assert [one.written for one in first] == [None] * len(first)
        assert gap(here, here.model.model, first) < 1e-4
        drawer.push(model_weights(changed))
        later = drawer.draw(warm, keep=0)
        assert gap(here, changed, later) < 1e-4
        assert gap(here, here.model.model, later) > 1e-2
        drawer.push(model_weights(here.model.model))
        assert drawer.draw(warm, keep=0) == first
        other = drawer.draw([one._replace(seed=one.seed + 100) for one in warm], keep=0)
        assert [one.ids for one in other] != [one.ids for one in first]


def test_a_file_that_is_named_is_refused(here: World, tmp_path: Path) -> None:
    part = PART.model_copy(update={"weights": str(tmp_path / "model.gguf")})
    with (
        pytest.raises(
            SpecError, match=r"engines\.llama\.cpp\.weights cannot be used for training rollouts, .* remove it"
        ),
        started(here, EXACT, tmp_path, part),
    ):
        pass


def test_a_replay_of_what_its_queries_read_leaves_what_it_makes_of_the_queries(here: World, tmp_path: Path) -> None:
    """Without flash attention V lies transposed, and what is multiplied with it is in f16 too."""
    for condition, explained in (
        (EXACT.replace("type_v=f32", "type_v=f16"), 0.5),
        (COARSE, 0.98),
        ("llama.cpp:type_k=q8_0,type_v=q4_0", 0.98),
        ("llama.cpp:type_k=iq4_nl,type_v=q5_1", 0.98),
    ):
        with started(here, condition, tmp_path) as drawer:
            drawn = drawer.draw([one._replace(temperature=HEAT) for one in here.asked], keep=99)
        whole, left = (gaps(here, here.model.model, drawn, HEAT, view).square().sum() for view in ("dense", "shadow"))
        assert 1 - left / whole > explained, condition


# --- training ---------------------------------------------------------------------------------------------------------


def trained(here: World, arm: str, out: Path) -> Path:
    plain: dict[str, Any] = {"policy": "none", "rollouts": COARSE, "suites": ["refusal"], "context_tokens": 100}
    plain |= {"steps": 2, "group": 2, "learning_rate": 1e-3, "ledger_every": 1, "save_every": 1, "temperature": 1.5}
    return grpo.train(config(arm=arm, **plain), here.model, out, silent, engine=EngineUse(PART))


@pytest.fixture(scope="module")
def arms(here: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("arms")
    return {arm: trained(here, arm, out / arm) for arm in ("dense", "naive", "tis", "smd")}


def test_every_arm_learns_from_the_cache_that_it_was_to_be_drawn_under(arms: dict[str, Path]) -> None:
    gaps = {arm: [row["engine/dense_rms"] for row in rows(folder)] for arm, folder in arms.items()}
    assert max(gaps.pop("dense")) < 2e-3  # an f16 cache
    assert all(min(found) > 5e-3 for found in gaps.values())
    assert len({sha256(folder / "model.safetensors") for folder in arms.values()}) == len(arms)
    assert all(row["engine/explained"] > 0.9 for row in rows(arms["smd"]))
    assert {row["engine/replay_rms"] for arm in ("naive", "tis") for row in rows(arms[arm])} == {None}


def test_stale_weights_stop_the_step_and_the_run_goes_on(
    here: World, arms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, heard = WorkerDrawer.push, list[int]()

    def lost(self: WorkerDrawer, weights: Any) -> None:
        """A push that the engine never hears of, from the second step on."""
        heard.append(1)
        if len(heard) == 1:
            push(self, weights)
        else:
            self._pushed = self._write(weights)[1]

    monkeypatch.setattr(WorkerDrawer, "push", lost)
    with pytest.raises(RunError, match=r"^engine llama\.cpp drew with weights '\w{12}', the learner has \w{12}: "):
        trained(here, "tis", tmp_path / "tis")
    monkeypatch.undo()
    assert same_bits(trained(here, "tis", tmp_path / "tis"), arms["tis"])


def test_an_engine_that_dies_is_started_again(
    here: World, arms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, deaths = WorkerDrawer.draw, list[int]()

    def dying(self: WorkerDrawer, asked: Any, *, keep: int) -> list[DrawnRollout]:
        if not deaths:
            deaths.append(1)
            self._session.stop()
        return draw(self, asked, keep=keep)

    monkeypatch.setattr(WorkerDrawer, "draw", dying)
    assert same_bits(trained(here, "tis", tmp_path / "tis"), arms["tis"])
