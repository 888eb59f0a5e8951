"""How many operators a step of decoding takes beside stock's, and how often it reads what a device computed.

    python -m bench.operators

On a GPU an operator is something the host asks for, one that only views memory starts nothing there, and a read is a
wait. Counts are exact: of 32 steps of two rows of 60 tokens through ``generate``, on a random Llama of four layers.
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
SHORT, LONG = 4, 36  # tokens of two answers: what they differ by is 32 steps, and nothing of the prompt's
POLICIES = ("snapkv:budget=40,window=8", "streaming:budget=24", "h2o:budget=24", "quest:budget=16,page=4,dense=1")
CODES = ("int8", "fp8", "q4_0", "kivi:bits=4,group=16,residual=16", "kivi:bits=2,group=16,residual=16")


class Operators(TorchDispatchMode):
    """Counts every operator that torch is asked for, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


class Step(NamedTuple):
    """Operators of a step in the mean, those of them that do more than view memory, and reads."""

    operators: float
    working: float
    reads: float


def main() -> None:
    torch.set_num_threads(1)
    exact = small_model()
    models = {"float32": exact, "bfloat16": copy.deepcopy(exact).to(torch.bfloat16)}
    stock = {dtype: step_of(model, None) for dtype, model in models.items()}
    heads = (f"{dtype}: all | without views | reads" for dtype in models)
    print(f"| policy | {' | '.join(heads)} |\n|---|{'---:|' * 3 * len(models)}")
    for policy in (None, *POLICIES, *CODES):
        cells = []
        for dtype, model in models.items():
            step, beside = step_of(model, policy), stock[dtype]
            cells += [f"{own:.0f} ({own / other:.2f})" for own, other in zip(step[:2], beside[:2], strict=True)]
            cells.append(f"{step.reads:.2f}")
        print(f"| {f'`{policy}`' if policy else 'stock'} | {' | '.join(cells)} |", flush=True)


def small_model() -> Any:
    """A Llama of random weights, 6 query heads over 2 KV heads."""
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


def step_of(model: Any, policy: str | None) -> Step:
    """A step under a policy, or under stock's cache."""
    ids = torch.randint(1, 211, (2, 60), generator=torch.Generator().manual_seed(1))
    counted = []
    for tokens in (SHORT, LONG):
        cache = {} if policy is None else {"past_key_values": CompressedCache.for_model(model, policy)}
        with torch.no_grad(), Operators() as operators:
            model.generate(ids, max_new_tokens=tokens, do_sample=False, **cache)
        counted.append(operators.seen)
    more, steps = counted[1] - counted[0], LONG - SHORT
    working = sum(count for name, count in more.items() if name not in VIEWS)
    return Step(more.total() / steps, working / steps, sum(more[name] for name in READS) / steps)


if __name__ == "__main__":
    main()
