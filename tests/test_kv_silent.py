"""Faults that once gave wrong numbers without an error, because sampler and shadow pass shared the mistake."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from conform.world import (
    CONFIGS,
    exact_norms,
    feed,
    left_padded,
    new_cache,
    prompts,
    random_model,
    served,
    shared,
    two_turns,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.core.errors import DataError, RunError

EVERY_RANKING = ["streaming:budget=12,sink=2", "snapkv:budget=14,window=4,interval=3", "h2o:budget=12", "tova:budget=9"]


def stock(name: str = "llama-gqa") -> Any:
    """A stock model that computes in float64 throughout."""
    model = random_model(name)
    exact_norms(model)
    return model


def worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --- sliding-window layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "streaming:budget=400,pin=system", "h2o:budget=400,pin=system"])
def test_pins_leave_the_models_own_windows_alone(policy: str) -> None:
    """Under a budget that nothing exceeds, pins change nothing: layer 0 of this model sees its last ten entries."""
    (ids,) = prompts(60)
    evicting = new_cache(shared("gemma3"), parse_policy(policy))
    rows = [ids[:30], *([token] for token in ids[30:])]
    pins = torch.zeros(1, 30, dtype=torch.bool)
    pins[0, :8] = True
    got = []
    for n, row in enumerate(rows):
        logits = feed(shared("gemma3"), evicting, [row], decoding=n > 0, pinned=None if n else pins)
        got.append(logits[0, -1])
    with torch.no_grad():
        expected = stock("gemma3")(torch.tensor([ids])).logits[0, 29:]
    assert worst(torch.stack(got), expected) < 1e-12
    gone = evicting.ledger(60)[0, 0]
    closed = torch.arange(60) + 11  # ten later ones have come; the first left together, after the prompt
    assert torch.equal(gone[0, :50], closed.clamp(min=30)[:50].int())
    assert (gone[0, 50:] == NEVER).all()


# --- masks and positions --------------------------------------------------------------------------------------------


def holes(rows: list[list[int]], where: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows with a padding column before each of these of their tokens, right-padded to one width; ids and mask."""
    ids, mask = [], []
    for row, places in zip(rows, where, strict=True):
        ids.append([t for n, token in enumerate(row) for t in ([9] * places.count(n) + [token])])
        mask.append([t for n in range(len(row)) for t in ([0] * places.count(n) + [1])])
    width = max(map(len, ids))
    return (torch.tensor([r + [0] * (width - len(r)) for r in part]) for part in (ids, mask))  # type: ignore[return-value]


@pytest.mark.parametrize("policy", ["none", *EVERY_RANKING, "kivi:group=4,residual=8", "expected:budget=16"])
def test_a_hole_in_a_mask_is_not_attended_to(policy: str) -> None:
    """Zeros between real tokens, in the prompt and in a later message, as concatenation leaves them."""
    model, first, second = stock(), prompts(30, 21), prompts(52, 48)
    ids, mask = holes(first, [[5, 5, 12], [4, 20]])
    more, more_mask = holes([r[40:] for r in second], [[11, 11, 11], [6] * 7])
    past = CompressedCache.for_model(model, policy)
    with torch.no_grad():
        one = model(ids, attention_mask=mask, past_key_values=past).logits
        both = torch.cat([mask, more_mask], 1)
        two = model(more, attention_mask=both, past_key_values=past).logits
        with shadow(model, past.ledger):
            replayed = model(torch.cat([ids, more], 1), attention_mask=both).logits
    for row in range(2):
        alone = CompressedCache.for_model(model, policy, seed=row)
        with torch.no_grad():
            expected = [model(torch.tensor([part[row]]), past_key_values=alone).logits[0]
                        for part in (first, [r[40:] for r in second])]  # fmt: skip
        assert worst(one[row, mask[row].bool()], expected[0]) < 1e-12
        assert worst(two[row, more_mask[row].bool()], expected[1]) < 1e-12
        assert worst(replayed[row, both[row].bool()], torch.cat(expected)) < 1e-12


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("llama-gqa", policy) for policy in EVERY_RANKING),
        *(("gemma3", policy) for policy in EVERY_RANKING[1::2]),
        *(("phi", policy) for policy in EVERY_RANKING[::2]),
        *(pytest.param("gemma3", policy, marks=pytest.mark.slow) for policy in EVERY_RANKING[::2]),
        *(pytest.param("phi", policy, marks=pytest.mark.slow) for policy in EVERY_RANKING[1::2]),
    ],
)
def test_left_padded_generation_is_replayed_to_the_last_digit(name: str, policy: str) -> None:
    model, drawn = stock(name), []
    ids, positions = left_padded(prompts(40, 23, 9))
    mask = (positions >= 0).long()
    past = CompressedCache.for_model(model, policy)
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: drawn.append(logits[:, -1]))
    out = model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=12, do_sample=False,
                         pad_token_id=0, eos_token_id=None)  # fmt: skip
    hook.remove()
    whole = torch.cat([mask, torch.ones(3, 12, dtype=mask.dtype)], 1)
    with torch.no_grad(), shadow(model, past.ledger):
        replayed = model(out, attention_mask=whole).logits[:, 39:-1]
    assert worst(torch.stack(drawn, 1), replayed) < 1e-12


