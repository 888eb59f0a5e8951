"""Sampler and learner on fixed cases: numbers that can be literal, beside what tests/conform says of every policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conform.world import feed, gap, new_cache, prompts, random_model, served, shared, two_turns
from torch import Tensor

import kvaudit.audit.cache.attention
import kvaudit.audit.replay.attention
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.attention import _causal_columns
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling.decoding import Decoding, nucleus
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import SpecError


def test_gradient_through_the_shared_prompt_equals_the_unshared_one() -> None:
    loaded = served()
    played = two_turns(loaded, "snapkv:budget=14,window=4,interval=1,chunk=16", group=3, lengths=(40, 9))
    gradients = []
    for group in (3, 1):
        loaded.model.zero_grad()
        logits, valid = suffix_logits(loaded.model, played.rollouts, group=group, view="shadow")
        (logits.log_softmax(-1)[..., 11] * valid).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in loaded.model.parameters()]))
    assert gradients[0].norm() > 1
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 1e-12


LONG_PROMPTS = {
    "cut while it is read": "snapkv:budget=14,window=4,interval=1,chunk=16",
    "cut elsewhere in every layer": "pyramidkv:budget=14,window=4,interval=1,chunk=16",
    "cut alike in all heads": "streaming:budget=14,sink=2,chunk=16",
    "read whole": "snapkv:budget=14,window=4,interval=3",
    "chosen from": "quest:budget=8,page=4",
}


@pytest.mark.parametrize("policy", LONG_PROMPTS.values(), ids=LONG_PROMPTS)
def test_a_prompt_in_blocks_of_queries_is_the_one_under_a_whole_mask(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = served()
    episode = Sampler(loaded, parse_policy(policy)).open(prompts(90, 61), [0, 1, 2, 3], group=2)
    episode.decode(Decoding(6))
    rollouts, masks = episode.rollouts(), list[int]()
    stock = kvaudit.audit.cache.attention.scaled_dot_product_attention

    def attention(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        masks.append(0 if attn_mask is None else attn_mask.numel())
        return stock(*args, attn_mask=attn_mask, **kwargs)

    def learned() -> tuple[Tensor, Tensor, int]:
        masks.clear()
        loaded.model.zero_grad()
        logits, valid = suffix_logits(loaded.model, rollouts, group=2, view="shadow")
        (logits.log_softmax(-1)[..., 11] * valid).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in loaded.model.parameters()])
        return logits.detach()[valid], gradient, max(masks)

    monkeypatch.setattr(kvaudit.audit.cache.attention, "scaled_dot_product_attention", attention)
    with monkeypatch.context() as whole:
        whole.setattr(kvaudit.audit.replay.attention, "_causal_columns", lambda *_: 0)
        wanted, slope, square = learned()
    monkeypatch.setattr(kvaudit.audit.replay.attention, "BLOCK", 8)
    monkeypatch.setattr(kvaudit.audit.cache.attention, "LONG_QUERIES", 2)
    logits, gradient, largest = learned()
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)
    assert slope.norm() > 1
    assert (gradient - slope).norm() / slope.norm() < 1e-12
    assert largest < square / 2


def test_a_pass_is_plain_until_the_first_key_leaves_and_not_behind_padding() -> None:
    right, left = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]]), torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]])
    gone = torch.full((2, 1, 1, 4), NEVER, dtype=torch.int32)
    assert [_causal_columns(at, None) for at in (right, left)] == [4, 0]
    assert [_causal_columns(at, gone) for at in (right, left)] == [4, 0]
    gone[1, 0, 0, 0] = 2
    assert _causal_columns(right, gone) == 2


def test_no_policy_draws_what_stock_transformers_draws() -> None:
    loaded = served()
    (prompt,) = prompts(30)
    expected = random_model().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 30, dtype=torch.int64),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=7,
        pad_token_id=0,
    )
    episode = Sampler(loaded, parse_policy("none")).open([prompt], [0])
    (completion,) = episode.decode(Decoding(20, temperature=0))
    assert prompt + list(completion.ids) == expected[0].tolist()


def test_streaming_ledger_is_the_closed_form() -> None:
    loaded = served()
    episode = Sampler(loaded, parse_policy("streaming:budget=12,sink=2")).open(prompts(30), [3])
    episode.decode(Decoding(15))
    (rollout,) = episode.rollouts()
    fed = len(rollout.ids) - 1  # the last drawn token never enters the cache
    expected = [NEVER if j < 2 else (30 if j < 20 else j + 11) for j in range(fed + 1)]
    expected = [e if e <= fed else NEVER for e in expected]
    assert rollout.evicted_at[1, 0].tolist() == expected


@pytest.mark.parametrize(("budget", "chunk"), [(32, 32), (300, 400)])
def test_compressed_cache_really_allocates_less(budget: int, chunk: int) -> None:
    loaded, prompt = served(), 400
    sampler = Sampler(loaded, parse_policy(f"streaming:budget={budget},sink=2,chunk={chunk}"))
    episode = sampler.open(prompts(prompt), [3])
    episode.decode(Decoding(20))
    (rollout,) = episode.rollouts()
    layers = len(rollout.evicted_at)
    assert rollout.retention == pytest.approx(budget / prompt)
    # layers are cut one after the other: at the peak one holds a chunk beside its budget, or the whole prompt
    most = ((layers - 1) * budget + min(budget + chunk, prompt)) / layers
    assert rollout.kv_bytes_peak <= (most / prompt + 0.05) * rollout.kv_bytes_dense


def test_h2o_mass_equals_the_models_own_attention_weights() -> None:
    loaded, texts = shared(), prompts(30, 30)
    evicting = new_cache(loaded, parse_policy("h2o:budget=100"), [0, 1])
    feed(loaded, evicting, [t[:18] for t in texts])
    feed(loaded, evicting, [t[18:] for t in texts])
    with torch.no_grad():
        weights = random_model(attention="eager")(torch.tensor(texts), output_attentions=True).attentions
    for layer, cached in enumerate(evicting.layers):
        expected = weights[layer].unflatten(1, (2, 2)).sum((2, 3)).float()  # group, queries
        torch.testing.assert_close(cached.store.mass, expected, rtol=0, atol=1e-5)


def test_greedy_and_nucleus_follow_their_definitions() -> None:
    assert nucleus(torch.tensor([[0.5, 0.3, 0.2]]), 0.6).tolist() == [[0.5, pytest.approx(0.3), 0.0]]
    assert nucleus(torch.tensor([[0.2, 0.5, 0.3]]), 0.5).tolist() == [[0.0, 0.5, 0.0]]


def test_a_context_beyond_the_positions_is_refused_before_anything_runs() -> None:
    loaded = served()
    with pytest.raises(SpecError, match="600 tokens is longer than the model's 512"):
        Sampler(loaded, parse_policy("none")).open(prompts(600), [0])


@pytest.mark.parametrize("policy", ["none", "snapkv:budget=14,window=4,interval=5,chunk=16"])
def test_each_row_has_its_own_limit_and_the_others_do_not_matter(policy: str) -> None:
    sampler, asked = Sampler(served(), parse_policy(policy)), prompts(40, 23, 9)
    mixed = sampler.open(asked, [0, 1, 2])
    first = mixed.decode(Decoding(99), [12, 0, 5])
    second = mixed.decode(Decoding(99), [0, 6, 0])
    assert first[1] is None
    assert second[1] is not None
    for row, limit in enumerate((12, 6, 5)):
        (alone,) = sampler.open([asked[row]], [row]).decode(Decoding(limit))
        got = (first if row != 1 else second)[row]
        assert got.ids == alone.ids


@pytest.mark.parametrize("codec", ["fp8:scale=tensor,scales=0.02,write=true", "int8:write=true"])
def test_entries_leave_a_ragged_batch_that_holds_nothing_but_codes(codec: str) -> None:
    policy = f"pyramidkv:budget=13,sink=0,window=4,interval=1,phase=prefill,chunk=5,kernel=1+{codec}"
    played = two_turns(shared("phi"), policy, lengths=(20, 31, 9))
    assert gap(shared("phi"), played, "shadow") < 1e-12
