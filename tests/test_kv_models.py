"""Models of unusual make: each is replayed exactly, or refused in one line that says why."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from conform.stepwise import stepwise_logits
from conform.test_public import batch, model, played, whole
from conform.test_shadow import drawn_logprobs, shadow_logits
from conform.world import (
    CONFIGS,
    GQA,
    SIZES,
    exact_norms,
    feed,
    gap,
    new_cache,
    prompts,
    random_model,
    served,
    shared,
    two_turns,
)
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    Gemma2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    OPTConfig,
)

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.attention import AttentionCall
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.layers import kv_heads
from kvaudit.audit.policies import parse_policy
from kvaudit.core.errors import RunError

TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
HEADS = dict(num_attention_heads=4, initializer_range=0.3, **SIZES, **TOKENS)
LEARNED = dict(n_embd=32, n_layer=2, n_head=4, n_positions=512, vocab_size=61, initializer_range=0.3, **TOKENS)
MLA = dict(
    q_lora_rank=None,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=12,
    num_key_value_heads=4,
    first_k_dense_replace=3,  # no layer with experts, whose router computes in float32
)
OPT = dict(hidden_size=32, ffn_dim=48, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4, init_std=0.3)
BART = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in dict(layers=2, attention_heads=4, ffn_dim=48).items()
}
EXACT = {
    "gpt-neox": GPTNeoXConfig(**HEADS),
    "opt": OPTConfig(max_position_embeddings=512, vocab_size=61, **OPT, **TOKENS),
    "gpt-bigcode": GPTBigCodeConfig(multi_query=True, **LEARNED),
    "bert": BertConfig(is_decoder=True, **HEADS),
    "mla": DeepseekV3Config(**HEADS, **MLA),
}


def built(config: Any) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float64).eval()
    exact_norms(made)
    return made


def replay_gap(made: Any, policy: str, called: Any = None) -> float:
    """Largest difference of logits between the public cache and its shadow pass over a left-padded batch."""
    ids, mask = batch()
    past = CompressedCache.for_model(made, policy)
    logits = played(called or made, past, ids, mask)
    every, every_mask = whole(ids, mask)
    with torch.no_grad(), shadow(made, past.ledger):
        replayed = (called or made)(every, attention_mask=every_mask).logits
    assert float(past.retention.max()) < 0.8
    return float((logits - replayed)[every_mask.bool()].abs().max())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # older transformers build GPT-BigCode with it
@pytest.mark.parametrize("name", EXACT)
def test_unusual_heads_and_positions_are_replayed_exactly(name: str) -> None:
    assert replay_gap(built(EXACT[name]), "snapkv:budget=14,window=4,interval=3") < 1e-12


@pytest.mark.parametrize("policy", ["h2o:budget=12,chunk=16", "keydiff:budget=12", "streaming:budget=12+int8"])
def test_keys_wider_than_values_are_compressed_like_any_others(policy: str) -> None:
    assert replay_gap(built(EXACT["mla"]), policy) < 1e-12


def test_a_policy_that_turns_queries_says_what_latent_attention_lacks() -> None:
    with pytest.raises(
        RunError, match=r"expected needs rotary positions .* on a head's first channels, .* 'deepseek_v3'"
    ):
        CompressedCache.for_model(built(EXACT["mla"]), "expected:budget=12")


def test_opt_stands_where_its_own_mask_puts_it() -> None:
    made, (ids, mask) = built(EXACT["opt"]), batch()
    with torch.no_grad():
        expected = made(ids, attention_mask=mask).logits
        logits = made(ids, attention_mask=mask, past_key_values=CompressedCache.for_model(made, "none")).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-12)


def test_a_config_without_kv_heads_has_one_per_attention_head() -> None:
    assert kv_heads(CONFIGS["llama-gqa"]) == 2
    assert kv_heads(CONFIGS["gpt2"]) == 4
    assert kv_heads(EXACT["gpt-bigcode"]) == 1
    assert kv_heads(EXACT["mla"]) == 4


def test_layers_of_different_kv_heads_have_no_ledger() -> None:
    past = EvictingCache(CONFIGS["llama-gqa"], parse_policy("none"), torch.tensor([0]))
    past.begin(torch.arange(3)[None], decoding=False)
    for layer, heads in enumerate((2, 1)):
        keys = torch.ones(1, heads, 3, 8)
        past.attend(AttentionCall(layer, torch.ones(1, 4, 3, 8), keys, keys, 1.0))
    with pytest.raises(RunError, match=r"layers hold \[1, 2\] KV heads"):
        past.ledger(3)


@pytest.mark.parametrize(
    "policy", ["h2o:budget=12,chunk=16", "streaming:budget=14,sink=2,window=4+kivi:group=4,residual=8"]
)
def test_a_sink_beside_the_logits_is_sampled_replayed_and_learned(policy: str) -> None:
    loaded = served("gpt-oss")
    assert gap(loaded, two_turns(loaded, policy, group=2, lengths=(40, 9)), "shadow", group=2) < 1e-12
    rollout = two_turns(loaded, policy, lengths=(22,), short=True).rollouts[0]
    gradients = []
    for logits in (shadow_logits, stepwise_logits):
        loaded.model.zero_grad()
        drawn_logprobs(logits(loaded.model, rollout), rollout).sum().backward()
        gradients.append({name: p.grad for name, p in loaded.model.named_parameters() if p.grad is not None})
    sinks = [name for name in gradients[1] if name.endswith("sinks")]
    assert len(sinks) == 3
    for name in [*sinks, "model.layers.0.self_attn.q_proj.weight"]:
        assert gradients[1][name].norm() > 1e-3
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-9, atol=1e-10)


def test_sinks_take_their_share_of_what_h2o_adds_up() -> None:
    loaded, (text,) = shared("gpt-oss"), prompts(30)
    past = new_cache(loaded, parse_policy("h2o:budget=100"))
    feed(loaded, past, [text[:18]])
    feed(loaded, past, [text[18:]])
    eager = random_model("gpt-oss")
    exact_norms(eager)
    with torch.no_grad():
        weights = eager(torch.tensor([text]), output_attentions=True).attentions
    for layer in (1, 2):
        expected = weights[layer].unflatten(1, (2, 2)).sum((2, 3)).float()  # group, queries
        torch.testing.assert_close(past.layers[layer].store.mass, expected, rtol=0, atol=1e-5)
    assert 0.01 < 1 - float(weights[1].sum(-1).mean()) < 0.95, "the sinks take a share"


def test_a_prepared_model_with_sinks_answers_dense_calls_as_before() -> None:
    made, (ids, mask) = random_model("gpt-oss"), batch()
    with torch.no_grad():
        before = made(ids, attention_mask=mask).logits
        CompressedCache.for_model(made, "none")
        after = made(ids, attention_mask=mask).logits
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], rtol=0, atol=1e-12)


def test_soft_capping_is_refused_before_the_model_is_changed() -> None:
    made = AutoModelForCausalLM.from_config(Gemma2Config(head_dim=8, sliding_window=10, **GQA)).eval()
    before = made(torch.tensor(prompts(9))).logits
    with pytest.raises(RunError, match="uses softcap"):
        CompressedCache.for_model(made, "none")
    assert torch.equal(made(torch.tensor(prompts(9))).logits, before)


REFUSED = {
    "an encoder": (BertConfig(**HEADS), "is not causal"),
    "an encoder and a decoder": (BartConfig(d_model=32, vocab_size=61, **BART, **TOKENS), "takes no position_ids"),
    "two attentions a layer": (DiffLlamaConfig(**GQA), "layer 0 of the model's 2 attends again|code of its own"),
}
if hasattr(transformers, "HrmTextConfig"):
    again = "layer 0 of the model's 16 attends again"
    REFUSED["repeated layers"] = (transformers.HrmTextConfig(**GQA, **TOKENS), again)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_compressed_are_one_line_errors(name: str) -> None:
    config, words = REFUSED[name]
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(deepcopy(config)).eval()
    with pytest.raises(RunError, match=words), torch.no_grad():
        made(torch.tensor(prompts(9)), past_key_values=CompressedCache.for_model(made, "none"))


# peft asks transformers by a name that transformers has given up
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_a_model_with_adapters_is_compressed_and_replayed_exactly() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    inner = deepcopy(model("llama-gqa"))
    adapted = peft.get_peft_model(inner, lora).eval()
    for called in (adapted, inner):
        assert replay_gap(adapted, "snapkv:budget=14,window=4,interval=3", called) < 1e-12
    with torch.no_grad():
        moved = adapted(torch.tensor(prompts(9))).logits - model("llama-gqa")(torch.tensor(prompts(9))).logits
    assert float(moved.abs().max()) > 1, "the adapters have weights"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_adapters_of_virtual_tokens_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    tuned = peft.get_peft_model(random_model(), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(RunError, match="virtual tokens move every position"):
        CompressedCache.for_model(tuned, "none")


@pytest.mark.skipif(hasattr(transformers.Cache, "get_conv_state"), reason="this transformers serves states of ours")
def test_linear_attention_under_an_older_transformers_is_one_line() -> None:
    config = transformers.Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], **GQA)
    with pytest.raises(RunError, match="install a newer one"):
        CompressedCache.for_model(AutoModelForCausalLM.from_config(config), "none")
