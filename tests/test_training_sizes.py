"""Real sizes: logits a few at a time, adapters, checkpointed layers, split groups; each learns what it would whole."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_world import gradients, play_for_parity, rows, sampled, sha256, sharp, short, silent
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from kvaudit.audit.cache.ledger import load_ledgers
from kvaudit.audit.replay.learner_pass import capture_states
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.prepare import prepare_run
from kvaudit.audit.sampling import memory
from kvaudit.audit.sampling.checkpoints import load_comparable
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import footprint, grpo, learner, rollouts
from kvaudit.audit.training.adapters import adapter_weights, check_adapter, load_trained_adapter, trainable_copy
from kvaudit.audit.training.batch import Batch, gradient_steps, microbatches
from kvaudit.audit.training.config import StartConfig
from kvaudit.audit.training.footprint import check_memory, estimate_memory
from kvaudit.audit.training.learner import Learner, read_tokens
from kvaudit.audit.training.sft import gold_rollout, warm_start
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import AdapterSpec, TrainSpec
from kvaudit.suites.base import SUITES


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(scope="module")
def batch(base: LoadedModel) -> Batch:
    return sampled(base, suites=["refusal"])


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No vocabulary is small, and logits of seven tokens are made at a time."""
    monkeypatch.setattr(learner, "WHOLE_VOCABULARY", 0)
    monkeypatch.setattr(learner, "LOGITS_PER_PIECE", 7 * 300)


def numbers(base: LoadedModel, batch: Batch, view: str) -> list[torch.Tensor]:
    """Log-probs, entropy, the KL to another view, and every weight's gradient, in float64."""
    model = copy.deepcopy(base.model).double()
    read, other = (read_tokens(model, batch.rollouts, 4, kind, 0.9) for kind in (view, "dense"))
    apart = read.distributions.kl(other.distributions)
    (read.logprobs * torch.linspace(-1, 1, len(read.logprobs)) + apart).sum().backward()
    return [read.logprobs.detach(), read.entropy, apart.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("view", ["dense", "shadow"])
def test_logits_made_a_few_at_a_time_change_nothing(
    view: str, base: LoadedModel, batch: Batch, request: pytest.FixtureRequest
) -> None:
    whole = numbers(base, batch, view)
    request.getfixturevalue("in_pieces")
    for found, wanted in zip(numbers(base, batch, view), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-10)


def test_logits_made_a_few_at_a_time_are_not_kept(base: LoadedModel, batch: Batch, in_pieces: None) -> None:
    shapes = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        read_tokens(base.model, batch.rollouts, 4, "shadow", 1.0)
    head = base.model.lm_head.weight.T.shape
    assert shapes
    assert {shape for shape in shapes if head[1] in shape} == {tuple(head)}


def test_a_head_caps_and_scales_as_the_model_does() -> None:
    settings = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, final_logit_softcapping=0.05,
    )  # fmt: skip
    model, ids = Gemma2ForCausalLM(settings).eval(), torch.tensor([[1, 2, 3]])
    with capture_states(model) as head:
        wanted = model(ids).logits[0]
    assert wanted.abs().max() < 0.05
    assert torch.equal(head(head.states()[0]), wanted)


# peft asks transformers by a name that transformers has given up
PEFT_ASKS_BY_AN_OLD_NAME = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
ADAPTER = {"rank": 3, "alpha": 6}


