"""What one rank of a training unit holds: masters and moments, and the peak beside the model, alone and shared by two.

Run: KVAUDIT_REAL_MODEL=FOLDER python -m bench.ranks; without the variable, the embedded model. Two steps in bfloat16 on
made-up gradients, with the copy that tells the halves of a batch apart, as in training; processes over gloo, one
thread each. The sums of all weights afterwards are printed too: they are alike whoever had the masters.
"""

from __future__ import annotations

import os
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed as dist

from kvaudit.audit.sampling.model import EMBEDDED, load_model, locate
from kvaudit.audit.training.optimiser import Optimiser
from kvaudit.audit.training.ranks import RankGroup

STEPS, RATE = 2, 1e-3


class Held(NamedTuple):
    """Bytes, and the sum of all weights after the last step."""

    state: int
    peak: int
    weights: float


def main() -> None:
    folder = os.environ.get("KVAUDIT_REAL_MODEL") or str(locate(EMBEDDED))
    print(f"{Path(folder).name}, bfloat16, {STEPS} steps", flush=True)
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as place, ProcessPoolExecutor(count, get_context("spawn")) as pool:
            parts = [pool.submit(held, folder, number, count, f"file://{place}/meet") for number in range(count)]
            for number, part in enumerate(parts):
                own = part.result()
                state, peak = own.state / 1e9, own.peak / 1e9
                print(f"  rank {number} of {count}: {state:.2f} GB of state, peak {peak:.2f} GB, {own.weights:.6f}")


def held(folder: str, number: int, count: int, meet: str) -> Held:
    """Take the steps as one of ``count`` ranks."""
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group("gloo", init_method=meet, rank=number, world_size=count)
    model = load_model(folder, dtype="bfloat16", device="cpu").model
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ranks = RankGroup(number, count)
    optimiser = Optimiser(model, learning_rate=RATE, warmup_steps=0, max_grad_norm=1.0, ranks=ranks)
    for step in range(1, STEPS + 1):
        for half in (1, 2):
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, half * step * RATE / count)
            optimiser.mark()
        optimiser.step()
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    weights = sum(float(weight.detach().double().sum()) for weight in model.parameters())
    state = sum(tensor.numel() * tensor.element_size() for tensor in optimiser.own_tensors().values())
    if count > 1:
        dist.destroy_process_group()
    return Held(state, peak, weights)


if __name__ == "__main__":
    main()
