"""What a user can get wrong about a cache, a policy or a ledger: one line each, exit code 2 at the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conform.world import feed, new_cache, prompts, random_model, shared, two_turns
from conftest import byte_tokenizer
from safetensors.torch import save_file
from test_cli import refused, refused_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.ledger import save_ledgers
from kvaudit.audit.policies import parse_policy, quantiser_of
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.core.errors import AuditError, DataError, RunError, SpecError


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("streaming:budget=2", "budget=2 is below sink + window = 4 + 0"),
        ("snapkv:budget=96,windw=8", "Did you mean 'window'?"),
        ("snapkv:budget=96+h2o:budget=96", "one evicting policy and one quantising policy"),
        ("streaming:budget=64,pin=sytem", "Did you mean 'system'?"),
        ("kivi:bits=3", "wanted one of 2, 4"),
    ],
)
def test_impossible_policies_are_one_line_errors(policy: str, message: str, tiny_folder: Path) -> None:
    assert message in refused_model(tiny_folder, policy)


def test_a_pinned_role_longer_than_the_budget_is_one_line(tiny_folder: Path) -> None:
    line = refused_model(tiny_folder, "streaming:budget=64,pin=system")
    assert "pin=system holds " in line
    assert "budget=64" in line


def test_a_model_without_full_attention_is_one_line(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention"] * 2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "no full-attention layer" in refused_model(tmp_path, "streaming:budget=64")
    with pytest.raises(RunError, match="no full-attention layer"):
        EvictingCache(config, parse_policy("none"), torch.arange(1))


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_key_value_heads"])
def test_a_replay_under_another_model_is_one_line(field: str, tmp_path: Path, tiny_folder: Path) -> None:
    policy = parse_policy("streaming:budget=12,sink=2,chunk=16")
    played = two_turns(shared(), policy)  # two layers of two heads
    cut = {"num_hidden_layers": lambda t: t[:1], "num_key_value_heads": lambda t: t[:, :1]}[field]
    foreign = [replace(r, evicted_at=cut(r.evicted_at)) for r in played.rollouts]
    with pytest.raises(DataError, match="of another model"):
        suffix_logits(shared().model, foreign, group=1, view="shadow")
    past = CompressedCache.for_model(model := random_model(), policy)
    ids = torch.tensor(prompts(30))
    with torch.no_grad():
        model(ids, past_key_values=past)
    ledger = replace(past.ledger, evicted_at=cut(past.ledger.evicted_at[0])[None])
    with pytest.raises(DataError, match="of another model"), shadow(model, ledger):
        model(ids)
    # the model in the folder has two layers of two heads
    save_ledgers(tmp_path / "rollouts.safetensors", foreign, policy)
    words = ("replay", "verify", "--rollouts", tmp_path / "rollouts.safetensors", "--model", tiny_folder)
    assert "of another model" in refused(*words)


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "text", "missing"])
def test_a_damaged_or_foreign_ledger_is_one_line(damage: str, tmp_path: Path, tiny_folder: Path) -> None:
    path = tmp_path / "rollouts.safetensors"
    policy = "streaming:budget=12,sink=2,chunk=16"
    save_ledgers(path, two_turns(shared(), policy).rollouts, parse_policy(policy))
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[:-100])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        save_file({"weights": torch.zeros(3)}, path)
    elif damage == "text":
        path.write_text("not a ledger\n" * 9)
    else:
        path.unlink()
    assert str(path) in refused("replay", "verify", "--rollouts", path, "--model", tiny_folder)


def test_a_second_conversation_in_a_used_cache_is_one_line() -> None:
    """The same number of rows: only the mask of a new prompt, shorter than what was seen, tells."""
    model, ids = random_model(), torch.tensor(prompts(20, 20))
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    with torch.no_grad():
        model(ids, attention_mask=torch.ones_like(ids), past_key_values=past)
        with pytest.raises(SpecError, match="make a new one"):
            model(ids, attention_mask=torch.ones_like(ids), past_key_values=past)


def generated(model: Any, ids: torch.Tensor, past: CompressedCache, **options: Any) -> None:
    mask = torch.ones_like(ids)
    model.generate(
        ids, past_key_values=past, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0, **options
    )


def test_a_used_cache_is_said_to_be_one() -> None:
    model, ids = random_model(), torch.tensor(prompts(20, 20))
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    generated(model, ids, past)
    for other in (ids, ids[:, :9], torch.tensor(prompts(15, 15))):
        with pytest.raises(RunError, match=r"holds \d+ tokens and is given .*make a new cache"):
            generated(model, other, past)


def test_use_cache_false_is_named() -> None:
    model, ids = random_model(), torch.tensor(prompts(20, 20))
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    with pytest.raises(RunError, match=r"holds 20 tokens and is given all of them again .* leave use_cache out"):
        generated(model, ids, past, use_cache=False)


class Pipeline:
    """Holds a model and a tokenizer, as transformers' pipelines do."""

    def __init__(self) -> None:
        self.model, self.tokenizer = random_model(), None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: torch.nn.DataParallel(random_model()), "a DataParallel, which wraps a model; pass its model.module"),
        (Pipeline, "a Pipeline, which contains a model; pass its pipe.model"),
        (lambda: "vendor/model", "'vendor/model', the name of a model; load it"),
        (lambda: Path("models/a"), "'models/a', the name of a model; load it"),
        (lambda: type(random_model()), "the class LlamaForCausalLM; load a model of it"),
        (lambda: random_model().config, "a LlamaConfig"),
        (lambda: None, "a NoneType"),
    ],
)
def test_the_error_says_what_was_given_in_place_of_a_model(given: Callable[[], Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        CompressedCache.for_model(given(), "streaming:budget=12,sink=2")
    assert str(error.value).startswith(f"wanted a loaded transformers model, got {said}")
    assert "\n" not in str(error.value)


def test_pins_without_a_policy_that_pins_and_of_another_prompt_are_one_line() -> None:
    model, pins = random_model(), torch.ones(1, 7, dtype=torch.bool)
    with pytest.raises(SpecError, match="go together"):
        CompressedCache.for_model(model, "streaming:budget=12,sink=2,pin=system")
    with pytest.raises(SpecError, match="go together"):
        CompressedCache.for_model(model, "streaming:budget=12,sink=2", pinned=pins)
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2,pin=system", pinned=pins)
    with pytest.raises(SpecError, match="must agree"):
        model(torch.tensor(prompts(20)), past_key_values=past)


@pytest.mark.parametrize("before", [(), (9,)], ids=["first call", "later call"])
def test_a_call_that_was_refused_can_be_corrected_and_repeated(before: tuple[int, ...]) -> None:
    model, policy = random_model(), "streaming:budget=12,sink=2"
    whole = torch.tensor(prompts(20, 20))
    ids, mask = whole[:, sum(before) :], torch.ones_like(whole)
    past = CompressedCache.for_model(model, policy)
    with torch.no_grad():
        for length in before:
            model(whole[:, :length], past_key_values=past)
        with pytest.raises(SpecError, match="the attention mask h"):
            model(ids, attention_mask=mask.new_zeros(2, 7) if not before else 1 - mask, past_key_values=past)
        repeated = model(ids, attention_mask=mask, past_key_values=past).logits
    fresh = CompressedCache.for_model(model, policy)
    with torch.no_grad():
        for length in before:
            model(whole[:, :length], past_key_values=fresh)
        expected = model(ids, attention_mask=mask, past_key_values=fresh).logits
    assert torch.equal(repeated, expected)
    assert torch.equal(past.ledger.evicted_at, fresh.ledger.evicted_at)


def test_pins_of_another_prompt_can_not_be_left_out_by_a_second_call() -> None:
    model, pins = random_model(), torch.ones(1, 7, dtype=torch.bool)
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2,pin=system", pinned=pins)
    for _ in range(2):
        with pytest.raises(SpecError, match="must agree"):
            model(torch.tensor(prompts(20)), past_key_values=past)


def test_a_cache_whose_first_forward_failed_is_said_to_be_interrupted() -> None:
    model, pins = random_model(), torch.ones(1, 20, dtype=torch.bool)
    past = CompressedCache.for_model(model, "streaming:budget=12,sink=2,pin=system", pinned=pins)
    with pytest.raises(SpecError, match="do not fit"):
        model(torch.tensor(prompts(20)), past_key_values=past)
    with pytest.raises(RunError, match="was interrupted; make a new cache"):
        model(torch.tensor(prompts(20)), past_key_values=past)


def test_pins_beyond_the_budget_are_refused_before_anything_leaves() -> None:
    evicting = new_cache(shared(), parse_policy("streaming:budget=12,sink=2,pin=system"))
    with pytest.raises(SpecError, match="pin=system holds 12 tokens, which do not fit budget=12 with sink=2"):
        feed(shared(), evicting, prompts(30), pinned=(torch.arange(30) < 14)[None])


def test_a_mixture_is_drawn_before_a_cache_is_made() -> None:
    with pytest.raises(SpecError, match="is a mixture"):
        new_cache(shared(), parse_policy("tova|none"))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: parse_policy("to\nva"), "unknown policy"),
        (lambda: parse_policy("streaming:budget=\x1b[31m"), "wanted int"),
    ],
)
def test_hostile_text_in_a_policy_stays_in_its_line(act: Any, message: str) -> None:
    with pytest.raises(AuditError, match=message) as caught:
        act()
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("kivi:bits=4,group=7,residual=7", 7), ("kivi:bits=2,group=3,residual=6", 6)]
)
def test_codes_that_fill_no_whole_bytes_are_refused(text: str, size: int) -> None:
    with pytest.raises(SpecError, match=f"of {size} channels fill no whole bytes"):
        quantiser_of(parse_policy(text)).channels(size)
