"""Mixtures of experts: which experts a token went to is recorded, replayed and held to the model."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conform.world import DEEP, feed, gap, ledger_of, new_cache, prompts, random_model, served, shared, two_turns
from huggingface_hub.errors import StrictDataclassError
from rerun_world import verify
from rollout_form import write_rollouts
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, PhimoeConfig

import kvaudit.audit.cache.attention
from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.ledger import Rollout, load_ledgers, save_ledgers
from kvaudit.audit.cache.routing import hook_expert_blocks
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.interchange import read_rollouts
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.replay.rollout_checks import RecordedRollouts, check_replayable
from kvaudit.core.errors import DataError, RunError

POLICY = "streaming:budget=12,sink=2,chunk=16"
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def nearly_tied(dtype: torch.dtype, apart: float) -> SimpleNamespace:
    """A model whose experts the routers can tell apart by ``apart`` in their weights alone."""
    loaded = served("qwen3-moe", dtype, 0.2)
    for name, weight in loaded.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            generator = torch.Generator().manual_seed(len(name))
            nudge = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * apart
            weight.data[:] = (weight.data[:1].double() + nudge).to(dtype)
    return loaded


def rerouted_gap(loaded: SimpleNamespace, played: Any) -> float:
    """``gap`` without the recorded experts."""
    bare = [replace(rollout, experts=None) for rollout in played.rollouts]
    with torch.no_grad():
        logits, _ = suffix_logits(loaded.model, bare, group=1, view="shadow", reroute=True)
    worst = 0.0
    for row, rollout in enumerate(bare):
        tokens = rollout.ids[rollout.prompt_length :]
        logprobs = logits[row, : len(tokens)].double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        drawn = logprobs[rollout.sampled[rollout.prompt_length :]]
        worst = max(worst, float((drawn - torch.tensor(played.logprobs[row]).double()).abs().max()))
    return worst


@pytest.mark.parametrize("policy", ["none", POLICY, "snapkv:budget=14,window=4,interval=3+int8"])
def test_two_turns_of_groups_are_replayed_exactly(policy: str) -> None:
    loaded = shared("qwen3-moe")
    played = two_turns(loaded, policy, group=3, lengths=(40, 9))
    assert gap(loaded, played, "shadow", group=3) < 1e-12
    assert gap(loaded, played, "shadow") < 1e-12


def test_every_token_but_the_last_has_its_experts() -> None:
    for rollout in two_turns(shared("qwen3-moe"), POLICY).rollouts:
        assert rollout.experts is not None
        assert rollout.experts.shape == (len(rollout.ids), 2, 2)
        assert (rollout.experts[:-1] >= 0).all()
        assert (rollout.experts[-1] == -1).all()


@pytest.mark.parametrize(
    ("dtype", "apart", "rounding"),
    [(torch.float32, 1e-7, 1e-5), (torch.bfloat16, 1e-3, 0.1)],
    ids=["float32", "bfloat16"],
)
def test_nearly_tied_experts_flip_unless_replayed(
    dtype: torch.dtype, apart: float, rounding: float, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = nearly_tied(dtype, apart)
    played = two_turns(loaded, POLICY)
    exact, anew = gap(loaded, played, "shadow"), rerouted_gap(loaded, played)
    with capsys.disabled():
        print(f"\n{dtype}, near-ties: {exact:.1e} nats with the experts on record, {anew:.1e} with experts chosen anew")
    assert exact < rounding
    assert anew > max(1e-2, 2 * exact)


def test_one_token_sent_elsewhere_is_seen() -> None:
    loaded = shared("qwen3-moe")
    played = two_turns(loaded, POLICY)
    assert gap(loaded, played._replace(rollouts=[misrouted(r) for r in played.rollouts]), "shadow") > 1e-4


def misrouted(rollout: Rollout, token: int = -5) -> Rollout:
    """The rollout with one token sent to the two experts it was not sent to."""
    assert rollout.experts is not None
    experts = rollout.experts.clone()
    experts[token, 0] = torch.tensor(sorted({0, 1, 2, 3} - set(experts[token, 0].tolist())), dtype=torch.int16)
    return replace(rollout, experts=experts)


def test_generate_on_stock_transformers_is_replayed() -> None:
    model, ids = random_model("qwen3-moe", torch.float32, 0.2), torch.tensor(prompts(30, 30))
    past = CompressedCache.for_model(model, POLICY)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    out = model.generate(ids, past_key_values=past, return_dict_in_generate=True, output_logits=True, **options)
    record = past.ledger
    assert record.experts is not None
    assert record.experts.shape == (2, 41, 2, 2)
    with torch.no_grad(), shadow(model, record):
        replayed = model(out.sequences).logits[:, 29:-1]
    torch.testing.assert_close(torch.stack(out.logits, 1), replayed, rtol=1e-4, atol=1e-4)
    with pytest.raises(DataError, match="does not say which experts"), shadow(model, replace(record, experts=None)):
        pass


def gradient(loaded: SimpleNamespace, rollout: Rollout) -> Tensor:
    loaded.model.zero_grad()
    with shadow(loaded.model, ledger_of(rollout)):
        loaded.model(rollout.ids[None]).logits.log_softmax(-1)[..., 11].sum().backward()
    return torch.cat([p.grad.flatten() for p in loaded.model.parameters() if p.grad is not None])


def test_gradients_flow_through_the_experts_on_record_also_where_layers_are_computed_again() -> None:
    loaded = served("qwen3-moe")
    rollout = misrouted(two_turns(loaded, POLICY, lengths=(22,), short=True).rollouts[0])
    whole = gradient(loaded, rollout)
    assert float(loaded.model.model.layers[0].mlp.gate.weight.grad.norm()) > 1e-3
    own = gradient(loaded, two_turns(loaded, POLICY, lengths=(22,), short=True).rollouts[0])
    assert (whole - own).norm() / own.norm() > 1e-3
    for layer in loaded.model.model.layers:  # transformers renames the switch from version to version
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    loaded.model.train()
    assert (gradient(loaded, rollout) - whole).norm() / whole.norm() < 1e-12
    # a layer whose attention is not handed the record, as linear attention may not be
    loaded.model.model.layers[0].self_attn._forward_pre_hooks.clear()
    with pytest.raises(RunError, match="switch gradient checkpointing off"):
        gradient(loaded, rollout)


def test_a_copy_of_a_watched_model_is_watched_by_itself() -> None:
    first = served("qwen3-moe")
    expected = two_turns(first, POLICY).rollouts[0].experts
    second = SimpleNamespace(**{**vars(first), "model": copy.deepcopy(first.model)})
    del first
    got = two_turns(second, POLICY).rollouts[0].experts
    assert expected is not None
    assert got is not None
    assert torch.equal(expected, got)


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, **SIZES),
        DeepseekV3Config(
            num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
            moe_intermediate_size=16, first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=16, **SIZES,
        ),
    ],
    ids=["mixtral", "deepseek-v3"],
)  # fmt: skip
def test_other_routers_are_recorded_as_they_chose(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=kvaudit.audit.cache.attention.ATTENTION_NAME
    ).eval()
    said: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: said.append(args[1]))
    evicting = new_cache(SimpleNamespace(model=model), parse_policy("none"))
    feed(SimpleNamespace(model=model), evicting, prompts(30))
    assert torch.equal(evicting.experts(30)[0].long(), torch.stack(said, 1))


def test_a_model_whose_experts_cannot_be_recorded_is_refused() -> None:
    try:
        config = PhimoeConfig(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **SIZES)
    except StrictDataclassError as error:  # 5.4.0 wants a number where its own default is False
        pytest.skip(f"this transformers cannot make such a config: {type(error).__name__}")
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=kvaudit.audit.cache.attention.ATTENTION_NAME
    ).eval()
    with pytest.raises(RunError, match="wanted once: which experts it uses cannot be recorded"):
        feed(SimpleNamespace(model=model), new_cache(SimpleNamespace(model=model), parse_policy("none")), prompts(5))


def test_dense_models_are_left_alone() -> None:
    assert hook_expert_blocks(shared().model) == 0
    assert two_turns(shared(), POLICY, only=2).rollouts[0].experts is None


def test_files_keep_the_experts_and_older_ones_have_none(tmp_path: Path) -> None:
    (rollout,) = two_turns(shared("qwen3-moe"), POLICY, only=0).rollouts
    save_ledgers(tmp_path / "new", [rollout], parse_policy(POLICY))
    ((again,), _) = load_ledgers(tmp_path / "new")
    assert torch.equal(again.experts, rollout.experts)
    recorded = RecordedRollouts("here", (rollout,), None)
    write_rollouts(tmp_path / "r.json", recorded)
    assert torch.equal(read_rollouts(tmp_path / "r.json").rollouts[0].experts, rollout.experts)
    bare = {name: tensor for name, tensor in load_file(tmp_path / "new").items() if not name.endswith("experts")}
    with safe_open(tmp_path / "new", framework="pt") as file:
        header = file.metadata()["kvaudit"].replace('"format": 3', '"format": 2')
    save_file(bare, tmp_path / "old", metadata={"kvaudit": header})
    assert load_ledgers(tmp_path / "old")[0][0].experts is None


def test_verify_says_where_experts_were_chosen_anew() -> None:
    loaded = SimpleNamespace(**vars(shared("qwen3-moe")), dtype=torch.float64)
    rollouts = two_turns(loaded, POLICY).rollouts
    told = verify(loaded, RecordedRollouts("here", tuple(rollouts), parse_policy(POLICY)))
    assert (told.explained, told.rerouted) == (True, False)
    untold = verify(
        loaded, RecordedRollouts("here", tuple(replace(r, experts=None) for r in rollouts), parse_policy(POLICY))
    )
    assert (untold.explained, untold.rerouted) == (True, True)
    forged = verify(loaded, RecordedRollouts("here", tuple(misrouted(r) for r in rollouts), parse_policy(POLICY)))
    assert not forged.token_explained


def test_experts_that_no_model_can_have_chosen_are_refused(tmp_path: Path) -> None:
    loaded = shared("qwen3-moe")
    (rollout,) = two_turns(loaded, POLICY, only=2).rollouts
    assert rollout.experts is not None
    config = loaded.model.config
    for change, words in ((lambda e: e[3].fill_(1), "one of them twice"), (lambda e: e[3].fill_(-1), "to no expert")):
        experts = rollout.experts.clone()
        change(experts)
        with pytest.raises(DataError, match=words):
            check_replayable(RecordedRollouts("here", (replace(rollout, experts=experts),), None), config, 512)
    with pytest.raises(DataError, match="experts up to number 3, the model 0 blocks"):
        suffix_logits(shared(DEEP).model, [rollout], group=1, view="shadow")
    write_rollouts(tmp_path / "r.json", RecordedRollouts("here", (rollout,), None))
    table = json.loads((tmp_path / "r.json").read_text())
    table["rollouts"][0]["experts"][2][1].append(0)
    (tmp_path / "r.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match="uneven lengths"):
        read_rollouts(tmp_path / "r.json")