def test_a_mask_given_by_its_place_is_read() -> None:
    model, (ids, positions) = stock(), left_padded(prompts(20, 9))
    mask = (positions >= 0).long()
    with torch.no_grad():
        placed = model(ids, mask, past_key_values=CompressedCache.for_model(model, "none")).logits
        named = model(ids, attention_mask=mask, past_key_values=CompressedCache.for_model(model, "none")).logits
    assert torch.equal(placed, named)


@pytest.mark.parametrize(
    "positions",
    [
        torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]),  # two packed texts
        torch.arange(9)[None] + 100,
        torch.stack([torch.arange(9)[None], torch.arange(9)[None] // 3]),  # of an image
    ],
)
def test_positions_that_are_not_the_number_of_tokens_seen_are_refused(positions: Tensor) -> None:
    model, ids = stock(), torch.tensor(prompts(9))
    past = CompressedCache.for_model(model, "none")
    with torch.no_grad():
        with pytest.raises(RunError, match=r"position_ids do not put the token at row 0, column \d at "):
            model(ids, position_ids=positions, past_key_values=CompressedCache.for_model(model, "none"))
        model(ids, position_ids=torch.arange(9)[None], past_key_values=past)
        with shadow(model, past.ledger), pytest.raises(RunError, match="leave them out"):
            model(ids, position_ids=positions)


def test_positions_of_padding_may_be_anything() -> None:
    model, (ids, positions) = stock(), left_padded(prompts(20, 9))
    mask = (positions >= 0).long()
    past, other = (CompressedCache.for_model(model, "tova:budget=9") for _ in range(2))
    with torch.no_grad():
        ones = model(ids, attention_mask=mask, position_ids=positions.masked_fill(mask == 0, 1), past_key_values=past)
        own = model(ids, attention_mask=mask, past_key_values=other)
    assert torch.equal(ones.logits, own.logits)


# --- the learner's view ---------------------------------------------------------------------------------------------


def test_the_shadow_pass_survives_another_attention_set_in_between() -> None:
    model, ids = stock(), torch.tensor(prompts(40, 40))
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    with torch.no_grad():
        logits = model(ids, past_key_values=past).logits
        more = model(ids[:, :9], past_key_values=past).logits
        model.set_attn_implementation("sdpa")
        with shadow(model, past.ledger):
            model.set_attn_implementation("eager")
            replayed = model(torch.cat([ids, ids[:, :9]], 1)).logits
    assert worst(replayed, torch.cat([logits, more], 1)) < 1e-12


def test_a_learners_pass_in_which_no_layer_replays_is_refused() -> None:
    loaded = served()
    played = two_turns(loaded, "streaming:budget=12,sink=2")
    loaded.model.set_attn_implementation("sdpa")
    with pytest.raises(RunError, match="0 of the model's 2 layers attended under the ledger"):
        suffix_logits(loaded.model, played.rollouts, group=1, view="shadow")


