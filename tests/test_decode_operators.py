"""How many operators a step of decoding takes, and how often it reads what a device computed: each would be a wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bench.operators import StepCounts, count_step, small_model

SNAPKV, STREAMING, H2O = "snapkv:budget=40,window=8", "streaming:budget=24", "h2o:budget=24"
QUEST, KIVI = "quest:budget=16,page=4,dense=1", "kivi:bits=4,group=16,residual=16"


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture(scope="module")
def stock(model: Any) -> StepCounts:
    return count_step(model, None)


@pytest.mark.parametrize(("policy", "most"), [(SNAPKV, 1.2), (STREAMING, 1.3), (H2O, 2.0), (QUEST, 1.85)])
def test_a_step_takes_few_operators_more_than_stock_and_reads_nothing_more(
    model: Any, stock: StepCounts, policy: str, most: float
) -> None:
    step = count_step(model, policy)
    assert step.operators <= most * stock.operators
    assert step.reads == stock.reads


@pytest.mark.parametrize(("policy", "most"), [("int8", 1.86), ("fp8", 1.97), ("q4_0", 2.0), (KIVI, 2.0)])
def test_a_step_of_codes_reads_only_what_its_record_looks_at_now_and_then(
    model: Any, stock: StepCounts, policy: str, most: float
) -> None:
    step = count_step(model, policy)
    assert step.operators <= most * stock.operators
    assert step.reads <= stock.reads + 0.5


def test_in_bfloat16_codes_become_numbers_first_for_few_operators_more(model: Any) -> None:
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    stock = count_step(narrow, None).operators
    # 8 of fp8's are a processor's way to read such a float
    for policy, most in (("int8", 1.87), ("fp8", 1.97), (KIVI, 2.1)):
        assert count_step(narrow, policy).operators <= most * stock, policy
