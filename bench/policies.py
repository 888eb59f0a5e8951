"""How fast, how small and how exact is each policy, beside ``model.generate`` with a dense DynamicCache?

    python -m bench.policies                                  # a random Llama, every registered policy
    python -m bench.policies --model DIR --policies "none;streaming;snapkv" --new 32

Takes about an hour on one core (a policy: minutes); results: docs/results/policies.md.

One prompt is prefilled, its cache repeated for the rows of a batch, and both sides decode greedily in turns of ten
tokens. ``new`` is above 128, the interval of some evicting policies. Figures: the decode rate over that of dense; the
share of time spent evicting or quantising; the prefill time over dense; the peak bytes over dense, with their bound
(budget + chunk) / length + 5 %; the share of the memory bandwidth that reading weights and cache once per step takes;
and the largest |log p sampler - log p shadow| by precision. One thread unless OMP_NUM_THREADS is set.
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

from bench.decode import measured_bandwidth
from bench.exactness import gaps
from bench.models import Served, load_served, random_llama
from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.quantised_store import QuantisedStore
from kvaudit.audit.policies import POLICIES, Policy, evictor_of, parse_policy
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler

TURN = 10  # tokens that one side decodes before the other's turn
FIXED = ("prefill x dense", "peak KV / dense", "bound", "gap fp64", "fp32", "bf16")


@dataclass
class Figures:
    """The figures of one policy. Times are in seconds; ``ratio`` > 1 is faster than dense."""

    ratio: dict[int, float] = field(default_factory=dict)
    evicting: dict[int, float] = field(default_factory=dict)
    roofline: dict[int, float] = field(default_factory=dict)
    prefill: float = 0.0
    bytes_share: float = 0.0
    bound: float = 0.0


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    served = (
        load_served(options.model)
        if options.model
        else random_llama(512, 8, positions=options.context + options.new + 8)
    )
    torch.manual_seed(1)
    prompt = torch.randint(0, served.model.config.vocab_size, (1, options.context))
    bandwidth = measured_bandwidth("cpu")
    print(f"{served.name}, context {options.context}, budget {options.budget}, {options.new} new tokens, "
          f"{torch.get_num_threads()} thread(s), read bandwidth {bandwidth / 1e9:.1f} GB/s\n")  # fmt: skip
    by_batch = [
        f"{figure}, batch {b}" for figure in ("decode x dense", "evicting", "roofline") for b in options.batches
    ]
    headings = ["policy", *by_batch, *FIXED]
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for text in options.policies.split(";") if options.policies else default_policies(options.budget):
        policy = parse_policy(text)
        print(table_row(text, measure(served, policy, prompt, options, bandwidth), gaps(policy)), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format; default: random weights")
    parser.add_argument("--policies", help="specs separated by ';'; default: every registered policy")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new", type=int, default=140)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    return parser.parse_args()


def default_policies(budget: int) -> Iterator[str]:
    """Yield every registered policy with its published defaults, and some likely combinations."""
    for name, cls in POLICIES.all().items():
        yield f"{name}:budget={budget}" if cls.evicts else name
    yield "kivi:bits=2"
    yield f"streaming:budget={budget},reposition=true"
    yield f"snapkv:budget={budget}+kivi:bits=4"


def measure(served: Served, policy: Policy, prompt: torch.Tensor, options: Any, bandwidth: float) -> Figures:
    """Return all figures of one policy."""
    figures = Figures()
    weights = sum(p.numel() * p.element_size() for p in served.model.parameters())
    cache, dense_prefill = dense_cache(served, prompt)
    for batch in options.batches:
        started = time.perf_counter()
        episode = Sampler(served, policy).open([prompt[0].tolist()], list(range(batch)), group=batch)
        prefill = time.perf_counter() - started
        dense, ours, evicting = take_turns(served, deepcopy(cache), prompt, batch, episode, options.new)
        evicting_cache: EvictingCache = episode._cache  # type: ignore[union-attr]
        figures.ratio[batch], figures.evicting[batch] = dense / ours, evicting / ours
        figures.roofline[batch] = (weights + evicting_cache.bytes) * options.new / bandwidth / ours
        if batch == min(options.batches):
            rollout = episode.rollouts()[0]
            figures.prefill = prefill / dense_prefill
            figures.bytes_share = rollout.kv_bytes_peak / rollout.kv_bytes_dense
            figures.bound = (evictor_of(policy).budget + policy.chunk) / (options.context + options.new) + 0.05
    return figures


def dense_cache(served: Served, prompt: torch.Tensor) -> tuple[DynamicCache, float]:
    """Return the dense cache of one row without its last token, and the seconds of the prefill."""
    served.model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=served.model.config)
    started = time.perf_counter()
    with torch.no_grad():
        served.model(prompt, past_key_values=cache, logits_to_keep=1)
    seconds = time.perf_counter() - started
    cache.crop(-1)  # generate feeds the last token itself
    served.model.set_attn_implementation(ATTENTION_NAME)
    return cache, seconds


def take_turns(
    served: Served, cache: DynamicCache, prompt: torch.Tensor, batch: int, episode: Any, new: int
) -> tuple[float, float, float]:
    """Return the seconds of ``new`` steps of ``model.generate``, of the episode, and of its evictions.

    Both sides decode ``TURN`` tokens at a time in turns, so that other load on the machine slows both.
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
    """Yield a list whose only number grows by the seconds spent evicting and quantising in the block."""
    spent = [0.0]

    def add_time(work: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            started = time.perf_counter()
            work(*args)
            spent[0] += time.perf_counter() - started

        return timed

    evict, flush = EvictingCache.evict, QuantisedStore.flush
    EvictingCache.evict, QuantisedStore.flush = add_time(evict), add_time(flush)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        EvictingCache.evict, QuantisedStore.flush = evict, flush  # type: ignore[method-assign]


def table_row(text: str, figures: Figures, exact: dict[str, float]) -> str:
    cells = [f"`{text}`", *(f"{ratio:.2f}" for ratio in figures.ratio.values())]
    cells += [f"{100 * share:.0f} %" for table in (figures.evicting, figures.roofline) for share in table.values()]
    cells += [f"{figures.prefill:.2f}", f"{figures.bytes_share:.3f}", f"{min(figures.bound, 1.05):.3f}"]
    cells += [f"{exact[name]:.0e}" if name in exact else "-" for name in ("float64", "float32", "bfloat16")]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
