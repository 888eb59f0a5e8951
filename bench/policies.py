"""Every policy against ``model.generate`` with a dense DynamicCache: decode rate, prefill time, bytes, exactness.

    python -m bench.policies                                  a random Llama, every registered policy
    python -m bench.policies --model DIR --policies none,streaming,snapkv --new 32

One prompt is prefilled, its cache repeated for the rows of a batch, and both sides decode greedily from there, in turns
of ten tokens. ``new`` is above 128, so that policies that evict every 128 tokens do. Figures: decode rate over that of
dense; the share of the time spent evicting or quantising; prefill time over dense; peak bytes over dense with their
bound (budget + chunk) / length + 5 %; the share of the memory bandwidth that reading weights and cache once per step
takes; and the largest |log p sampler - log p shadow| by precision. One thread unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

from bench.exactness import gaps
from bench.models import Served, random_llama
from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.quantised_store import QuantisedStore
from kvaudit.audit.policies import POLICIES, Policy, evictor_of, parse_policy
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import DataError

TURN = 10  # tokens that one side decodes before the other's turn
FIXED = ("prefill x dense", "peak KV / dense", "bound", "gap fp64", "fp32", "bf16")


@dataclass
class Measured:
    """One policy in one run. Times in seconds; ``ratio`` > 1 is faster than dense."""

    ratio: dict[int, float] = field(default_factory=dict)
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
    by_batch = [f"{what}, batch {b}" for what in ("decode x dense", "evicting", "roofline") for b in asked.batches]
    headings = ["policy", *by_batch, *FIXED]
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for text in asked.policies.split(";") if asked.policies else default_policies(asked.budget):
        policy = parse_policy(text)
        print(line(text, measure(served, policy, prompt, asked, bandwidth), gaps(policy)), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format; default: random weights")
    parser.add_argument("--policies", help="specs separated by ';'; default: every registered policy")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new", type=int, default=140)
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
    cache, dense_prefill = dense_cache(served, prompt)
    for batch in asked.batches:
        started = time.perf_counter()
        episode = Sampler(served, policy).open([prompt[0].tolist()], list(range(batch)), group=batch)
        prefill = time.perf_counter() - started
        dense, ours, evicting = take_turns(served, deepcopy(cache), prompt, batch, episode, asked.new)
        held: EvictingCache = episode._cache  # type: ignore[union-attr]
        found.ratio[batch], found.evicting[batch] = dense / ours, evicting / ours
        found.roofline[batch] = (weights + held.bytes) * asked.new / bandwidth / ours
        if batch == min(asked.batches):
            rollout = episode.rollouts()[0]
            found.prefill = prefill / dense_prefill
            found.bytes_share = rollout.kv_bytes_peak / rollout.kv_bytes_dense
            found.bound = (evictor_of(policy).budget + policy.chunk) / (asked.context + asked.new) + 0.05
    return found


def dense_cache(served: Served, prompt: torch.Tensor) -> tuple[DynamicCache, float]:
    """The dense cache of one row before its last token, and the seconds of the prefill."""
    served.model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=served.model.config)
    started = time.perf_counter()
    with torch.no_grad():
        served.model(prompt, past_key_values=cache, logits_to_keep=1)
    seconds = time.perf_counter() - started
    cache.crop(-1)  # generate wants to feed one token itself
    served.model.set_attn_implementation(ATTENTION_NAME)
    return cache, seconds


def take_turns(
    served: Served, cache: DynamicCache, prompt: torch.Tensor, batch: int, episode: Any, new: int
) -> tuple[float, float, float]:
    """Seconds of ``new`` steps of ``model.generate`` and of the episode, and those of them spent evicting.

    Both sides decode ``TURN`` tokens at a time, one after the other, so that what else the machine does meets both.
    """
    cache.batch_repeat_interleave(batch)
    ids, dense, ours, evicting = prompt.repeat(batch, 1), 0.0, 0.0, 0.0
    config = GenerationConfig(max_new_tokens=TURN, do_sample=False, pad_token_id=0)
    for _ in range(new // TURN):
        served.model.set_attn_implementation("sdpa")
        started = time.perf_counter()
        mask = torch.ones_like(ids)
        ids = served.model.generate(ids, attention_mask=mask, past_key_values=cache, generation_config=config)
        dense += time.perf_counter() - started
        served.model.set_attn_implementation(ATTENTION_NAME)
        with evictions_timed() as spent:
            started = time.perf_counter()
            episode.decode(Decoding(TURN, temperature=0.0))
            ours += time.perf_counter() - started
        evicting += spent[0]
    return dense, ours, evicting


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
    cells = [f"`{text}`", *(f"{ratio:.2f}" for ratio in found.ratio.values())]
    cells += [f"{100 * share:.0f} %" for table in (found.evicting, found.roofline) for share in table.values()]
    cells += [f"{found.prefill:.2f}", f"{found.bytes_share:.3f}", f"{min(found.bound, 1.05):.3f}"]
    cells += [f"{exact[name]:.0e}" if name in exact else "-" for name in ("float64", "float32", "bfloat16")]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
