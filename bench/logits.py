"""Bytes that the logits' part of a learner's pass keeps for its backward, and holds at most: whole, and in pieces.

Run: python -m bench.logits
"""

from __future__ import annotations

import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from bench.models import Served, random_llama
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.training import learner

VOCABULARY, WIDTH, TOKENS, ASKED = 152_064, 256, 512, 8 * 4096
GIB = 1 << 30


def main() -> None:
    print(f"vocabulary {VOCABULARY}, width {WIDTH}, {TOKENS} tokens read, float32; gradients of the weights included")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone:
        for name, limit in (("in pieces", learner.WHOLE_VOCABULARY), ("whole", VOCABULARY)):
            kept, most = alone.submit(measured, limit).result()
            print(
                f"  {name:10} kept {kept / GIB:.4f} GiB, held at most {most / GIB:.2f} GiB; kept of {ASKED} tokens: "
                f"{kept / TOKENS * ASKED / GIB:.2f} GiB"
            )


def measured(limit: int) -> tuple[int, int]:
    """Bytes of width V or D that are kept of the n tokens, and by how much a forward and backward raise the peak."""
    torch.set_num_threads(1)
    learner.WHOLE_VOCABULARY = limit
    served = random_llama(WIDTH, 1, vocabulary=VOCABULARY)
    model, before, found = served.model, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, dict[int, int]()
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.shape[-1] == VOCABULARY:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        read = learner.read_tokens(model, [rollout(served)], 1, "dense", 1.0)
    kept = sum(found.values()) + read.distributions.states.nbytes
    read.logprobs.sum().backward()
    return kept, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def rollout(served: Served) -> Rollout:
    """One row, every token but the first drawn, nothing evicted."""
    config, length = served.model.config, TOKENS + 1
    gone = torch.full((config.num_hidden_layers, config.num_key_value_heads, length), NEVER, dtype=torch.int32)
    return Rollout(
        ids=torch.arange(length),
        prompt_length=1,
        sampled=torch.arange(length) > 0,
        sampler_logprobs=torch.zeros(length),
        evicted_at=gone,
        kv_bytes_peak=0,
        kv_bytes_dense=0,
        retention=1.0,
        answer_start=1,
    )


if __name__ == "__main__":
    main()