def adapted(base: LoadedModel) -> LoadedModel:
    """The base with an adapter that changes it."""
    pytest.importorskip("peft", reason="peft is not installed")
    model = trainable_copy(base, AdapterSpec(**ADAPTER), 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    return model


def test_an_adapters_gradient_under_the_shadow_pass_is_that_of_the_composed_weight(
    base: LoadedModel, batch: Batch
) -> None:
    own = adapted(base).model.double()
    plain = copy.deepcopy(base.model).double()
    pairs = {name: module for name, module in own.named_modules() if hasattr(module, "lora_A")}
    with torch.no_grad():
        for name, module in pairs.items():
            plain.get_submodule(name).weight += 2.0 * module.lora_B["default"].weight @ module.lora_A["default"].weight
    for model in (own, plain):
        read = read_tokens(model, batch.rollouts, 4, "shadow", 1.0)
        (read.logprobs * torch.linspace(-1, 1, len(read.logprobs))).sum().backward()
    assert len(pairs) == 14
    for name, module in pairs.items():
        whole, (a, b) = plain.get_submodule(name).weight.grad, (module.lora_A["default"], module.lora_B["default"])
        torch.testing.assert_close(a.weight.grad, 2.0 * b.weight.T @ whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(b.weight.grad, 2.0 * whole @ a.weight.T, rtol=1e-6, atol=1e-6)
        assert module.base_layer.weight.grad is None


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "play", play_for_parity)


def stopped(train: Callable[[Path, Any], Path], whole: Path) -> tuple[Path, Path]:
    """A run that nothing disturbed, and what a kill after its first step left, gone on with."""

    def keep(done: int, _: int, __: Any) -> None:
        if done == 1:
            shutil.copytree(whole, whole.with_name("killed"))

    return train(whole, keep), train(whole.with_name("killed"), silent)


@PEFT_ASKS_BY_AN_OLD_NAME
def test_an_adapter_is_trained_resumed_and_read_as_any_checkpoint(
    base: LoadedModel, tmp_path: Path, graded: None
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    before = copy.deepcopy(base.model.state_dict())
    settings = short(steps=2, save_every=1, adapter=ADAPTER, beta=0.1)
    whole, killed = stopped(lambda out, told: grpo.train(settings, base, out, told), tmp_path / "smd")
    assert rows(whole) == rows(killed)
    assert rows(whole)[1]["kl_ref"] > 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert sha256(whole / name) == sha256(killed / name)
    assert not (whole / "model.safetensors").exists()
    assert all(torch.equal(weight, before[name]) for name, weight in base.model.state_dict().items())
    assert all(weight.requires_grad for weight in base.model.parameters())
    found = load_comparable(str(whole), base, dtype="float32", device="cpu")
    assert found.sha256 == json.loads((whole / "provenance.json").read_text())["sha256"]
    rollouts = load_ledgers(whole / "ledgers" / "final.safetensors")[0]
    with torch.no_grad():
        replayed = read_tokens(found.model, rollouts, 4, "shadow", 1.0).logprobs
    recorded = torch.cat([rollout.sampler_logprobs[rollout.sampled] for rollout in rollouts])
    torch.testing.assert_close(replayed, recorded, rtol=0, atol=1e-4)
    (whole / "adapter_model.safetensors").write_bytes(b"0")
    with pytest.raises(DataError, match=r"adapter_model\.safetensors has sha256"):
        load_comparable(str(whole), base, dtype="float32", device="cpu")


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["whole", "adapter"])
@PEFT_ASKS_BY_AN_OLD_NAME
def test_a_warm_start_is_resumed_with_the_same_bits_and_lowers_its_loss(
    adapter: dict[str, int] | None, base: LoadedModel, tmp_path: Path
) -> None:
    sft = {"steps": 3, "learning_rate": 1e-2, "prompts_per_step": 2, "warmup_steps": 0}
    asked = {"suites": ["agent"], "context_tokens": 400, "save_every": 1, "sft": sft, "adapter": adapter}
    start = StartConfig.of(TrainSpec(arms=["smd"], seeds=[1], policy="none", **asked), 1)
    whole, killed = stopped(lambda out, told: warm_start(start, base, out, told), tmp_path / "base")
    assert rows(whole) == rows(killed)
    first, _, last = rows(whole)
    assert last["loss"] < first["loss"]
    name = "model.safetensors" if adapter is None else "adapter_model.safetensors"
    assert sha256(whole / name) == sha256(killed / name)
    digest = json.loads((whole / "provenance.json").read_text())["sha256"]
    assert load_comparable(str(whole), base, dtype="float32", device="cpu").sha256 == digest
    if adapter is not None:
        going_on = load_trained_adapter(base, AdapterSpec(**adapter), whole)
        assert going_on.sha256 == digest
        assert all(torch.equal(load_file(whole / name)[key], w) for key, w in adapter_weights(going_on.model).items())


def test_gold_answers_are_shown_as_the_model_would_give_them(base: LoadedModel) -> None:
    suite = SUITES.get("agent")()
    (item,) = suite.items("train", 1, 1, 500, base.chat.count_tokens)
    found = gold_rollout(base, suite, item)
    drawn = found.ids[found.sampled].tolist()
    assert len(suite.gold(item)) > 1
    assert base.chat.text(drawn) == "<|im_end|>".join(suite.gold(item))
    assert drawn[-1] == base.chat.tokenizer.eos_token_id
    assert tuple(found.ids[: found.prompt_length].tolist()) == base.chat.prompt(item.messages).ids


def test_checkpointed_layers_have_the_same_gradient_to_the_bit(base: LoadedModel, batch: Batch) -> None:
    found = []
    for checkpointing in (False, True):
        model = trainable_copy(base, None, 1, checkpointing=checkpointing).model
        read = read_tokens(model, batch.rollouts, 4, "shadow", 1.0)
        (read.logprobs * torch.linspace(-1, 1, len(read.logprobs))).sum().backward()
        found.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_group_split_into_single_rollouts_has_the_gradient_of_the_whole(base: LoadedModel, batch: Batch) -> None:
    whole, split = (gradients(base, batch, arm="smd-distill", microbatch_tokens=limit) for limit in (10**6, 1))
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_critic_values_the_answers_of_a_split_group_as_those_of_the_whole(base: LoadedModel, batch: Batch) -> None:
    found = []
    for limit in (10**6, 1):
        learner = Learner(base.model, short(loss="ppo", microbatch_tokens=limit), None)
        learner.load(learner.tensors() | {"critic/weight/weight": torch.ones(1, 32)}, 0)
        found.append(learner.read_old_policy(batch, microbatches(batch.rollouts, batch.group, limit)).values)
    assert found[0].abs().max() > 0.1
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_no_ratio_is_clipped_in_bfloat16_where_no_weight_has_moved(base: LoadedModel, batch: Batch) -> None:
    settings = short(loss="gspo", prompts_per_step=3, minibatches=3, microbatch_tokens=10**6, learning_rate=1e-12)
    model = copy.deepcopy(base.model).to(torch.bfloat16)
    learned = grpo.learn(Learner(model, settings, None), batch, step=0, max_tokens=40)
    assert learned.advantages.abs().max() > 0.5
    assert learned.metrics["clipped"] == 0.0


def test_a_loss_that_compares_a_groups_rollouts_keeps_it_whole(batch: Batch) -> None:
    steps = {name: gradient_steps(batch, short(loss=name, microbatch_tokens=1), 0) for name in ("grpo", "online-dpo")}
    sizes = {name: [len(rows) for rows in step.microbatches] for name, (step,) in steps.items()}
    assert sizes == {"grpo": [1] * 12, "online-dpo": [4] * 3}


def test_rollouts_of_a_group_at_a_time_are_those_of_all_at_once(
    base: LoadedModel, tmp_path: Path, graded: None
) -> None:
    found = []
    for most in (0, 5):
        out = grpo.train(short(steps=1, ledger_every=1, rollout_rows=most), base, tmp_path / str(most), silent)
        found.append(load_ledgers(out / "ledgers" / "step-1.safetensors")[0])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.evicted_at, other.evicted_at)


