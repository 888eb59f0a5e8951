"""What a call of a prepared model may ask for, and how it may be compiled: the right numbers, or one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conform.test_public import batch
from conform.world import LAYERS, prompts, random_model
from torch import Tensor
from transformers import DynamicCache, ModernBertDecoderConfig, ModernBertDecoderForCausalLM, StaticCache

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.replay.learner_pass import capture_states
from kvaudit.core.errors import RunError, SpecError

SNAPKV = "snapkv:budget=14,window=4,interval=3"
COMPILED = [
    SNAPKV,
    # a compiler takes seconds for each, and what it leaves alone is the same in all
    *(
        pytest.param(policy, marks=pytest.mark.slow)
        for policy in (
            f"{SNAPKV}+int8",
            "int8",
            "streaming:budget=12,sink=2",
            "h2o:budget=12",
            "kivi:group=4,residual=8",
        )
    ),
]


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --- torch.compile --------------------------------------------------------------------------------------------------


def one_layer() -> Any:
    """A model of one layer: a compiler goes through each by itself, and takes a second for it."""
    model = random_model()
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    return model


def decoded(called: Any, past: CompressedCache) -> tuple[Tensor, Tensor]:
    """Logits of a prompt and of two greedy steps, and the tokens."""
    token, texts, logits = torch.tensor(prompts(30, 30)), [], []
    with torch.no_grad():
        for _ in range(3):
            texts.append(token)
            logits.append(called(token, past_key_values=past).logits[:, -1])
            token = logits[-1].argmax(-1)[:, None]
    return torch.stack(logits), torch.cat(texts, 1)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("policy", COMPILED)
def test_a_compiled_model_decodes_and_replays_what_the_plain_one_does(policy: str) -> None:
    """With a cache, inside shadow, and in a dense call after it."""
    model = one_layer()
    past = CompressedCache.for_model(model, policy)
    expected, ids = decoded(model, past)
    with torch.no_grad():
        dense = model(ids).logits
        with shadow(model, past.ledger):
            replayed = model(ids).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager")
        own = CompressedCache.for_model(compiled, policy)
        got, tokens = decoded(compiled, own)
        assert torch.equal(got, expected)
        assert torch.equal(tokens, ids)
        assert torch.equal(own.ledger.evicted_at, past.ledger.evicted_at)
        with shadow(compiled, past.ledger):
            assert largest(compiled(ids).logits, replayed) < 1e-12
        assert largest(compiled(ids).logits, dense) < 1e-12
    assert largest(dense, replayed) > 1e-2


# --- a decoder that is not the layer of that name -------------------------------------------------------------------


def modernbert() -> Any:
    """A ModernBERT decoder, whose layer ``decoder`` makes logits."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    own = dict(global_attn_every_n_layers=2, local_attention=10, sliding_window=10, initializer_range=0.3)
    return ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**sizes, **special, **own)).double().eval()


@pytest.mark.parametrize("policy", ["none", SNAPKV, "streaming:budget=12,sink=2", "expected:budget=16", "int8"])
def test_a_modernbert_decoder_is_replayed(policy: str) -> None:
    """Its rotary positions are turned in float32, in a float64 model too: 1e-4 leaves room for that."""
    model, (ids, mask) = modernbert(), batch()
    past = CompressedCache.for_model(model, policy)
    every, every_mask = torch.cat([ids, ids[:, -12:]], 1), torch.cat([mask, torch.ones(3, 12, dtype=mask.dtype)], 1)
    with torch.no_grad():
        parts = [model(ids, attention_mask=mask, past_key_values=past).logits]
        for end in range(41, 53):
            parts.append(
                model(every[:, end - 1 : end], attention_mask=every_mask[:, :end], past_key_values=past).logits
            )
        with shadow(model, past.ledger):
            replayed = model(every, attention_mask=every_mask).logits
        with shadow(model, past.ledger), pytest.raises(RunError, match="call the model itself"):
            model.model(every)
    assert largest(torch.cat(parts, 1)[every_mask.bool()], replayed[every_mask.bool()]) < 1e-4


