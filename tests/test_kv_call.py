"""What a call of a prepared model may ask for, and how it may be compiled: the right numbers, or one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conform.world import left_padded, prompts, random_model
from torch import Tensor

from kvaudit import CompressedCache, shadow

SNAPKV = "snapkv:budget=14,window=4,interval=3"
COMPILED = [
    SNAPKV,
    "int8",
    # a compiler takes seconds for each, and what it leaves alone is the same in all
    *(
        pytest.param(policy, marks=pytest.mark.slow)
        for policy in ("streaming:budget=12,sink=2", "h2o:budget=12", "kivi:group=4,residual=8", f"{SNAPKV}+int8")
    ),
]


def batch() -> tuple[Tensor, Tensor]:
    """Left-padded ids and their mask."""
    ids, positions = left_padded(prompts(40, 23, 9))
    return ids, (positions >= 0).long()


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --- torch.compile --------------------------------------------------------------------------------------------------


def decoded(called: Any, past: CompressedCache, steps: int = 6) -> tuple[Tensor, Tensor]:
    """Logits of a prompt and some greedy steps, and the ledger."""
    token, every = torch.tensor(prompts(30, 30)), []
    with torch.no_grad():
        for _ in range(steps):
            every.append(called(token, past_key_values=past).logits[:, -1])
            token = every[-1].argmax(-1)[:, None]
    return torch.stack(every), past.ledger.evicted_at


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("policy", COMPILED)
def test_a_compiled_model_decodes_what_the_plain_one_does(policy: str) -> None:
    model = random_model()
    expected = decoded(model, CompressedCache.for_model(model, policy))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    got = decoded(compiled, CompressedCache.for_model(compiled, policy))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_a_compiled_model_is_replayed_inside_shadow_and_dense_outside() -> None:
    model, ids = random_model(), torch.tensor(prompts(30, 30))
    past = CompressedCache.for_model(model, SNAPKV)
    with torch.no_grad():
        dense = model(ids).logits
        model(ids[:, :20], past_key_values=past)
        model(ids[:, 20:], past_key_values=past)
        with shadow(model, past.ledger):
            replayed = model(ids).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager")
        assert largest(compiled(ids).logits, dense) < 1e-12
        with shadow(compiled, past.ledger):
            assert largest(compiled(ids).logits, replayed) < 1e-12
        assert largest(compiled(ids).logits, dense) < 1e-12
    assert largest(dense, replayed) > 1e-2
