"""Every policy against ``model.generate`` with a dense DynamicCache: decode rate, prefill time, bytes, exactness.

    python -m bench.policies                                  a random Llama, every registered policy
    python -m bench.policies --model DIR --policies none,streaming,snapkv --new 32

One prompt is prefilled, its cache repeated for the rows of a batch, and both sides decode greedily from there; the
dense side runs again beside every policy, so that each ratio is of two runs made together. On one thread unless
OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

from audit.errors import DataError
from audit.kv.attention import NAME
from audit.kv.cache import EvictingCache
from audit.kv.quantised import QuantisedStore
from audit.model import load_model
from audit.policies import POLICIES, Policy, parse_policy
from audit.sampler import Decoding, Sampler
from bench.exactness import gaps
from bench.models import Served, random_llama

DENSE_STEPS = 32  # a dense step costs the same at every one; an eviction comes only every `interval`
HEADINGS = (
    *("policy", "decode x dense, batch 1", "batch 8", "evict share, 1", "8", "prefill x dense", "peak KV / dense"),
    *("bound", "roofline, 1", "8", "gap fp64", "fp32", "bf16"),
)


@dataclass
class Measured:
    """One policy in one run. Times in seconds; ``ratio`` > 1 is faster than dense."""

    ratio: dict[int, float] = field(default_factory=dict)
    rate: dict[int, float] = field(default_factory=dict)
    evicting: dict[int, float] = field(default_factory=dict)
    roofline: dict[int, float] = field(default_factory=dict)
    prefill: float = 0.0
    bytes_share: float = 0.0
    bound: float = 0.0


def main() -> None:
    asked = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    served = loaded(asked.model) if asked.model else random_llama(512, 8, positions=asked.context + asked.new + 8)
    torch.manual_seed(1)
    prompt = torch.randint(0, served.model.config.vocab_size, (1, asked.context))
    bandwidth = read_bandwidth()
    print(f"{served.name}, context {asked.context}, budget {asked.budget}, {asked.new} new tokens, "
          f"{torch.get_num_threads()} thread(s), read bandwidth {bandwidth / 1e9:.1f} GB/s\n")  # fmt: skip
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    for text in asked.policies.split(";") if asked.policies else default_policies(asked.budget):
        policy = parse_policy(text)
        print(line(text, measure(served, policy, prompt, asked, bandwidth), gaps(policy)), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format; default: random weights")
    parser.add_argument("--policies", help="specs separated by ';'; default: every registered policy")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new", type=int, default=130)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    return parser.parse_args()


def default_policies(budget: int) -> Iterator[str]:
    """Every registered policy with its published defaults, and the compositions a user would try."""
    for name, cls in POLICIES.all().items():
        yield f"{name}:budget={budget}" if cls.evicts else name
    yield "kivi:bits=2"
    yield f"streaming:budget={budget},reposition=true"
    yield f"snapkv:budget={budget}+kivi:bits=4"


def measure(served: Served, policy: Policy, prompt: torch.Tensor, asked: Any, bandwidth: float) -> Measured:
    """All figures of one policy."""
    found = Measured()
    weights = sum(p.numel() * p.element_size() for p in served.model.parameters())
    for batch in asked.batches:
        dense_prefill, dense = generate(served, prompt, batch, min(asked.new, DENSE_STEPS + 1))
        with evictions_timed() as spent:
            started = time.perf_counter()
            episode = Sampler(served, policy).open([prompt[0].tolist()], list(range(batch)), group=batch)
            prefill, spent[0] = time.perf_counter() - started, 0.0
            started = time.perf_counter()
            episode.decode(Decoding(asked.new, temperature=0.0))
            seconds = time.perf_counter() - started
        steps = asked.new - 1  # the first token comes from the prefill
        rollout = episode.rollouts()[0]
        cache: EvictingCache = episode._cache  # type: ignore[union-attr]
        read = weights + cache.bytes
        found.ratio[batch] = dense / min(steps, DENSE_STEPS) / (seconds / steps)
        found.rate[batch] = batch * steps / seconds
        found.evicting[batch] = spent[0] / seconds
        found.roofline[batch] = read * steps / bandwidth / seconds
        found.prefill = prefill / dense_prefill
        if batch == min(asked.batches):
            found.bytes_share = rollout.kv_bytes_peak / rollout.kv_bytes_dense
            found.bound = (policy.evictor.budget + policy.chunk) / (asked.context + asked.new) + 0.05
    return found


def generate(served: Served, prompt: torch.Tensor, batch: int, new: int) -> tuple[float, float]:
    """Seconds of a dense prefill of one row, and of decoding ``new`` tokens from its cache in ``batch`` rows."""
    model = served.model
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    started = time.perf_counter()
    with torch.no_grad():
        model(prompt, past_key_values=cache, logits_to_keep=1)
    prefill = time.perf_counter() - started
    cache.crop(-1)  # generate wants to feed one token itself
    cache.batch_repeat_interleave(batch)
    ids = prompt.repeat(batch, 1)
    config = GenerationConfig(max_new_tokens=new - 1, do_sample=False, pad_token_id=0)
    started = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, generation_config=config)
    seconds = time.perf_counter() - started
    model.set_attn_implementation(NAME)
    return prefill, seconds


@contextmanager
def evictions_timed() -> Iterator[list[float]]:
    """Seconds spent evicting and quantising inside."""
    spent = [0.0]

    def timed(work: Callable[..., None]) -> Callable[..., None]:
        def inner(*args: Any) -> None:
            started = time.perf_counter()
            work(*args)
            spent[0] += time.perf_counter() - started

        return inner

    evict, flush = EvictingCache._evict, QuantisedStore.flush
    EvictingCache._evict, QuantisedStore.flush = timed(evict), timed(flush)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        EvictingCache._evict, QuantisedStore.flush = evict, flush  # type: ignore[method-assign]


def read_bandwidth() -> float:
    """Bytes per second of reading memory, best of five sums over 256 MiB."""
    block = torch.ones(1 << 26)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        block.sum()
        best = max(best, block.numel() * 4 / (time.perf_counter() - started))
    return best


def loaded(path: str) -> Served:
    """A model folder that never stops early."""
    try:
        model = load_model(path)
    except DataError as error:
        raise SystemExit(f"error: {error}") from None
    model.model.generation_config.eos_token_id = None
    return Served(path.rstrip("/").rpartition("/")[2], model.model, model.max_positions)


def line(text: str, found: Measured, exact: dict[str, float]) -> str:
    """One row of the table."""
    cells = [f"`{text}`", *(f"{found.ratio[b]:.2f}" for b in found.ratio)]
    cells += [f"{100 * share:.0f} %" for share in found.evicting.values()]
    cells += [f"{found.prefill:.2f}", f"{found.bytes_share:.3f}", f"{min(found.bound, 1.05):.3f}"]
    cells += [f"{100 * share:.0f} %" for share in found.roofline.values()]
    cells += [f"{exact[name]:.0e}" if name in exact else "-" for name in ("float64", "float32", "bfloat16")]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
