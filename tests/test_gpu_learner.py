"""A learner's step on a device that is no CPU: where the host waits for it, and that nothing is mixed.

The device is pretended (``pretend_gpu.py``): forward, backward and optimiser run, and waits in each are noted.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_gpu import GPU, READS, UPLOADS, PretendGpu, pretend_gpu
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_world import config, sampled, sharp

from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import grpo
from kvaudit.audit.training.adapters import trainable_copy
from kvaudit.audit.training.batch import Batch
from kvaudit.audit.training.config import ARMS
from kvaudit.audit.training.learner import Learner
from kvaudit.audit.training.losses.published import Grpo
from kvaudit.audit.training.optimiser import Optimiser
from kvaudit.audit.training.telemetry import LearningResult
from kvaudit.core.spec_train import AdapterSpec

Waits = Counter[tuple[str, str]]
ONE_STEP = {
    "audit/training/losses/base.py:of": 1,  # what a gradient step holds
    "audit/training/optimiser.py:_clip": 1,  # the norm, which decides whether weights move
    "audit/training/optimiser.py:read_floats": 4,  # the halves' gradients, losses, what microbatches said, the rates
}

WITH_CRITIC = ONE_STEP | {
    "audit/training/optimiser.py:_clip": 2,  # the critic's norm too
    "audit/training/losses/base.py:whiten": 1,  # how many tokens there are
}
HANDED_OVER = {"audit/training/grpo.py:learn", "audit/training/learner.py:__init__"}


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    """A model of one layer: a second one asks for nothing that the first does not, and each operation is done twice."""
    loaded = sharp(tiny_folder)
    del loaded.model.model.layers[1:]
    loaded.model.config.num_hidden_layers = 1
    return loaded


@pytest.fixture(scope="module")
def batch(base: LoadedModel) -> Batch:
    """Two prompts, so two halves of one microbatch each."""
    return sampled(base, suites=["refusal"], prompts_per_step=2)


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with sdpa_kernel(SDPBackend.MATH), pretend_gpu() as gpu:
        yield gpu


def there(batch: Batch) -> Batch:
    """The batch where the model is; what is on the host stays there."""
    named = {own.name: getattr(batch, own.name) for own in fields(batch) if not own.name.startswith("host_")}
    return replace(batch, **{name: value.to(GPU) for name, value in named.items() if isinstance(value, Tensor)})


def learnt(model: Any, batch: Batch, reference: Any = None, **options: Any) -> LearningResult:
    settings = config(**({"prompts_per_step": 2, "steps": 1} | options))
    return grpo.learn(Learner(model, settings, reference), batch, step=0, max_tokens=40)


def waits(gpu: PretendGpu, base: LoadedModel, batch: Batch, **options: Any) -> dict[str, int]:
    """Reads of one step by place; nothing is handed over that is waited for."""
    model, given = copy.deepcopy(base.model).to(GPU), there(batch)
    reference = copy.deepcopy(base.model).to(GPU) if options.get("loss") == "online-dpo" else None
    gpu.waits.clear()
    learnt(model, given, reference, **options)
    # a number that the spec gives, and once in a run the head of a critic
    assert {place for kind, place in gpu.waits if kind == UPLOADS} <= HANDED_OVER
    return {place: count for (kind, place), count in gpu.waits.items() if kind == READS}


# arms that weigh as one of the others does, by a rollout or by a token
LIKE_ANOTHER = {"naive", "mis", "mis-sequence", "sparse-rl-text"}


@pytest.mark.parametrize("arm", [pytest.param(one, marks=[pytest.mark.slow] * (one in LIKE_ANOTHER)) for one in ARMS])
def test_a_step_reads_six_times_whatever_the_arm(gpu: PretendGpu, base: LoadedModel, batch: Batch, arm: str) -> None:
    assert waits(gpu, base, batch, arm=arm) == ONE_STEP


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "gspo", "online-dpo", "ppo"])
def test_a_step_reads_six_times_whatever_the_loss(gpu: PretendGpu, base: LoadedModel, batch: Batch, loss: str) -> None:
    found = waits(gpu, base, batch, loss=loss)
    assert found == (WITH_CRITIC if loss == "ppo" else ONE_STEP)


def test_more_microbatches_read_no_more(gpu: PretendGpu, base: LoadedModel, batch: Batch) -> None:
    assert waits(gpu, base, batch, microbatch_tokens=600) == ONE_STEP


def test_an_adapter_reads_as_whole_weights_do(gpu: PretendGpu, base: LoadedModel, batch: Batch) -> None:
    model = trainable_copy(base, AdapterSpec(rank=2), 1).model.to(GPU)
    given = there(batch)
    gpu.waits.clear()
    learnt(model, given)
    assert {place: count for (kind, place), count in gpu.waits.items() if kind == READS} == ONE_STEP


def test_the_device_learns_what_a_cpu_learns(gpu: PretendGpu, base: LoadedModel, batch: Batch) -> None:
    model, own = copy.deepcopy(base.model).to(GPU), copy.deepcopy(base.model)
    found, wanted = learnt(model, there(batch)), learnt(own, batch)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4, abs=1e-6)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.twin, own.get_parameter(name), rtol=0, atol=1e-4)


def test_a_read_that_is_planted_in_a_loss_is_found(
    gpu: PretendGpu, base: LoadedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Grpo.share
    monkeypatch.setattr(
        Grpo, "share", lambda self, inputs: plain(self, inputs) * float(inputs.logprobs.sum().item() != 1)
    )
    assert waits(gpu, base, batch) == ONE_STEP | {"audit/training/losses/base.py:__call__": 2}


def test_a_read_that_is_planted_in_a_backward_pass_is_found(
    gpu: PretendGpu, base: LoadedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Grpo.gain

    def gain(self: Grpo, ratio: Tensor, inputs: Any) -> Tensor:
        ratio.register_hook(lambda slope: slope * bool(slope.isfinite().all()))
        return plain(self, ratio, inputs)

    monkeypatch.setattr(Grpo, "gain", gain)
    assert waits(gpu, base, batch) == ONE_STEP | {"audit/training/grpo.py:learn": 2}


def test_a_read_that_is_planted_in_the_optimiser_is_found(
    gpu: PretendGpu, base: LoadedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Optimiser._update

    def update(self: Optimiser) -> None:
        next(iter(self._masters.values())).tolist()
        plain(self)

    monkeypatch.setattr(Optimiser, "_update", update)
    assert waits(gpu, base, batch) == ONE_STEP | {"audit/training/optimiser.py:step": 1}


def test_a_tensor_of_the_host_in_the_learners_pass_is_found(
    gpu: PretendGpu, base: LoadedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Grpo.share
    monkeypatch.setattr(Grpo, "share", lambda self, inputs: plain(self, inputs) * torch.ones(4, 1))
    with pytest.raises(AssertionError, match="mix devices"):
        waits(gpu, base, batch)