def test_a_ledger_of_another_text_is_refused() -> None:
    model, (ids, positions) = stock(), left_padded(prompts(40, 23))
    mask = (positions >= 0).long()
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=past)
        assert past.ledger.ids is not None
        assert past.ledger.ids[1].tolist() == prompts(40, 23)[1] + [-1] * 17
        other = ids.clone()
        other[1, -1] = 8 if ids[1, -1] != 8 else 9
        with shadow(model, past.ledger):
            model(ids, attention_mask=mask)
            with pytest.raises(DataError, match="another text: token 22 of row 1 was "):
                model(other, attention_mask=mask)


def test_attention_dropout_is_refused_while_training() -> None:
    config = deepcopy(CONFIGS["llama-gqa"])
    config.attention_dropout = 0.1
    model, ids = AutoModelForCausalLM.from_config(config, dtype=torch.float64), torch.tensor(prompts(40))
    past = CompressedCache.for_model(model.eval(), "streaming:budget=12,sink=2")
    model(ids, past_key_values=past)
    model.train()
    with shadow(model, past.ledger), pytest.raises(RunError, match=r"attention_dropout of 0\.1 in model\.layers\.0"):
        model(ids)


def gradient(reentrant: bool | None) -> Tensor:
    """Of two groups' log-probs, under checkpointing of this kind or none."""
    loaded = served()
    played = two_turns(loaded, "streaming:budget=12,sink=2", group=2, lengths=(40, 23))
    if reentrant is not None:
        loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loaded.model.enable_input_require_grads()
    loaded.model.train()
    logits, valid = suffix_logits(loaded.model, played.rollouts, group=2, view="shadow")
    logits.log_softmax(-1)[valid][:, 11].sum().backward()
    return torch.cat([p.grad.flatten() for p in loaded.model.parameters()])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the newer name is not in 5.4
def test_gradient_checkpointing_keeps_the_prompts_gradient_or_is_refused() -> None:
    plain = gradient(None)
    assert worst(gradient(False), plain) < 1e-12 * float(plain.abs().max())
    with pytest.raises(RunError, match="use_reentrant=True loses the gradient of the prompt"):
        gradient(True)


# --- one row, one head ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["tova:budget=12", "streaming:budget=12,sink=2", "h2o:budget=12", "random:budget=9"])
def test_one_row_with_one_kv_head_is_served(policy: str) -> None:
    config = deepcopy(CONFIGS["llama-gqa"])
    config.num_key_value_heads = 1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    exact_norms(model)
    both, alone = (CompressedCache.for_model(model, policy) for _ in range(2))
    (ids,) = prompts(40)
    with torch.no_grad():
        for start, stop in ((0, 20), *((n, n + 1) for n in range(20, 40))):
            batch = model(torch.tensor([ids[start:stop]] * 2), past_key_values=both).logits
            one = model(torch.tensor([ids[start:stop]]), past_key_values=alone).logits
            assert worst(one[0], batch[0]) < 1e-12
    assert torch.equal(alone.ledger.evicted_at[0], both.ledger.evicted_at[0])