def test_an_adapter_for_layers_that_the_model_lacks_is_refused(base: LoadedModel) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    with pytest.raises(
        SpecError, match="has 'c_attn', which is not a linear layer of the model; known: down_proj, gate_proj"
    ):
        check_adapter(base.model, AdapterSpec(targets=("q_proj", "c_attn")))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2))  # its layers are convolutions
    with pytest.raises(SpecError, match="has no linear layers, which an adapter needs; remove"):
        check_adapter(gpt2, AdapterSpec())


def test_a_group_that_is_cut_in_rollouts_is_refused() -> None:
    with pytest.raises(SpecError, match="'rollout_rows' is 3, wanted 0, or 4 or more"):
        short(rollout_rows=3)


def test_fields_for_real_sizes_leave_the_hash_of_older_runs_alone() -> None:
    assert not {"sft", "adapter", "gradient_checkpointing", "rollout_rows"} & set(short().to_json())
    assert short(adapter=ADAPTER).hash != short().hash


def section(**options: Any) -> TrainSpec:
    return TrainSpec(**{"arms": ["smd"], "seeds": [1], "policy": "none", "suites": ["refusal"], **options})


def test_what_a_pass_keeps_is_estimated_from_below_and_not_far(base: LoadedModel, batch: Batch) -> None:
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        read_tokens(base.model, batch.rollouts, 4, "shadow", 1.0)
    prompt = max(rollout.prompt_length for rollout in batch.rollouts)
    asked = section(context_tokens=prompt, prompts_per_step=6, group=4)  # three prompts in each half
    answer = max(len(rollout.ids) - rollout.prompt_length for rollout in batch.rollouts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SUITES.get("refusal"), "max_new_tokens", answer)
        estimate = estimate_memory(asked, base)[2].size
    assert 0.4 * sum(sizes.values()) < estimate < sum(sizes.values()), (estimate, sum(sizes.values()))


