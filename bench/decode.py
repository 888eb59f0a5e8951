"""Decode tokens per second of our sampler against ``model.generate``: same model, batch 8, 1K context, policy none.

Prefill and decode are timed apart, on one thread unless OMP_NUM_THREADS says otherwise. Run: python -m bench.decode
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch
from transformers import GenerationConfig

from audit.cache.attention import NAME
from audit.policies import parse_policy
from audit.sampling.sampler import Decoding, Sampler
from bench.models import Served, embedded, random_llama

BATCH, CONTEXT, NEW, REPEATS = 8, 1024, 32, 2
T = TypeVar("T")


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for served in (random_llama(512, 8), *embedded()):
        compare(served)


def compare(served: Served) -> None:
    """Print both rates, the ratio, and whether both drew the same tokens; the two sides take turns."""
    context = min(CONTEXT, served.max_positions - NEW - 1)
    torch.manual_seed(1)
    prompts = torch.randint(0, served.model.config.vocab_size, (BATCH, context))
    turns = [(ours(served, prompts), stock(served, prompts)) for _ in range(REPEATS)]
    # the first token comes from the prefill, so NEW tokens cost NEW - 1 decode steps on both sides
    tokens = BATCH * (NEW - 1)
    print(f"{served.name}, batch {BATCH}, context {context}, {NEW} new tokens, {torch.get_num_threads()} thread(s)")
    for part, name in enumerate(("prefill", "decode")):
        mine, theirs = (median(turn[side][part] for turn in turns) for side in (0, 1))
        ratio = median(turn[1][part] / turn[0][part] for turn in turns)
        rates = f"{tokens / mine:8.1f} | {tokens / theirs:8.1f} tokens/s" if part else f"{mine:8.2f} | {theirs:8.2f} s"
        print(f"  {name:8} sampler | generate {rates:30} sampler is {ratio:.2f}x as fast")
    same = all(bool((mine[2] == theirs[2]).all()) for mine, theirs in turns)
    print(f"  same greedy tokens: {'yes' if same else 'no'}")


def ours(served: Served, prompts: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Seconds of prefill and of decoding, and the new tokens [B, NEW], of our sampler."""
    sampler = Sampler(served, parse_policy("none"))
    prefill, episode = timed(lambda: sampler.open(prompts.tolist(), list(range(BATCH))))
    decode, completions = timed(lambda: episode.decode(Decoding(NEW, temperature=0.0)))
    return prefill, decode, torch.tensor([c.ids for c in completions if c is not None])


def stock(served: Served, prompts: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """The same of ``model.generate`` with stock attention; a run of one token is the prefill."""
    served.model.set_attn_implementation("sdpa")
    prefill, _ = timed(lambda: generated(served, prompts, 1))
    whole, ids = timed(lambda: generated(served, prompts, NEW))
    served.model.set_attn_implementation(NAME)
    return prefill, whole - prefill, ids


def generated(served: Served, prompts: torch.Tensor, new: int) -> torch.Tensor:
    """New tokens [B, new] of ``model.generate``."""
    config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    ids = served.model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
    return ids[:, prompts.shape[1] :]


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds and result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    main()
