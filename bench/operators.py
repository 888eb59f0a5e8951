"""How many torch operators does a decode step take beside stock transformers, and how often does it read a result?

    python -m bench.operators

Takes 15 seconds; results: docs/results/bench.md, and tests/test_decode_operators.py holds limits. On a GPU each
operator is started by the host, a view starts nothing, and reading a computed value makes the host wait. Counts are
exact: 32 steps of two rows of 60 tokens through ``generate``, on a random Llama of four layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvaudit import CompressedCache

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
VIEWS = {
    "view",
    "_unsafe_view",
    "slice",
    "select",
    "unsqueeze",
    "unbind",
    "split",
    "split_with_sizes",
    "expand",
    "alias",
}
VIEWS |= {"transpose", "t", "permute", "diagonal", "detach", "lift_fresh"}
SHORT, LONG = 4, 36  # tokens of two answers, which differ by 32 decode steps and in nothing else
POLICIES = ("snapkv:budget=40,window=8", "streaming:budget=24", "h2o:budget=24", "quest:budget=16,page=4,dense=1")
CODES = ("int8", "fp8", "q4_0", "kivi:bits=4,group=16,residual=16", "kivi:bits=2,group=16,residual=16")


class OperatorCounter(TorchDispatchMode):
    """A dispatch mode that counts every torch operator by name, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


class StepCounts(NamedTuple):
    """Mean counts of a step: operators, operators other than views, and reads."""

    operators: float
    working: float
    reads: float


def main() -> None:
    torch.set_num_threads(1)
    exact = small_model()
    models = {"float32": exact, "bfloat16": copy.deepcopy(exact).to(torch.bfloat16)}
    stock = {dtype: count_step(model, None) for dtype, model in models.items()}
    heads = (f"{dtype}: all | without views | reads" for dtype in models)
    print(f"| policy | {' | '.join(heads)} |\n|---|{'---:|' * 3 * len(models)}")
    for policy in (None, *POLICIES, *CODES):
        cells = []
        for dtype, model in models.items():
            step, base = count_step(model, policy), stock[dtype]
            cells += [f"{ours:.0f} ({ours / theirs:.2f})" for ours, theirs in zip(step[:2], base[:2], strict=True)]
            cells.append(f"{step.reads:.2f}")
        print(f"| {f'`{policy}`' if policy else 'stock'} | {' | '.join(cells)} |", flush=True)


def small_model() -> Any:
    """Return a Llama of random weights, 6 query heads over 2 KV heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def count_step(model: Any, policy: str | None) -> StepCounts:
    """Count a step under a policy, or under the stock cache for None."""
    ids = torch.randint(1, 211, (2, 60), generator=torch.Generator().manual_seed(1))
    counts = []
    for tokens in (SHORT, LONG):
        cache = {} if policy is None else {"past_key_values": CompressedCache.for_model(model, policy)}
        with torch.no_grad(), OperatorCounter() as operators:
            model.generate(ids, max_new_tokens=tokens, do_sample=False, **cache)
        counts.append(operators.seen)
    more, steps = counts[1] - counts[0], LONG - SHORT
    working = sum(count for name, count in more.items() if name not in VIEWS)
    return StepCounts(more.total() / steps, working / steps, sum(more[name] for name in READS) / steps)


if __name__ == "__main__":
    main()
