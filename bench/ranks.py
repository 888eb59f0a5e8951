"""Do several ranks compute the loss and gradient of one process, and how many bytes per parameter does each hold?

    python -m bench.ranks [bytes]    # bytes: only the memory

Takes about 20 minutes, with ``bytes`` one; results: docs/use-many-gpus.md and docs/results/growth.md.

Bytes are those of KVAUDIT_REAL_MODEL=FOLDER in bfloat16, by default of the embedded model. One thread per rank, over
gloo. Rollouts of different lengths are sampled once and rewarded by the parity of their tokens, so that groups differ;
microbatches are small, so that ranks have different numbers of them. A gap is the larger of |loss - loss'| /
max(|loss|, 1) and |gradient - gradient'| / |gradient|, with the gradient as one vector over all weights.
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


class BytesHeld(NamedTuple):
    """Bytes per parameter: weights, gradients, moments, and the first half's gradient while it exists."""

    weights: float
    gradients: float
    moments: float
    half: float

    def __str__(self) -> str:
        total = sum(self[:3])
        return (
            " + ".join(f"{size:.2f}" for size in self[:3]) + f" = {total:.2f}, {total + self.half:.2f} between halves"
        )


class RankResult(NamedTuple):
    """What one rank measured: the gap of each case by name, and the bytes that it holds."""

    gaps: dict[str, float]
    memory: BytesHeld


def main() -> None:
    folder, only_bytes = os.environ.get("KVAUDIT_REAL_MODEL", EMBEDDED), "bytes" in sys.argv
    with tempfile.TemporaryDirectory() as shared:
        for count in COUNTS:
            with ProcessPoolExecutor(count, get_context("spawn")) as pool:
                work = [pool.submit(run_cases, number, count, shared, folder, only_bytes) for number in range(count)]
                results = [task.result() for task in work]
            print(f"{count} processes, {Path(folder).name}: bytes a parameter and rank {results[0].memory}", flush=True)
            for adapter in ADAPTERS if results[0].gaps else ():
                gaps = {name: gap for name, gap in results[0].gaps.items() if name.endswith(adapter)}
                worst = max(gaps, key=lambda name: gaps[name])
                print(f"  {len(gaps)} cases: largest gap {gaps[worst]:.1e} ({worst})", flush=True)


def run_cases(number: int, count: int, shared: str, folder: str, only_bytes: bool) -> RankResult:
    """Run every case as one of ``count`` ranks; a single process saves what the others are compared with."""
    torch.set_num_threads(1)
    if count > 1:
        rendezvous = f"file://{shared}/meet-{count}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=number, world_size=count)
    ranks, base = RankGroup(number, count), load_model(EMBEDDED, device="cpu")
    batches = (
        {} if only_bytes else {arm: sample_batch(case_config(arm, "grpo", None), base) for arm in ("dense", "smd")}
    )
    gaps = {}
    for name, case in () if only_bytes else all_cases():
        batch = batches["dense" if case.arm == "dense" else "smd"]
        loss, gradients = learn_once(case, base, batch, ranks)
        file = Path(shared) / f"{name}.safetensors"
        if count == 1:
            save_file(gradients | {"loss": torch.tensor(loss)}, file)
        else:
            gaps[name] = largest_gap(load_file(file), gradients | {"loss": torch.tensor(loss)})
        print(name, gaps.get(name, ""), file=sys.stderr) if number == 0 else None
    model = base if folder == EMBEDDED else load_model(folder, dtype="bfloat16", device="cpu")
    memory = bytes_held(model, ranks)
    if count > 1:
        dist.destroy_process_group()
    return RankResult(gaps, memory)


def all_cases() -> Iterator[tuple[str, TrainConfig]]:
    """Yield every arm with every loss, in full and as an adapter."""
    for arm, loss, adapter in product(sorted(ARMS), sorted(LOSSES.all()), ADAPTERS):
        yield f"{arm} {loss} {adapter}", case_config(arm, loss, ADAPTERS[adapter])


def case_config(arm: str, loss: str, adapter: AdapterSpec | None) -> TrainConfig:
    data: dict[str, Any] = {"policy": POLICY, "suites": ["refusal", "math"], "context_tokens": 160}
    sizes: dict[str, Any] = {"prompts_per_step": 6, "group": 3, "steps": 1, "microbatch_tokens": 500}
    return TrainConfig(arm=arm, seed=1, loss=loss, adapter=adapter, temperature=1.3, **data, **sizes)


def sample_batch(case: TrainConfig, base: LoadedModel) -> Batch:
    """Return a step's rollouts, rewarded by parity."""
    sampler = RolloutSampler(case, base, training_items(case, base.chat.count_tokens), lambda rows: [0.0] * len(rows))
    rollouts = sampler.sample(0).rollouts
    return collect(rollouts, [float(rollout.ids.sum() % 2) for rollout in rollouts], case.group, base.device)


class GradientKeeper(Optimiser):
    """An optimiser that keeps the whole gradient and changes no weight."""

    gradients: dict[str, Tensor]

    def step(self) -> StepResult:
        """Gather the gradient from all ranks."""
        self.gradients = {}
        for name, weight in self._parameters.items():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self.gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
            weight.grad = None
        return StepResult(1.0, {})


def learn_once(case: TrainConfig, base: LoadedModel, batch: Batch, ranks: RankGroup) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradient of one gradient step."""
    model = trainable_copy(base, case.adapter, case.seed, ranks=ranks).model
    if case.adapter is not None:
        start_adapter(model)
    learner = Learner(model, case, frozen_copy(base, ranks) if case.beta else None, ranks)
    learner.optimiser = keeper = GradientKeeper(
        model, learning_rate=1.0, warmup_steps=0, max_grad_norm=1.0, ranks=ranks
    )
    return grpo.learn(learner, batch, step=0, max_tokens=64).loss, keeper.gradients


@torch.no_grad()
def start_adapter(model: Any) -> None:
    """Fill an adapter's second matrices, since at 0 the first ones have no gradient."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.fill_(0.01)


def largest_gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the larger of the gaps of loss and gradient."""
    losses = [tensors.pop("loss") for tensors in (first, second)]
    distances = torch.stack([torch.linalg.vector_norm((first[n] - second[n]).double()) for n in first])
    lengths = torch.stack([torch.linalg.vector_norm(tensor.double()) for tensor in first.values()])
    gradient = torch.linalg.vector_norm(distances) / torch.linalg.vector_norm(lengths)
    return max(float(gradient), float((losses[0] - losses[1]).abs() / losses[0].abs().clamp(min=1.0)))


def bytes_held(base: LoadedModel, ranks: RankGroup) -> BytesHeld:
    """Return the bytes per parameter of the tensors that exist after an artificial step."""
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
    half, moments = (
        total_bytes(optimiser._first_half.values()) / whole,
        total_bytes(optimiser.tensors().values()) / whole,
    )
    masters = total_bytes(optimiser._masters.values()) / whole
    # float32 masters exist beside weights of another precision
    weight_bytes = total_bytes(weights) / whole + (masters if next(iter(weights)).dtype != torch.float32 else 0.0)
    return BytesHeld(weight_bytes, total_bytes(gradients) / whole, moments - masters, half)


def total_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main()
