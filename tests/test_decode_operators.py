"""How many operators a step of decoding takes, and how often it reads what a device computed: each would be a wait."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvaudit import CompressedCache

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
SHORT, LONG = 4, 36  # tokens of two answers: what they differ by is 32 steps, and nothing of the prompt's
SNAPKV, STREAMING, H2O = "snapkv:budget=40,window=8", "streaming:budget=24", "h2o:budget=24"
QUEST = "quest:budget=16,page=4,dense=1"


class Operators(TorchDispatchMode):
    """Counts every operator that torch is asked for, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=211, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0, **sizes, **heads
    )
    return LlamaForCausalLM(config).eval()


def step_of(model: Any, policy: str | None) -> tuple[float, float]:
    """Operators and reads of one step, in the mean over 32, for two rows of 60 tokens."""
    ids = torch.randint(1, 211, (2, 60), generator=torch.Generator().manual_seed(1))
    counted = []
    for tokens in (SHORT, LONG):
        cache = {} if policy is None else {"past_key_values": CompressedCache.for_model(model, policy)}
        with torch.no_grad(), Operators() as operators:
            model.generate(ids, max_new_tokens=tokens, do_sample=False, **cache)
        counted.append(operators.seen)
    more = counted[1] - counted[0]
    return more.total() / (LONG - SHORT), sum(more[name] for name in READS) / (LONG - SHORT)


@pytest.fixture(scope="module")
def stock(model: Any) -> tuple[float, float]:
    return step_of(model, None)


@pytest.mark.parametrize(("policy", "most"), [(SNAPKV, 1.2), (STREAMING, 1.3), (H2O, 2.0), (QUEST, 1.85)])
def test_a_step_takes_few_operators_more_than_stock(
    model: Any, stock: tuple[float, float], policy: str, most: float
) -> None:
    assert step_of(model, policy)[0] <= most * stock[0]


@pytest.mark.parametrize("policy", [SNAPKV, STREAMING, H2O])
def test_a_step_under_eviction_reads_nothing_that_stock_does_not(
    model: Any, stock: tuple[float, float], policy: str
) -> None:
    assert step_of(model, policy)[1] == stock[1]


@pytest.mark.parametrize(("policy", "most"), [("int8", 1.86), ("fp8", 1.97), ("kivi:bits=4,group=16,residual=16", 2.0)])
def test_a_step_of_codes_reads_only_what_its_record_looks_at_now_and_then(
    model: Any, stock: tuple[float, float], policy: str, most: float
) -> None:
    operators, reads = step_of(model, policy)
    assert operators <= most * stock[0]
    assert reads <= stock[1] + 0.5


# 8 of fp8's are a processor's way to read such a float
@pytest.mark.parametrize(("policy", "most"), [("int8", 1.87), ("fp8", 1.97), ("kivi:bits=4,group=16,residual=16", 2.1)])
def test_in_bfloat16_codes_become_numbers_first_for_few_operators_more(model: Any, policy: str, most: float) -> None:
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    assert step_of(narrow, policy)[0] <= most * step_of(narrow, None)[0]
