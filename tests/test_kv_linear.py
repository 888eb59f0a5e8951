"""Hybrids: full-attention layers are compressed, layers of linear attention carry their state, in every pass."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from conform.test_public import batch, whole
from conform.world import (
    CONFIGS,
    MIXED,
    feed,
    gap,
    ledger_of,
    new_cache,
    prompts,
    random_model,
    served,
    shared,
    two_turns,
)
from test_kv_models import HEADS, built, replay_gap
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    MiniMaxConfig,
    Qwen3_5TextConfig,
)

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.layers import describe_governed_layers, layer_plans
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.replay.rollout_checks import eviction_breach
from kvaudit.core.errors import RunError

if not hasattr(transformers.Cache, "get_conv_state"):
    pytest.skip("this transformers keeps states of linear attention in caches of its own", allow_module_level=True)

LINEAR = ["linear_attention", "full_attention", "full_attention"]
DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8)
UNLIKE = {**HEADS, "num_hidden_layers": len(LINEAR)}
LATENT = dict(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)
# their layers of linear attention compute in float32, whatever the model's precision
FLOAT32 = {
    "qwen3.5": Qwen3_5TextConfig(head_dim=8, layer_types=LINEAR, **DELTA, **MIXED),
    "kimi-linear": transformers.KimiLinearConfig(
        layer_types=LINEAR,
        linear_attn_config={"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
        mlp_layer_types=["dense"] * 3,
        num_key_value_heads=4,
        **LATENT,
        **UNLIKE,
    ),
    "olmo-hybrid": transformers.OlmoHybridConfig(
        layer_types=LINEAR, num_key_value_heads=2, **{**DELTA, "linear_num_key_heads": 4}, **UNLIKE
    ),
    "granite-4": GraniteMoeHybridConfig(
        layer_types=LINEAR, num_local_experts=0, shared_intermediate_size=48, **MAMBA, num_key_value_heads=2, **UNLIKE
    ),
    "falcon-h1": FalconH1Config(head_dim=8, mamba_d_ssm=64, **MAMBA, num_key_value_heads=2, **UNLIKE),
}
SNAPKV = "snapkv:budget=14,window=4,interval=3,chunk=16"


@pytest.mark.parametrize("name", FLOAT32)
def test_families_of_hybrids_replay_to_the_rounding_of_their_own_float32(name: str) -> None:
    # recurrences round differently token by token and in chunks: 3e-4 nats were measured
    assert replay_gap(built(FLOAT32[name]), "snapkv:budget=14,window=4,interval=3") < 5e-4


@pytest.mark.parametrize("policy", [SNAPKV, "h2o:budget=12,chunk=5", "streaming:budget=14,sink=2,window=4+int8"])
def test_ragged_chunks_turns_and_groups_are_replayed_exactly(policy: str) -> None:
    loaded = shared("qwen3-next")
    played = two_turns(loaded, policy, group=2, lengths=(40, 9))
    assert gap(loaded, played, "shadow", group=2) < 1e-12
    assert gap(loaded, played, "shadow", group=1) < 1e-12
    assert gap(loaded, played, "dense", group=2) > 1e-6
    assert eviction_breach(played.rollouts[0], layer_plans(loaded.model.config, parse_policy(policy))) is None


def test_batch_mates_and_padding_leave_a_state_alone() -> None:
    together = two_turns(shared("qwen3-next"), SNAPKV)
    for row in range(3):
        alone = two_turns(shared("qwen3-next"), SNAPKV, only=row)
        assert together.rollouts[row].ids.tolist() == alone.rollouts[0].ids.tolist()
        assert together.logprobs[row] == pytest.approx(alone.logprobs[0], abs=1e-11)


def test_chunks_hand_the_state_on() -> None:
    loaded, (text,) = shared("qwen3-next"), prompts(40)
    pieces = new_cache(loaded, parse_policy("none"))
    logits = [feed(loaded, pieces, [text[start : start + 7]]) for start in range(0, 40, 7)]
    at_once = feed(loaded, new_cache(loaded, parse_policy("none")), [text])
    torch.testing.assert_close(torch.cat(logits, 1), at_once, rtol=0, atol=1e-12)


def test_the_gradient_goes_through_the_state_that_a_group_shares() -> None:
    loaded = served("qwen3-next")
    played = two_turns(loaded, SNAPKV, group=2, lengths=(30, 9), short=True)
    gradients = []
    for group in (2, 0):
        loaded.model.zero_grad()
        if group:
            logits, valid = suffix_logits(loaded.model, played.rollouts, group=group, view="shadow")
            (logits.log_softmax(-1)[..., 11] * valid).sum().backward()
        else:
            for rollout in played.rollouts:
                whole_row(loaded.model, rollout).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in loaded.model.parameters()]))
    assert gradients[0].norm() > 1
    # the layer's decay and norm pass their gradients through float32
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 1e-7


def whole_row(model: Any, rollout: Any) -> torch.Tensor:
    """The same sum as one row at a time, in one pass from its first token on."""
    with shadow(model, ledger_of(rollout)):
        logits = model(rollout.ids[None]).logits[0, rollout.prompt_length - 1 : -1]
    return logits.log_softmax(-1)[..., 11].sum()


def test_the_dense_pass_of_a_group_is_the_stock_model() -> None:
    loaded, stock = shared("qwen3-next"), served("qwen3-next").model
    played = two_turns(loaded, SNAPKV, group=2, lengths=(30, 9), short=True)
    with torch.no_grad():
        logits, valid = suffix_logits(loaded.model, played.rollouts, group=2, view="dense")
        for row, rollout in enumerate(played.rollouts):
            expected = stock(rollout.ids[None]).logits[0, rollout.prompt_length - 1 : -1]
            torch.testing.assert_close(logits[row, valid[row]], expected, rtol=0, atol=1e-12)


def test_generate_carries_states_under_left_padding() -> None:
    made, (ids, mask) = random_model("qwen3-next"), batch()
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = made.generate(ids, **options)
    assert torch.equal(made.generate(ids, past_key_values=CompressedCache.for_model(made, "none"), **options), expected)
    past = CompressedCache.for_model(made, "snapkv:budget=14,window=4,interval=3")
    out = made.generate(ids, past_key_values=past, **options)
    assert past.get_seq_length() == 47  # all but the last
    with torch.no_grad(), shadow(made, past.ledger):
        replayed = made(out, attention_mask=whole(ids, mask, out[:, 40:])[1]).logits
    assert torch.equal(replayed[:, 39:-1].argmax(-1), out[:, 40:])


def test_only_full_attention_is_evicted_and_states_count_as_bytes() -> None:
    loaded = shared("qwen3-next")
    past = new_cache(loaded, parse_policy("streaming:budget=12,sink=2,window=4"), [0, 1])
    feed(loaded, past, prompts(30, 20))
    gone = past.ledger(30) < NEVER
    assert gone.flatten(2).sum(2).tolist() == [[0, 36, 36], [0, 16, 16]]
    assert past.retention().tolist() == [12 / 30, 12 / 20]
    # two rows: 4 inputs of 2 * 16 + 32 channels and 4 states of 8 * 8, of float64; 8 bytes each
    assert past.bytes - sum(layer.store.bytes for layer in past.layers) == 2 * 8 * (4 * 64 + 4 * 64)


def test_the_layers_that_a_policy_governs_are_described() -> None:
    said = {name: describe_governed_layers(CONFIGS[name]) for name in ("qwen3-next", "gpt-oss", "llama-gqa")}
    assert said == {
        "qwen3-next": "evicts 2 of 3 layers; the others are linear and keep their state",
        "gpt-oss": "evicts 2 of 3 layers; the others keep their own sliding window",
        "llama-gqa": "",
    }


REFUSED = {
    "a state that is not passed on": (
        JambaConfig(num_experts=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, **UNLIKE),
        "not passed kv=",
    ),
    "a state kept elsewhere": (
        MiniMaxConfig(head_dim=8, num_local_experts=2, layer_types=LINEAR, **MIXED),
        "1 of which take no cache_params",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_states_that_cannot_be_carried_are_one_line(name: str) -> None:
    config, words = REFUSED[name]
    made = AutoModelForCausalLM.from_config(deepcopy(config)).eval()
    with pytest.raises(RunError, match=words), torch.no_grad():
        made(torch.tensor(prompts(9)), past_key_values=CompressedCache.for_model(made, "none"))
