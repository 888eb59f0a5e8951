"""Bugs that KV compression elsewhere is known to have, one test each, with literal numbers where there are any."""

from __future__ import annotations

import pytest
import torch
from conform.world import LAYERS, feed, held, new_cache, prompts, random_model, shared, two_turns

from kvaudit import CompressedCache
from kvaudit.audit.cache.evict import keep_mask
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.policies import parse_policy


def test_the_next_position_is_tokens_seen_not_entries_kept() -> None:
    model, stood = random_model(), []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: stood.append(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    past = CompressedCache.for_model(model, "streaming:budget=8,sink=2,chunk=64")
    model.generate(torch.tensor(prompts(30)), past_key_values=past, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert stood == [list(range(30)), [30], [31], [32], [33]]


def test_a_chunk_after_eviction_attends_like_its_tokens_one_by_one() -> None:
    policy = parse_policy("knorm:budget=12,phase=prefill,chunk=64")
    (prompt, message) = prompts(40, 6)
    at_once, singly = new_cache(shared(), policy), new_cache(shared(), policy)
    for evicting in (at_once, singly):
        feed(shared(), evicting, [prompt])
    whole = feed(shared(), at_once, [message], decoding=True)
    steps = torch.cat([feed(shared(), singly, [[token]], decoding=True) for token in message], 1)
    torch.testing.assert_close(whole, steps, rtol=0, atol=1e-12)
    dense = new_cache(shared(), parse_policy("none"))
    feed(shared(), dense, [prompt])
    assert (feed(shared(), dense, [message], decoding=True) - whole).abs().max() > 0.1


def test_a_batch_is_compressed_as_much_as_one_row() -> None:
    evicting = new_cache(shared(), parse_policy("snapkv:budget=12,window=4,interval=1"), [0, 1, 2])
    feed(shared(), evicting, prompts(40, 30, 20))
    assert evicting.retention().tolist() == pytest.approx([12 / 40, 12 / 30, 12 / 20])


@pytest.mark.parametrize("kind", ["random", "h2o"])
def test_every_layer_and_head_decides_for_itself(kind: str) -> None:
    """Neither the first layer's set for all of them, nor one seeded score repeated in every layer."""
    (rollout,) = two_turns(shared(), f"{kind}:budget=12,chunk=16", lengths=(40,)).rollouts
    gone = (rollout.evicted_at < NEVER).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in gone}) == len(gone) == 2 * LAYERS


@pytest.mark.parametrize("budget", [1, 3, 29, 57, 99, 100])
def test_a_budget_is_kept_to_the_entry(budget: int) -> None:
    """A share of the length would lose one to rounding: int(100 * .29) is 28, int(100 * .57) is 56."""
    positions = torch.arange(100)[None, None].int()
    policy = parse_policy(f"h2o:budget={budget},window=0")
    kept = keep_mask(torch.rand(1, 1, 100), positions, torch.tensor([100]), policy)
    assert kept.sum() == budget
    evicting = new_cache(shared(), parse_policy(f"streaming:budget={budget},sink=0"))
    feed(shared(), evicting, prompts(100))
    assert {len(head) for layer in held(evicting.ledger(100)[0]) for head in layer} == {budget}


def test_memory_of_evicted_entries_is_freed() -> None:
    """No tensor that the cache reaches, nor the storage behind it, is as long as the text."""
    past = CompressedCache.for_model(model := random_model(), "streaming:budget=16,sink=2,chunk=16")
    with torch.no_grad():
        for part in torch.tensor(prompts(320)).split(16, 1):
            model(part, past_key_values=past)
    entry = 2 * 8 * 8  # heads, channels, bytes of a float64
    sizes = reachable(past)
    assert len(sizes) >= 2 * LAYERS
    assert max(sizes) <= (16 + 16) * entry
    assert sum(sizes) <= LAYERS * 2 * (16 + 16) * entry


def reachable(root: object) -> list[int]:
    """Bytes of every distinct storage of floating-point numbers that ``root`` holds, parameters of models aside."""
    storages, known, waiting = {}, set(), [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in known or isinstance(thing, (torch.nn.Module, type)):
            continue
        known.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if thing.is_floating_point() and thing.numel():
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            waiting += thing
        elif hasattr(thing, "__dict__"):
            waiting += vars(thing).values()
    return list(storages.values())
