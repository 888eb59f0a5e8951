"""The public cache on stock transformers, every policy and model family: padding, positions, turns, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from conform.policies import policies_for, pytest_generate_tests, small_policies
from conform.world import CONFIGS, LAYERS, exact_norms, left_padded, prompts, random_model
from kvaudit import CompressedCache, shadow
from kvaudit.audit.policies import Policy, evictor_of

__all__ = ["pytest_generate_tests"]

UNTURNED = ["gpt2"]
OTHERS = ["gemma3", "phi"]  # hybrid, and partly rotated
ASKING = policies_for("asking", small_policies())


def in_turn(policy: Policy, names: Sequence[str], number: int = 1) -> list[str]:
    """``number`` of the models, others for the next policy: every model is met, if not by every policy.

    A policy of a file under test meets them all. The simulator draws families at random for every policy.
    """
    if policy not in ASKING:
        return [*names]
    first = number * ASKING.index(policy)
    return [names[(first + n) % len(names)] for n in range(number)]


@cache
def model(name: str) -> Any:
    made = random_model(name)
    exact_norms(made)
    return made


SCRIPT = torch.tensor(prompts(28, 28, 28))
PARTS = [1] * 4 + [21] + [1] * 3  # an answer, a message, an answer


@torch.no_grad()
def played(made: Any, past: Any, ids: Tensor, mask: Tensor, *, script: Tensor = SCRIPT) -> Tensor:
    """Logits [B, T, V] of a prompt and of the script, fed in parts."""
    logits, start = [], ids.shape[1]
    every, every_mask = whole(ids, mask, script)
    positions = (every_mask.cumsum(1) - 1).clamp(min=0)
    for part in [start, *PARTS]:
        stop = start + part if logits else start
        now = slice(stop - part, stop)
        output = made(
            every[:, now], attention_mask=every_mask[:, :stop], position_ids=positions[:, now], past_key_values=past
        )
        logits.append(output.logits)
        start = stop
    return torch.cat(logits, 1)


def whole(ids: Tensor, mask: Tensor, script: Tensor = SCRIPT) -> tuple[Tensor, Tensor]:
    """Everything ``played`` feeds, in one piece."""
    return torch.cat([ids, script], 1), torch.cat([mask, torch.ones_like(script)], 1)


def batch() -> tuple[Tensor, Tensor]:
    ids, positions = left_padded(prompts(40, 23, 9))
    return ids, (positions >= 0).long()


@cache
def uncompressed(name: str) -> Tensor:
    """What the batch says where nothing is compressed, once for every policy that is held to it."""
    return played(model(name), CompressedCache.for_model(model(name), "none"), *batch())


def test_a_left_padded_row_equals_the_row_alone(policy: Policy) -> None:
    padded_row_equals_the_row_alone("llama-gqa", policy)


def test_a_left_padded_row_equals_the_row_alone_in_other_families(asking: Policy) -> None:
    for name in in_turn(asking, OTHERS):
        padded_row_equals_the_row_alone(name, asking)


def padded_row_equals_the_row_alone(name: str, policy: Policy) -> None:
    ids, mask = batch()
    together = CompressedCache.for_model(model(name), policy)
    logits = played(model(name), together, ids, mask)
    real = mask[1].bool()
    alone = CompressedCache.for_model(model(name), policy, seed=1)
    expected = played(model(name), alone, ids[1:2, real], mask[1:2, real], script=SCRIPT[1:2])
    torch.testing.assert_close(logits[1:2, 17:], expected, rtol=0, atol=1e-12)
    assert torch.equal(together.ledger.evicted_at[1, :, :, :51], alone.ledger.evicted_at[0])


def test_the_shadow_pass_replays_the_public_cache(asking: Policy) -> None:
    for name in in_turn(asking, [name for name in CONFIGS if name not in UNTURNED], 2):
        shadow_pass_replays_the_public_cache(name, asking)


@pytest.mark.parametrize("name", UNTURNED)
def test_the_shadow_pass_replays_the_public_cache_of_learned_positions(name: str) -> None:
    policy = next(p for p in ASKING if p.evicts and not evictor_of(p).needs_rotary)
    shadow_pass_replays_the_public_cache(name, policy)


def shadow_pass_replays_the_public_cache(name: str, policy: Policy) -> None:
    ids, mask = batch()
    past = CompressedCache.for_model(model(name), policy)
    logits = played(model(name), past, ids, mask)
    every, every_mask = whole(ids, mask)
    with torch.no_grad(), shadow(model(name), past.ledger):
        replayed = model(name)(every, attention_mask=every_mask).logits
    torch.testing.assert_close(logits[every_mask.bool()], replayed[every_mask.bool()], rtol=0, atol=1e-11)


def test_tokens_stand_at_the_number_of_tokens_seen(asking: Policy) -> None:
    for name in in_turn(asking, ["llama-gqa", *OTHERS]):
        tokens_stand_at_the_number_of_tokens_seen(name, asking)


def tokens_stand_at_the_number_of_tokens_seen(name: str, policy: Policy) -> None:
    ids, mask = batch()
    made, stood = model(name), list[Tensor]()
    past = CompressedCache.for_model(made, policy)  # which may turn a few positions to learn how the model does it
    rotary = next(m for n, m in made.named_modules() if n.endswith("rotary_emb"))
    hook = rotary.register_forward_pre_hook(
        lambda _, args, kwargs: stood.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1]),
        with_kwargs=True,
    )
    try:
        played(made, past, ids, mask)
    finally:
        hook.remove()
    _, every_mask = whole(ids, mask)
    expected = (every_mask.cumsum(1) - 1).clamp(min=0)
    forwards = stood[:: len(stood) // (1 + len(PARTS))]  # hybrid models rotate once for each kind of layer
    assert torch.equal(torch.cat(forwards, 1), expected)


def test_zero_compression_is_the_dense_cache_bit_for_bit(evictor: Policy) -> None:
    zero_compression_is_the_dense_cache("llama-gqa", evictor)


@pytest.mark.parametrize("name", ["llama-mha", "phi"])
def test_zero_compression_is_the_dense_cache_bit_for_bit_in_other_families(name: str, asking: Policy) -> None:
    if not asking.evicts:
        pytest.skip("what stores codes, or selects, compresses whatever the budget")
    zero_compression_is_the_dense_cache(name, asking)


def zero_compression_is_the_dense_cache(name: str, evictor: Policy) -> None:
    ids, mask = batch()
    huge = replace(evictor, budget=4000)
    roomy = played(model(name), CompressedCache.for_model(model(name), huge), ids, mask)
    _, every_mask = whole(ids, mask)
    assert torch.equal(roomy[every_mask.bool()], uncompressed(name)[every_mask.bool()])


@pytest.mark.parametrize("name", CONFIGS)
def test_no_policy_equals_the_dynamic_cache(name: str) -> None:
    ids, mask = batch()
    dense = played(model(name), DynamicCache(config=model(name).config), ids, mask)
    _, every_mask = whole(ids, mask)
    torch.testing.assert_close(uncompressed(name)[every_mask.bool()], dense[every_mask.bool()], rtol=0, atol=1e-12)
    if name == "llama-mha":  # without padding to lay aside or groups to fold, the operations are the same ones
        even = torch.tensor(prompts(40, 40, 40))
        ours = played(model(name), CompressedCache.for_model(model(name), "none"), even, torch.ones_like(even))
        stock = played(model(name), DynamicCache(config=model(name).config), even, torch.ones_like(even))
        assert torch.equal(ours, stock)


def test_savings_are_bytes_that_are_gone(evictor: Policy) -> None:
    made = model("llama-gqa")
    past = CompressedCache.for_model(made, evictor)
    played(made, past, torch.tensor(prompts(400)), torch.ones(1, 400, dtype=torch.int64), script=SCRIPT[:1])
    dense = LAYERS * 2 * 2 * 428 * 8 * 8  # layers, keys and values, heads, tokens, channels, bytes of a float64
    held = (evictor.budget + max(evictor.chunk, evictor.interval)) / 428
    assert past.bytes <= (held + 0.05) * dense
