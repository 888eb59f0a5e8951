"""The cache and the shadow pass on stock transformers, without the harness."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from conform.world import CONFIGS, left_padded, prompts
from transformers import AutoModelForCausalLM

from kvaudit import CompressedCache, shadow
from kvaudit.core.errors import RunError, SpecError


def stock(name: str = "llama-gqa") -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), dtype=torch.float64).eval()


def generate(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, **options: object) -> object:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[] if n == m else pytest.mark.slow)
        for n, name in enumerate(("llama-gqa", "qwen3", "gemma3"))
        for m, policy in enumerate(
            ("h2o:budget=12", "snapkv:budget=14,window=4,interval=3", "streaming:budget=12,sink=2")
        )
    ],
)
def test_generate_with_left_padding_is_replayed_exactly(name: str, policy: str) -> None:
    model = stock(name)
    ids, positions = left_padded(prompts(40, 23, 9))
    mask = (positions >= 0).long()
    cache = CompressedCache.for_model(model, policy)
    out = generate(model, ids, mask, past_key_values=cache, return_dict_in_generate=True, output_logits=True)
    sampled = torch.stack(out.logits, 1)
    whole = torch.cat([mask, torch.ones(3, 12, dtype=mask.dtype)], 1)
    with torch.no_grad(), shadow(model, cache.ledger):
        replayed = model(out.sequences, attention_mask=whole).logits[:, ids.shape[1] - 1 : -1]
    # generate hands out its logits as float32
    torch.testing.assert_close(sampled.double(), replayed, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        dense = model(out.sequences, attention_mask=whole).logits[:, ids.shape[1] - 1 : -1]
    assert (dense - sampled).abs().max() > 1e-2
    assert cache.retention[0] < 0.5


@pytest.mark.parametrize("policy", ["none", "int8", "kivi:bits=4,group=8,residual=16", "quest:budget=16,page=4"])
def test_steps_with_gradients_switched_on_are_those_without(policy: str) -> None:
    """Whoever forgets no_grad still decodes."""
    model, found = stock(), []
    for switched_on in (True, False):
        cache, seen = CompressedCache.for_model(model, policy), list[torch.Tensor]()
        with torch.set_grad_enabled(switched_on):
            logits = model(torch.tensor(prompts(40)), past_key_values=cache).logits
            for _ in range(25):
                logits = model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
                seen.append(logits.detach())
        found.append(torch.cat(seen, 1))
    assert torch.equal(*found)


def test_generate_with_no_policy_equals_the_dynamic_cache() -> None:
    ids, positions = left_padded(prompts(40, 23, 9))
    mask = (positions >= 0).long()
    expected = generate(stock(), ids, mask)
    model = stock()
    assert torch.equal(generate(model, ids, mask, past_key_values=CompressedCache.for_model(model, "none")), expected)


def test_a_prepared_model_still_answers_dense_calls_as_before() -> None:
    ids, positions = left_padded(prompts(40, 23, 9))
    mask = (positions >= 0).long()
    expected = generate(stock(), ids, mask)
    model = stock()
    CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    assert torch.equal(generate(model, ids, mask), expected)


def test_a_cache_reused_for_another_batch_is_refused() -> None:
    model = stock()
    cache = CompressedCache.for_model(model, "none")
    with pytest.raises(SpecError, match="seen no token"):
        _ = cache.ledger
    ids = torch.tensor(prompts(9, 9))
    generate(model, ids, torch.ones_like(ids), past_key_values=cache)
    with pytest.raises(SpecError, match="serves 2 rows, got 1; make a new one"):
        model(ids[:1], past_key_values=cache)


def test_beams_and_embeddings_are_refused_in_one_line() -> None:
    model = stock()
    ids = torch.tensor(prompts(9))
    with pytest.raises(RunError, match="num_beams=1"):
        generate(
            model, ids, torch.ones_like(ids), past_key_values=CompressedCache.for_model(model, "none"), num_beams=2
        )
    with pytest.raises(RunError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 32), past_key_values=CompressedCache.for_model(model, "none"))