def test_the_head_of_a_modernbert_decoder_makes_its_logits() -> None:
    model, ids = modernbert(), torch.tensor(prompts(20))
    with torch.no_grad(), capture_states(model) as head:
        logits = model(ids).logits[0]
        assert largest(head(head.states()[0]), logits) < 1e-12


# --- what is asked of a forward beside logits -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dense", "cached", "part", "config", "shadow", "generate"])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gpt-oss"])
def test_attention_weights_are_refused_not_left_out(name: str, how: str) -> None:
    model, ids = random_model(name, attention="eager"), torch.tensor(prompts(12))
    past = CompressedCache.for_model(model, "none")
    if how == "config":
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
        past = CompressedCache.for_model(model, "none")
    asked = {
        "dense": lambda: model(ids, output_attentions=True),
        "cached": lambda: model(ids, past_key_values=past, output_attentions=True),
        "part": lambda: model.get_decoder()(ids, output_attentions=True),
        "config": lambda: model(ids),
        "shadow": lambda: replayed(model, ids, output_attentions=True),
        "generate": lambda: model.generate(
            ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True, pad_token_id=0
        ),
    }
    with torch.no_grad(), pytest.raises(RunError, match=r"output_attentions .* leave it out"):
        asked[how]()


def replayed(model: Any, ids: Tensor, **options: Any) -> Any:
    past = CompressedCache.for_model(model, "none")
    model(ids, past_key_values=past)
    with shadow(model, past.ledger):
        return model(ids, **options)


def test_attention_weights_are_given_by_the_attention_that_the_refusal_names() -> None:
    model, ids = random_model(attention="eager"), torch.tensor(prompts(12))
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
        CompressedCache.for_model(model, "none")
        model.set_attn_implementation("eager")
        got = model(ids, output_attentions=True).attentions
    assert len(got) == LAYERS
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_loss_over_routers_is_refused_where_it_would_count_padding() -> None:
    model, (ids, mask) = random_model("qwen3-moe"), batch()
    past = CompressedCache.for_model(model, "none")
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=past)
        with pytest.raises(RunError, match=r"output_router_logits .* would count padding"):
            model(
                ids,
                attention_mask=mask,
                past_key_values=CompressedCache.for_model(model, "none"),
                output_router_logits=True,
            )
        with shadow(model, past.ledger):
            with pytest.raises(RunError, match="would count padding"):
                model(ids, attention_mask=mask, output_router_logits=True)
            model.config.output_router_logits = True
            with pytest.raises(RunError, match="would count padding"):
                model(ids, attention_mask=mask, labels=ids)
            model(ids, attention_mask=mask)  # without labels nobody adds it to anything
        whole = ids[:1]
        expected = model(whole, output_router_logits=True).aux_loss
        assert largest(replayed(model, whole, output_router_logits=True).aux_loss, expected) < 1e-12


@pytest.mark.parametrize("name", ["llama-gqa", "gpt-oss"])
def test_a_call_that_is_to_look_ahead_is_refused(name: str) -> None:
    model, ids = random_model(name), torch.tensor(prompts(12))
    past = CompressedCache.for_model(model, "none")
    with torch.no_grad(), pytest.raises(RunError, match="is_causal=False"):
        model(ids, past_key_values=past, is_causal=False)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma3", "qwen3-moe"])
def test_hidden_states_and_some_logits_are_those_of_the_model(name: str) -> None:
    model, (ids, mask) = random_model(name), batch()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    past = [CompressedCache.for_model(model, "none") for _ in range(2)]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True)
        got = model(ids, attention_mask=mask, past_key_values=past[0], output_hidden_states=True, use_cache=False)
        some = model(ids, attention_mask=mask, past_key_values=past[1], logits_to_keep=3).logits
        with shadow(model, past[0].ledger):
            again = model(ids, attention_mask=mask, output_hidden_states=True)
    for out in (got, again):
        assert len(out.hidden_states) == len(expected.hidden_states)
        for own, other in zip(out.hidden_states, expected.hidden_states, strict=True):
            assert largest(own[mask.bool()], other[mask.bool()]) < 1e-12
    assert largest(some, expected.logits[:, -3:]) < 1e-12
    assert past[0].get_seq_length() == 40, "use_cache=False keeps no entry from a cache that is given"