def test_rollouts_fill_the_cache_only_as_far_as_a_step_has_rows(base: LoadedModel) -> None:
    whole, more, half = (
        estimate_memory(section(arms=["dense"], prompts_per_step=8, group=4, rollout_rows=rows), base)[1].size
        for rows in (0, 4096, 16)
    )
    assert whole == more == 2 * half > 0


def test_rollouts_of_an_engine_fill_no_cache_of_ours(base: LoadedModel) -> None:
    drawn = TrainSpec(arms=["dense"], seeds=[1], suites=["refusal"], rollouts="openvino")
    assert estimate_memory(drawn, base)[1].size == 0


def test_a_share_of_the_prompts_keeps_its_share(base: LoadedModel) -> None:
    whole, quarter = (
        estimate_memory(section(prompts_per_step=16, minibatches=parts), base)[2].size for parts in (1, 4)
    )
    assert quarter * 4 == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.max": "5000\n",
            "memory.current": "4500\n",
            "memory.stat": "anon 9\ninactive_file 100\nactive_file 50\n",
        },
        {
            "memory.limit_in_bytes": "5000\n",
            "memory.usage_in_bytes": "4500\n",
            "memory.stat": "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n",
        },
    ],
)
def test_the_limit_of_a_container_is_all_that_is_free(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/cgroup").exists():
        pytest.skip("this system has no control groups")
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    before, whole = memory.free_bytes(torch.device("cpu")), memory.total_bytes()
    for folder in (tmp_path, tmp_path / "memory"):  # of either version
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    assert before > memory.free_bytes(torch.device("cpu")) == 650
    assert whole > memory.total_bytes() == 5000


def test_a_run_that_has_nothing_left_to_train_needs_no_memory_for_it(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "free_bytes", lambda _: 1000)
    spec = RunSpec.model_validate(
        {
            "name": "small",
            "model": str(tiny_folder),
            "train": {"arms": ["dense"], "seeds": [1], "policy": "none", "suites": ["refusal"], "context_tokens": 500},
            "evaluate": {"policies": ["none"], "suites": {"refusal": {"items": 12}}, "context_tokens": [500]},
            "gate": {"reference": "dense"},
        },
        context=NAMES,
    )
    with pytest.raises(RunError, match="training needs"):
        prepare_run(spec)
    prepare_run(spec, trains=False)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"gradient_checkpointing": True}, "set train.adapter"),
        ({"context_tokens": 4000, "adapter": ADAPTER, "microbatch_tokens": 9999}, "set train.gradient_checkpointing"),
        ({"arms": ["dense"], "group": 99, "context_tokens": 900, "gradient_checkpointing": True}, "rollout_rows"),
    ],
)
def test_more_memory_than_there_is_is_refused_with_what_lowers_it(
    options: dict[str, Any], remedy: str, base: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "free_bytes", lambda _: 1000)
    with pytest.raises(RunError, match=remedy):
        check_memory(
            section(**{"prompts_per_step": 1, "group": 2, "microbatch_tokens": 1, "context_tokens": 9, **options}), base
        )
