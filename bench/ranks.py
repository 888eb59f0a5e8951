"""Ranks against one process: the gap of loss and gradient in every arm and loss, and the bytes that a rank holds.

Run: python -m bench.ranks [bytes]; with KVAUDIT_REAL_MODEL=FOLDER the bytes are of that model, in bfloat16, otherwise
of the embedded one; ``bytes``: nothing else. One thread each, over gloo. Rollouts of unlike length are sampled once and
rewarded by the parity of their tokens, so that groups differ; microbatches are small, so that ranks have unlike numbers
of them. A gap is the largest of |loss - loss'| / max(|loss|, 1) and |gradient - gradient'| / |gradient|, the gradient
as one vector over all weights.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from kvaudit.audit.sampling.model import EMBEDDED, LoadedModel, load_model
from kvaudit.audit.training import grpo
from kvaudit.audit.training.adapters import frozen_copy, trainable_copy
from kvaudit.audit.training.batch import Batch, collect, training_items
from kvaudit.audit.training.config import ARMS, TrainConfig
from kvaudit.audit.training.learner import Learner
from kvaudit.audit.training.losses.base import LOSSES
from kvaudit.audit.training.optimiser import Optimiser, StepResult
from kvaudit.audit.training.ranks import RankGroup
from kvaudit.audit.training.rollouts import RolloutSampler
from kvaudit.core.spec_train import AdapterSpec

COUNTS = (1, 2, 4)
POLICY = "snapkv:budget=64,window=8"
ADAPTERS = {"full": None, "LoRA": AdapterSpec(rank=4)}


class Held(NamedTuple):
    """Bytes a parameter: weights, gradients, moments, and the gradient of a first half while there is one."""

    weights: float
    gradients: float
    moments: float
    half: float

    def __str__(self) -> str:
        held = sum(self[:3])
        return " + ".join(f"{size:.2f}" for size in self[:3]) + f" = {held:.2f}, {held + self.half:.2f} between halves"


class Found(NamedTuple):
    """What one rank found: the gap of each case, by its name, and what it held at the end."""

    gaps: dict[str, float]
    held: Held


def main() -> None:
    folder, alone = os.environ.get("KVAUDIT_REAL_MODEL", EMBEDDED), "bytes" in sys.argv
    with tempfile.TemporaryDirectory() as place:
        for count in COUNTS:
            with ProcessPoolExecutor(count, get_context("spawn")) as pool:
                work = [pool.submit(found, number, count, place, folder, alone) for number in range(count)]
                parts = [part.result() for part in work]
            print(f"{count} processes, {Path(folder).name}: bytes a parameter and rank {parts[0].held}", flush=True)
            for adapter in ADAPTERS if parts[0].gaps else ():
                own = {name: gap for name, gap in parts[0].gaps.items() if name.endswith(adapter)}
                worst = max(own, key=lambda name: own[name])
                print(f"  {len(own)} cases: largest gap {own[worst]:.1e} ({worst})", flush=True)


def found(number: int, count: int, place: str, folder: str, only_bytes: bool) -> Found:
    """Take every case as one of ``count`` ranks; one process leaves behind what the others are compared with."""
    torch.set_num_threads(1)
    if count > 1:
        meet = f"file://{place}/meet-{count}"
        dist.init_process_group("gloo", init_method=meet, rank=number, world_size=count)
    ranks, base = RankGroup(number, count), load_model(EMBEDDED, device="cpu")
    batches = {} if only_bytes else {arm: sampled(config(arm, "grpo", None), base) for arm in ("dense", "smd")}
    gaps = {}
    for name, case in () if only_bytes else cases():
        batch = batches["dense" if case.arm == "dense" else "smd"]
        loss, gradients = learned(case, base, batch, ranks)
        file = Path(place) / f"{name}.safetensors"
        if count == 1:
            save_file(gradients | {"loss": torch.tensor(loss)}, file)
        else:
            gaps[name] = gap(load_file(file), gradients | {"loss": torch.tensor(loss)})
        print(name, gaps.get(name, ""), file=sys.stderr) if number == 0 else None
    model = base if folder == EMBEDDED else load_model(folder, dtype="bfloat16", device="cpu")
    held = bytes_held(model, ranks)
    if count > 1:
        dist.destroy_process_group()
    return Found(gaps, held)


def cases() -> Iterator[tuple[str, TrainConfig]]:
    """Every arm with every loss, in full and as an adapter."""
    for arm, loss, adapter in product(sorted(ARMS), sorted(LOSSES.all()), ADAPTERS):
        yield f"{arm} {loss} {adapter}", config(arm, loss, ADAPTERS[adapter])


def config(arm: str, loss: str, adapter: AdapterSpec | None) -> TrainConfig:
    plain: dict[str, Any] = {"policy": POLICY, "suites": ["refusal", "math"], "context_tokens": 160}
    sizes: dict[str, Any] = {"prompts_per_step": 6, "group": 3, "steps": 1, "microbatch_tokens": 500}
    return TrainConfig(arm=arm, seed=1, loss=loss, adapter=adapter, temperature=1.3, **plain, **sizes)


def sampled(case: TrainConfig, base: LoadedModel) -> Batch:
    """A step's rollouts, rewarded by parity."""
    asked = RolloutSampler(case, base, training_items(case, base.chat.count_tokens), lambda rows: [0.0] * len(rows))
    rollouts = asked.sample(0).rollouts
    return collect(rollouts, [float(rollout.ids.sum() % 2) for rollout in rollouts], case.group, base.device)