def test_the_dense_cache_and_the_compressed_one_agree_about_holes() -> None:
    """The stock cache reads the same mask: a second opinion on what a hole is."""
    model, (ids, mask) = stock(), holes(prompts(30, 21), [[5, 5, 12], [4, 20]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, past_key_values=CompressedCache.for_model(model, "none")).logits
        past = DynamicCache(config=model.config)
        theirs = model(ids, attention_mask=mask, position_ids=positions, past_key_values=past).logits
    assert worst(ours[mask.bool()], theirs[mask.bool()]) < 1e-12


# --- what a forward does to all of its rows -------------------------------------------------------------------------

LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}
TURNS = {
    "dynamic": {"max_position_embeddings": 24, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": {"rope_parameters": {**LONG, "factor": 4.0}},
}


@pytest.mark.parametrize("kind", TURNS)
def test_rows_that_would_be_turned_by_the_longest_of_a_forward_are_refused(kind: str) -> None:
    """Within the original length the turns are a row's own; beyond it the whole forward changes, silently 7 nats."""
    fields = TURNS[kind] | {"rope_parameters": {"rope_theta": 10000.0, **TURNS[kind]["rope_parameters"]}}  # type: ignore[dict-item]
    config = LlamaConfig(**{**CONFIGS["llama-gqa"].to_dict(), **fields})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    exact_norms(model)
    past, (ids,) = CompressedCache.for_model(model, "streaming:budget=12,sink=2"), prompts(24)
    with torch.no_grad():
        first = model(torch.tensor([ids[:20]]), past_key_values=past).logits
        more = model(torch.tensor([ids[20:]]), past_key_values=past).logits
        with shadow(model, past.ledger):
            assert worst(model(torch.tensor([ids])).logits, torch.cat([first, more], 1)) < 1e-12
        with pytest.raises(RunError, match="a row of 25 tokens cannot be replayed; stay within 24"):
            model(torch.tensor([ids[:1]]), past_key_values=past)
        with shadow(model, past.ledger), pytest.raises(RunError, match="stay within 24"):
            model(torch.tensor([[*ids, 9]]))


def _neftune(model: Any) -> None:
    model.get_input_embeddings().neftune_noise_alpha = 5.0


def _jitter(model: Any) -> None:
    model.model.layers[0].mlp.jitter_noise = 0.1


def _layerdrop(model: Any) -> None:
    model.model.layers[1].dropout = 0.1


@pytest.mark.parametrize(
    ("name", "noisy", "what"),
    [
        ("llama-gqa", _neftune, r"neftune_noise_alpha of 5\.0 in model\.embed_tokens"),
        ("llama-gqa", _jitter, r"jitter_noise of 0\.1 in model\.layers\.0\.mlp"),
        ("llama-gqa", _layerdrop, r"dropout of 0\.1 in model\.layers\.1"),
    ],
)
def test_noise_that_is_no_module_of_its_own_is_refused_under_shadow(name: str, noisy: Any, what: str) -> None:
    model, ids = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), dtype=torch.float64).eval(), prompts(30)
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    with torch.no_grad():
        model(torch.tensor(ids), past_key_values=past)
    noisy(model)
    with shadow(model.train(), past.ledger), pytest.raises(RunError, match=what):
        model(torch.tensor(ids))
    model.eval()
    with shadow(model, past.ledger):
        model(torch.tensor(ids))


def test_a_cache_of_another_model_is_refused_where_its_layers_differ() -> None:
    ids = torch.tensor(prompts(20))
    models = [AutoModelForCausalLM.from_config(deepcopy(CONFIGS[n])).eval() for n in ("llama-gqa", "gemma3")]
    caches = [CompressedCache.for_model(model, "none") for model in models]
    for model, past in zip(models, reversed(caches), strict=True):
        with torch.no_grad(), pytest.raises(RunError, match="was not made for this model"):
            model(ids, past_key_values=past)
    twin = deepcopy(models[0])
    with torch.no_grad():
        twin(ids, past_key_values=caches[0])  # of one form


def test_a_shadow_pass_takes_no_cache() -> None:
    model, ids = random_model("llama-gqa"), torch.tensor(prompts(30))
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    with torch.no_grad():
        model(ids, past_key_values=past)
        with shadow(model, past.ledger), pytest.raises(RunError, match="leave past_key_values out"):
            model(ids, past_key_values=DynamicCache())


def test_a_decoder_that_looks_ahead_by_its_config_is_refused() -> None:
    config = deepcopy(CONFIGS["llama-gqa"])
    config.is_causal = False
    with pytest.raises(RunError, match="is_causal=False"):
        CompressedCache.for_model(AutoModelForCausalLM.from_config(config), "none")


def test_tokens_of_a_picture_are_refused() -> None:
    model, ids = AutoModelForCausalLM.from_config(deepcopy(CONFIGS["llama-gqa"])).eval(), torch.tensor(prompts(20))
    past = CompressedCache.for_model(model, "none")
    model.config.vision_config = {}
    kinds = torch.zeros_like(ids)
    kinds[0, 3] = 1
    with torch.no_grad(), pytest.raises(RunError, match="token_type_ids mark tokens of an image"):
        model(ids, past_key_values=past, token_type_ids=kinds)


def test_any_dropout_is_refused_under_shadow() -> None:
    model, ids = random_model("gpt2"), torch.tensor(prompts(30))
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    with torch.no_grad():
        model(ids, past_key_values=past)
    model.config.attn_pdrop = 0.0
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    with shadow(model.train(), past.ledger), pytest.raises(RunError, match=r"dropout of 0\.1 in transformer\.drop"):
        model(ids)
    model.eval()