# --- masks and positions in other forms -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_a_prepared_model_with_sinks_takes_a_mask_of_numbers(dtype: torch.dtype) -> None:
    model, (ids, mask) = random_model("gpt-oss"), batch()
    seen = torch.ones(40, 40, dtype=torch.bool).tril()[None, None] & mask.bool()[:, None, None]
    seen = seen | torch.eye(40, dtype=torch.bool)  # padding sees itself
    numbers = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)
    numbers = numbers - 0.25 * (torch.arange(40)[:, None] - torch.arange(40)).abs() * seen  # a bias of its own
    numbers = numbers if dtype.is_floating_point else numbers.masked_fill(seen, 0)
    with torch.no_grad():
        expected = model(ids, attention_mask=numbers.to(torch.float64 if dtype == torch.bool else dtype)).logits
        CompressedCache.for_model(model, "none")
        got = model(ids, attention_mask=seen if dtype == torch.bool else numbers.to(dtype)).logits
    assert model.config._attn_implementation == ATTENTION_NAME
    # the model's own takes a softmax in float32
    assert largest(got[mask.bool()], expected[mask.bool()]) < 1e-4


def test_a_prepared_model_with_sinks_fills_a_cache_of_fixed_size() -> None:
    model, ids = random_model("gpt-oss"), torch.tensor(prompts(12, 12))

    def logits(past: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat(
                [model(part, past_key_values=past).logits for part in (ids[:, :8], *ids[:, 8:].split(1, 1))], 1
            )

    expected = logits(DynamicCache(config=model.config))
    CompressedCache.for_model(model, "none")
    assert largest(logits(StaticCache(config=model.config, max_cache_len=30)), expected) < 1e-12


@pytest.mark.parametrize("given", [{"full_attention": torch.ones(1, 12)}, [[1] * 12]])
def test_a_mask_that_is_no_tensor_is_one_line(given: Any) -> None:
    model, ids = random_model(), torch.tensor(prompts(12))
    past = CompressedCache.for_model(model, "none")
    with torch.no_grad():
        with pytest.raises(RunError, match=f"attention_mask is a {type(given).__name__}, wanted the 2-D tensor"):
            model(ids, attention_mask=given, past_key_values=CompressedCache.for_model(model, "none"))
        model(ids, past_key_values=past)
        with shadow(model, past.ledger), pytest.raises(RunError, match="wanted the 2-D tensor"):
            model(ids, attention_mask=given)


def test_a_mask_wider_than_the_text_is_refused_inside_shadow() -> None:
    model, (ids, mask) = random_model(), batch()
    past = CompressedCache.for_model(model, SNAPKV)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=past)
        with shadow(model, past.ledger):
            for wider in (torch.cat([mask, mask[:, :3]], 1), torch.cat([mask[:, :3], mask], 1)):
                with pytest.raises(SpecError, match=r"has shape \(3, 43\), the text \(3, 40\)"):
                    model(ids, attention_mask=wider)


@pytest.mark.parametrize("shape", [(24,), (1, 24), (3, 12), (1, 1)])
def test_positions_of_another_shape_are_one_line(shape: tuple[int, ...]) -> None:
    model, ids = random_model(), torch.tensor(prompts(12, 12))
    past = CompressedCache.for_model(model, "none")
    with torch.no_grad(), pytest.raises(RunError, match=r"position_ids have shape .* the new tokens"):
        model(ids, position_ids=torch.zeros(shape, dtype=torch.int64), past_key_values=past)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-next"])
def test_a_part_of_a_model_that_is_called_on_its_own_is_said_to_be_one(name: str) -> None:
    model, ids = random_model(name), torch.tensor(prompts(12))
    past = CompressedCache.for_model(model, "none")
    with torch.no_grad():
        with pytest.raises(RunError, match="a part of the model is called on its own"):
            model.model(ids, past_key_values=past)
        past = CompressedCache.for_model(model, "none")
        model(ids, past_key_values=past)
        with pytest.raises(RunError, match="a part of the model is called on its own"):
            model.model(ids, past_key_values=past)