class Kept(Optimiser):
    """An optimiser that keeps the whole gradient and changes nothing."""

    gradients: dict[str, Tensor]

    def step(self) -> StepResult:
        """Gather the gradient."""
        self.gradients = {}
        for name, weight in self._parameters.items():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self.gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
            weight.grad = None
        return StepResult(1.0, {})


def learned(case: TrainConfig, base: LoadedModel, batch: Batch, ranks: RankGroup) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of one gradient step."""
    model = trainable_copy(base, case.adapter, case.seed, ranks=ranks).model
    if case.adapter is not None:
        stir(model)
    learner = Learner(model, case, frozen_copy(base, ranks) if case.beta else None, ranks)
    learner.optimiser = kept = Kept(model, learning_rate=1.0, warmup_steps=0, max_grad_norm=1.0, ranks=ranks)
    return grpo.learn(learner, batch, step=0, max_tokens=64).loss, kept.gradients


@torch.no_grad()
def stir(model: Any) -> None:
    """Give an adapter's second matrices a start: at 0 the first ones have no gradient."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.fill_(0.01)


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The larger of the gaps of loss and gradient."""
    losses = [tensors.pop("loss") for tensors in (one, other)]
    apart = torch.stack([torch.linalg.vector_norm((one[n] - other[n]).double()) for n in one])
    length = torch.stack([torch.linalg.vector_norm(tensor.double()) for tensor in one.values()])
    gradient = torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(length)
    return max(float(gradient), float((losses[0] - losses[1]).abs() / losses[0].abs().clamp(min=1.0)))


def bytes_held(base: LoadedModel, ranks: RankGroup) -> Held:
    """Bytes a parameter, by the tensors that training a made-up step leaves behind."""
    model = trainable_copy(base, None, 1, ranks=ranks).model
    whole = sum(weight.numel() for weight in model.parameters())
    optimiser = Optimiser(model, learning_rate=1e-6, warmup_steps=0, max_grad_norm=1.0, ranks=ranks)
    ids = torch.arange(16)[None]

    def backward() -> None:
        torch.autograd.backward(model(input_ids=ids).logits.float().square().mean())

    backward()
    optimiser.step()
    backward()
    optimiser.end_half()  # copies the gradient of the first half
    weights, gradients = optimiser._weights.values(), optimiser._gradients().values()
    half, moments = size(optimiser._first.values()) / whole, size(optimiser.tensors().values()) / whole
    masters = size(optimiser._masters.values()) / whole
    # masters of another precision than the weights are held beside them
    own = size(weights) / whole + (masters if next(iter(weights)).dtype != torch.float32 else 0.0)
    return Held(own, size(gradients) / whole, moments - masters, half)


def size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main()
