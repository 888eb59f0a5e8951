"""The audited trainer of TRL: what its learner sees, how arms weigh, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("trl", reason='the extra is not installed: pip install "kvaudit[trl]"')

from conform.policies import asked_by, one_of_each, small_policies
from transformers import AutoTokenizer
from trl_world import POLICY, config, model, questions, rows, trainer

from kvaudit.audit.policies import Policy
from kvaudit.audit.replay.learner_pass import LearnerPass
from kvaudit.audit.sampling.model import EMBEDDED, load_model, locate
from kvaudit.audit.sampling.weights import weights_sha256
from kvaudit.audit.training.corrections import CORRECTIONS
from kvaudit.audit.training.learner import read_tokens
from kvaudit.audit.training.trl import require_trl
from kvaudit.audit.training.trl.hosted import TRL_CORRECTIONS, HostedArm
from kvaudit.audit.training.trl.output import base_sha256
from kvaudit.core.errors import DataError, RunError, SpecError, UnknownName
from kvaudit.core.provenance import read_recipe, recipe_changes

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL, about what it calls experimental and names of transformers


UNLIKE = "random:budget=64,interval=1"  # entries that a row drew itself leave by its own draw


def gaps(out: Path) -> list[float]:
    return [row["mismatch/max_abs_gap"] for row in rows(out)]


def seen_by_trl(policy: Policy) -> object:
    """What a policy asks of a model, and whether a record has codes; which, the shadow pass alone knows."""
    looks, alike, record = asked_by(policy)
    return looks, alike, policy.quantises, policy.selects, None if policy.quantises else record


# the others rank by the same of a model, and are replayed alike; every third kind is enough to hand a policy over
ASKING = one_of_each(small_policies(), seen_by_trl)[::3]
EVERY = [
    pytest.param(policy.canonical, marks=[pytest.mark.slow] * (policy not in ASKING)) for policy in small_policies()
]


@pytest.mark.parametrize("policy", [*EVERY, "snapkv:budget=40,window=8+fp8:write=true"])
def test_a_learner_of_smd_sees_what_its_sampler_saw(policy: str, tmp_path: Path) -> None:
    trainer(tmp_path, "smd", policy).train()
    assert gaps(tmp_path)[0] < 2e-5
    assert rows(tmp_path)[0]["grad_norm"] > 0
    assert rows(tmp_path)[0]["shadow/max_abs_gap"] == gaps(tmp_path)[0]


class Watched(NamedTuple):
    """A folder that a run left, and the rollouts that its trainer drew, a list per call."""

    out: Path
    drawn: list[list[Any]]


def watched(out: Path, *words: Any, **options: Any) -> Watched:
    made = trainer(out, *words, **options)
    draw, drawn = made._sample, list[list[Any]]()

    def keep(prompts: list[list[int]]) -> Any:
        drawn.append(draw(prompts))
        return drawn[-1]

    made._sample = keep
    made.train()
    return Watched(out, drawn)


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watched(tmp_path_factory.mktemp("naive"), "naive")


def test_a_learner_of_naive_sees_something_else(naive: Watched) -> None:
    assert gaps(naive.out)[0] > 1.0
    assert rows(naive.out)[0]["alarm/overlap_p5"] == 1
    assert rows(naive.out)[0]["shadow/max_abs_gap"] is None


def test_rows_of_equal_tokens_are_seen_under_their_own_ledgers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt, completions that are alike, and a policy that keeps other entries in every row."""
    settings = {"num_generations": 8, "per_device_train_batch_size": 8}
    own = watched(tmp_path / "own", "smd", UNLIKE, settings, train_dataset=questions("moose"))
    kept = own.drawn[0]
    texts = [tuple(rollout.ids.tolist()) for rollout in kept]
    alike = [n for n, text in enumerate(texts) if text == max(texts, key=texts.count)]
    assert len(alike) > 1
    assert not torch.equal(*(kept[n].evicted_at for n in alike[:2]))
    assert gaps(own.out)[0] < 2e-5
    # by tokens alone one of them would stand for all
    same = trainer(tmp_path / "same", "smd", UNLIKE, settings, train_dataset=questions("moose"))
    by_tokens = {tuple(rollout.ids.tolist()): rollout for rollout in kept}
    scored = same._generate_and_score_completions

    def mixed(inputs: Any) -> Any:
        output = scored(inputs)
        return output | {"rollouts": [by_tokens[tuple(r.ids.tolist())] for r in output["rollouts"]]}

    monkeypatch.setattr(same, "_generate_and_score_completions", mixed)
    same.train()
    assert gaps(tmp_path / "same")[0] > 1e-3


def after(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one.keys() & other.keys())


def test_microbatches_checkpointing_and_the_side_of_padding_change_nothing(tmp_path: Path) -> None:
    plain = {"optim": "sgd", "learning_rate": 0.1, "loss_type": "grpo", "gradient_checkpointing": False}
    trainer(tmp_path / "whole", settings=plain).train()
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "gradient_checkpointing": True}
    right = AutoTokenizer.from_pretrained(str(locate(EMBEDDED)), padding_side="right")
    trainer(tmp_path / "parts", settings=plain | parts, processing_class=right).train()
    begun = model().state_dict()
    assert largest(begun, after(tmp_path / "whole")) > 1e-3
    assert largest(after(tmp_path / "whole"), after(tmp_path / "parts")) < 1e-5
    one, other = rows(tmp_path / "whole")[0], rows(tmp_path / "parts")[0]
    for name in ("reward_mean", "token_savings", "kv_bytes_peak", "kv_bytes_dense", "prompt_tokens_mean"):
        assert one[name] == other[name], name
    assert gaps(tmp_path / "parts")[0] < 2e-5


@pytest.mark.parametrize(("arm", "kind"), [("smd", "shadow"), ("naive", "dense")])
def test_the_gradient_is_that_of_our_own_learner(arm: str, kind: LearnerPass, tmp_path: Path) -> None:
    """Of the same rollouts, by the packed pass that shares prompts."""
    settings = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9, "loss_type": "grpo"}
    kept = watched(tmp_path, arm, settings=settings).drawn[0]
    ours = load_model()
    begun = {name: weight.detach().clone() for name, weight in ours.model.named_parameters()}
    read = read_tokens(ours.model, kept, 2, kind, 1.0)
    # rewards 0 and 1 in every group: +-.5 over their standard deviation, .7071, and TRL's 1e-4
    gain = [sign * 0.5 / (0.5**0.5 + 1e-4) for sign in (-1.0, 1.0)] * 2
    by_row = torch.split(read.logprobs, [int(rollout.sampled.sum()) for rollout in kept])
    loss = -sum(weight * row.mean() for weight, row in zip(gain, by_row, strict=True)) / 4
    loss.backward()
    moved, largest_gradient = after(tmp_path), 0.0
    for name, weight in ours.model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(begun[name] - moved[name], weight.grad, rtol=1e-3, atol=1e-5)
        largest_gradient = max(largest_gradient, float(weight.grad.abs().max()))
    assert largest_gradient > 0.1


def test_a_batch_is_learnt_from_several_times_under_its_ledgers(tmp_path: Path) -> None:
    settings = {"num_iterations": 2, "max_steps": 4, "beta": 0.01, "steps_per_generation": 2, "temperature": 0.7}
    trainer(tmp_path, settings=settings | {"per_device_train_batch_size": 2}).train()
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    # old log-probs are those of the weights that sampled, in later passes too
    assert max(gaps(tmp_path)) < 2e-5
    assert found[1]["kl_ref"] > 0
    assert found[2]["reward_mean"] == found[0]["reward_mean"] == 0.5


def test_an_evaluation_between_two_passes_leaves_the_batch_its_ledgers(tmp_path: Path) -> None:
    settings = {"num_iterations": 2, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    made = trainer(tmp_path, settings=settings | {"per_device_eval_batch_size": 2}, eval_dataset=questions("viper"))
    made.train()
    assert max(gaps(tmp_path)) < 2e-5
    assert any("eval_reward" in row for row in made.state.log_history)


def test_a_mixture_of_policies_is_sampled_where_nothing_is_replayed(tmp_path: Path) -> None:
    trainer(tmp_path, "naive", "snapkv:budget=24,window=8|none").train()
    assert 0 < rows(tmp_path)[0]["token_savings"] < 0.5
    told = json.loads((tmp_path / "provenance.json").read_text())
    assert told["recipe"]["rollouts"].endswith("|none")
    assert told["ledgers"] == {}


def test_two_arms_meet_the_same_questions_and_the_same_numbers(naive: Watched, tmp_path: Path) -> None:
    """Until a weight has moved they draw the same tokens; the recipe differs in the policy alone."""
    other = watched(tmp_path, "tis")
    one, two = ([rollout.ids.tolist() for rollout in run.drawn[0]] for run in (naive, other))
    assert one == two
    changed = list(recipe_changes(read_recipe(naive.out), read_recipe(other.out)))
    assert {change.section for change in changed} == {"policy"}


def test_an_adapter_is_trained_under_the_ledger_and_left_as_one(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from kvaudit.audit.sampling.checkpoints import load_comparable

    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer(tmp_path, settings={"learning_rate": 0.1, "beta": 0.01}, peft_config=lora).train()
    assert gaps(tmp_path)[0] < 2e-5
    base = load_model()
    found = load_comparable(str(tmp_path), base, dtype="float32", device="cpu")
    told = json.loads((tmp_path / "provenance.json").read_text())
    assert told["base_sha256"] == base.sha256
    assert found.sha256 == told["sha256"]
    assert told["config"]["adapter"] == {"rank": 2, "alpha": 8}
    assert largest(base.model.state_dict(), found.model.state_dict()) > 1e-3


def test_a_resumed_run_has_the_telemetry_and_the_weights_of_one_that_went_through(tmp_path: Path) -> None:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    # one epoch, since TRL shuffles later ones otherwise once it has been resumed
    asked = questions("moose", "otter", "heron", "lynx", "viper", "camel", "goose", "tiger")
    trainer(tmp_path / "through", settings=settings, train_dataset=asked).train()
    broken = trainer(tmp_path / "broken", settings=settings, train_dataset=asked)
    # a kill in the third step, which left half of its row
    killed = RuntimeError("killed")
    add = broken._write_row

    def write(grad_norm: float | None) -> None:
        if broken.state.global_step == 3:
            with (tmp_path / "broken" / "telemetry.jsonl").open("a") as file:
                file.write('{"step": 3, "rew')
            raise killed
        add(grad_norm)

    broken._write_row = write
    with pytest.raises(RuntimeError, match="killed"):
        broken.train()
    with pytest.raises(RunError, match="already has 2 steps of this run; resume with"):
        trainer(tmp_path / "broken", settings=settings, train_dataset=asked).train()
    with pytest.raises(RunError, match="was trained with another arm"):
        trainer(tmp_path / "broken", "naive", settings=settings, train_dataset=asked).train(resume_from_checkpoint=True)
    telemetry = tmp_path / "broken" / "telemetry.jsonl"
    left = telemetry.read_text()
    telemetry.write_text(left.partition("\n")[2])
    with pytest.raises(DataError, match="has step 2 where step 1 is expected"):
        trainer(tmp_path / "broken", settings=settings, train_dataset=asked).train(resume_from_checkpoint=True)
    telemetry.write_text(left)
    trainer(tmp_path / "broken", settings=settings, train_dataset=asked).train(resume_from_checkpoint=True)
    assert rows(tmp_path / "broken") == rows(tmp_path / "through")
    assert largest(after(tmp_path / "broken"), after(tmp_path / "through")) == 0


# --- how arms weigh --------------------------------------------------------------------------------------------------

LEARNER = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -0.2]])
SAMPLER = torch.tensor([[-2.0, -1.0, -0.5], [-0.1, -0.4, float("nan")]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 1]])
# rho = e, 1/e, 1; e^-2.9 = .055, e^.3 = 1.35, and 1 where vLLM could not score
WEIGHTS = {
    "tis": [[2.0, 0.367879, 1.0], [0.055023, 1.349859, 1.0]],
    "mis": [[2.718282, 0.0, 1.0], [0.0, 1.349859, 1.0]],
    "sparse-rl": [[0.0, 0.0, 0.895557], [0.0, 1.208886, 0.895557]],
    "sparse-rl-text": [[1.5, 0.367879, 1.0], [0.055023, 1.349859, 1.0]],
    "naive-ratio": [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer that was made and never trained."""
    return trainer(tmp_path_factory.mktemp("untrained"))


@pytest.fixture
def of_arm(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The same for another arm, which is chosen when a trainer is made."""

    def chosen(arm: str) -> Any:
        monkeypatch.setattr(untrained, "_hosted", HostedArm.of(arm, POLICY, None))
        return untrained

    return chosen


def batch(**more: Tensor) -> dict[str, Any]:
    ids = torch.ones(2, 3, dtype=torch.int64)
    made = {"prompt_ids": ids, "prompt_mask": MASK, "completion_ids": ids, "completion_mask": MASK}
    given = {"advantages": torch.tensor([1.0, -1.0]), "old_per_token_logps": LEARNER}
    return made | given | {"sampling_per_token_logps": SAMPLER} | more


@pytest.mark.parametrize("arm", WEIGHTS)
def test_an_arm_weighs_every_token_by_its_correction(arm: str, of_arm: Callable[[str], Any]) -> None:
    made = batch()
    of_arm(arm)._apply_correction(made)
    wanted = torch.tensor(WEIGHTS[arm]) * torch.tensor([[1.0], [-1.0]])
    torch.testing.assert_close(made["advantages"].broadcast_to(2, 3), wanted, rtol=0, atol=1e-5)
    old = torch.where(SAMPLER.isnan(), LEARNER, SAMPLER) if arm == "naive-ratio" else LEARNER
    torch.testing.assert_close(made["old_per_token_logps"], old, rtol=0, atol=0)


@pytest.mark.parametrize("arm", ["naive", "smd"])
def test_an_arm_without_a_correction_leaves_the_batch_as_it_is(arm: str, of_arm: Callable[[str], Any]) -> None:
    made = batch()
    assert of_arm(arm)._apply_correction(made) == {
        "mismatch/masked_tokens": 0,
        "mismatch/rejected_sequences": 0,
    }
    assert made.keys() == batch().keys()
    assert made["advantages"].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("arm", TRL_CORRECTIONS)
def test_where_vllm_samples_trl_weighs_as_the_arm_does(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seam of TRL's own vLLM modes, with a stand-in for what they ask: the same step as by our own correction."""
    import trl.trainer.grpo_trainer as host

    def drawn(prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        ids = [[7 + row, 9, 11 + row] for row in range(len(prompts))]
        return ids, [[-0.01 - row, -9.0, -3.0] for row in range(len(prompts))]

    class Stand:
        synced = 0

        def __init__(self, **_: Any) -> None:
            pass

        def sync_weights(self) -> None:
            Stand.synced += 1

        def generate(self, prompts: list[list[int]], **_: Any) -> Any:
            ids, logprobs = drawn(prompts)
            return None, ids, [[[value] for value in row] for row in logprobs], None

    monkeypatch.setattr(host, "VLLMGeneration", Stand)
    settings = {"optim": "sgd", "learning_rate": 0.1}
    told = {"use_vllm": True, "vllm_mode": "colocate"}
    served = trainer(tmp_path / "vllm", arm, "vllm:kv_cache_dtype=fp8", settings | told)
    seen: list[Tensor] = []
    scored = served._generate_and_score_completions

    def look(inputs: Any) -> Any:
        output = scored(inputs)
        weights = output["importance_sampling_ratio"]
        mask = output["completion_mask"].bool()
        ours = CORRECTIONS[arm](output["old_per_token_logps"], output["sampling_per_token_logps"], mask).weights
        seen.extend([weights * mask, ours])
        return output

    monkeypatch.setattr(served, "_generate_and_score_completions", look)
    served.train()
    assert Stand.synced == 1
    assert len(set(seen[0].flatten().tolist())) > 2
    torch.testing.assert_close(*seen)

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        given = [trainer.processing_class.apply_chat_template(p, add_generation_prompt=True) for p in prompts]
        given = [ids if isinstance(ids, list) else ids["input_ids"] for ids in given]
        return {"prompt_ids": given, **dict(zip(("completion_ids", "logprobs"), drawn(given), strict=True))}

    trainer(tmp_path / "function", arm, "a server", settings, rollout_func=rollouts).train()
    assert largest(model().state_dict(), after(tmp_path / "vllm")) > 1e-4
    assert largest(after(tmp_path / "function"), after(tmp_path / "vllm")) < 1e-6
    one, other = rows(tmp_path / "function")[0], rows(tmp_path / "vllm")[0]
    assert one["mismatch/k3_kl"] == pytest.approx(other["mismatch/k3_kl"], rel=1e-5)
    assert one["mismatch/masked_tokens"] == other["mismatch/masked_tokens"]
    told = json.loads((tmp_path / "vllm" / "provenance.json").read_text())
    assert told["recipe"]["rollouts"] == "vllm:kv_cache_dtype=fp8"
    assert told["ledgers"] == {}


# --- two processes ---------------------------------------------------------------------------------------------------

LAUNCHED = """
import sys
from pathlib import Path
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from trl_world import trainer
settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "loss_type": "grpo"}
settings["per_device_train_batch_size"] = int(sys.argv[3])
set_up = AcceleratorState.__init__

def with_fsdp(self, *args, fsdp_plugin=None, **options):
    set_up(self, *args, fsdp_plugin=fsdp_plugin, **options)
    self.fsdp_plugin = fsdp_plugin or getattr(self, "fsdp_plugin", None)
    if self.fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP

AcceleratorState.__init__ = with_fsdp  # accelerate shards on GPUs alone; torch does on CPUs too
trained = trainer(Path(sys.argv[1]), sys.argv[2], settings=settings)
trained.train()
print(type(next(trained.model.parameters())).__name__)
"""
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "sharding"), [("smd", {}), ("smd", SHARDED), ("sparse-rl-text", {}), ("sparse-rl-text", SHARDED)]
)
def test_two_processes_learn_what_one_does(arm: str, sharding: dict[str, str], tmp_path: Path) -> None:
    """Of unlike prompts, and with weights that both hold or FSDP2 shards."""
    (tmp_path / "script.py").write_text(LAUNCHED)
    root = Path(__file__).parent
    path = os.pathsep.join([str(root), str(root.parent)])
    # without a GPU --multi_gpu only starts processes, and --cpu starts one; the script says that there is none
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    launch = [sys.executable, "-W", "ignore", "-m", *launch]
    one_process = [sys.executable, "-W", "ignore"]
    for words, name, size, more in ((one_process, "one", 4, {}), (launch, "two", 2, sharding)):
        done = subprocess.run(
            [*words, str(tmp_path / "script.py"), str(tmp_path / name), arm, str(size)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert ("DTensor" in done.stdout) == bool(more)
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert json.loads((tmp_path / "two" / "provenance.json").read_text())["config"]["processes"] == 2
    for name in ("reward_mean", "kv_bytes_dense", "prompt_tokens_mean", "frac_truncated"):
        assert [row[name] for row in one] == [row[name] for row in two], name
    assert two[0]["mismatch/k3_kl"] == pytest.approx(one[0]["mismatch/k3_kl"], rel=1e-4, abs=1e-9)
    assert two[0]["mismatch/masked_tokens"] == one[0]["mismatch/masked_tokens"]
    assert largest(model().state_dict(), after(tmp_path / "one")) > 1e-3
    again = subprocess.run(
        [*launch, str(tmp_path / "script.py"), str(tmp_path / "two"), arm, "2"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **sharding},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode != 0
    assert "already has 2 steps of this run; resume with" in again.stderr
    assert largest(after(tmp_path / "one"), after(tmp_path / "two")) < 1e-5


# --- what training begins from ---------------------------------------------------------------------------------------


def test_weights_are_named_by_the_files_that_they_were_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = locate(EMBEDDED), model()
    assert base_sha256(made) == weights_sha256(folder)
    made.config._name_or_path = "us/model"
    in_memory = base_sha256(made)
    assert in_memory != weights_sha256(folder)
    asked: list[str] = []

    def cached(name: str, file: str, revision: str | None) -> str:
        asked.append(f"{name} {file} {revision}")
        return str(folder / file)

    monkeypatch.setattr("kvaudit.audit.training.trl.output.try_to_load_from_cache", cached)
    assert base_sha256(made) == weights_sha256(folder)
    assert asked == ["us/model config.json None"]
    made.config._name_or_path = ""
    assert base_sha256(made) == in_memory
    with torch.no_grad():
        made.get_input_embeddings().weight[0, 0] += 1
    assert base_sha256(made) != in_memory
    made.register_buffer("scale", torch.tensor(1.0))
    with_scalar = base_sha256(made)
    made.scale += 1
    assert base_sha256(made) != with_scalar


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "policy", "settings", "error", "words"),
    [
        ("smb", POLICY, {}, UnknownName, "unknown arm 'smb'. Did you mean 'smd'"),
        ("smd", "snapkw:budget=8", {}, UnknownName, "Did you mean 'snapkv'"),
        ("smd", None, {}, SpecError, "arm 'smd' samples under a policy; give one"),
        ("smd", "snapkv:budget=48|none", {}, SpecError, "leaves no ledger that the learner could replay"),
        ("smd", "streaming:budget=48,reposition=true", {}, SpecError, "leaves no ledger that the learner could replay"),
        ("smd", "snapkv:budget=48,pin=system", {}, SpecError, "pins roles"),
        ("smd-distill", POLICY, {}, SpecError, "TRL's loss has the sampled tokens only"),
        ("smd", None, {"use_vllm": True}, SpecError, "but vLLM samples and leaves none; use arm 'tis'"),
        ("tis", POLICY, {"use_vllm": True}, SpecError, "but vLLM samples; describe how vLLM was started"),
        ("tis", POLICY, {"top_p": 0.9}, SpecError, "top_p=0.9, but the learner's log-probs are of the full"),
        ("tis", POLICY, {"generation_kwargs": {"top_p": 0.9}}, SpecError, "so kvaudit's cache must sample from it too"),
        ("tis", POLICY, {"loss_type": "vespo"}, SpecError, "weights rollouts by its own ratio"),
    ],
)
def test_a_combination_that_cannot_be_trained_is_one_line(
    arm: str, policy: str | None, settings: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        trainer(tmp_path, arm, policy, settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_arm_is_not_contradicted_by_trls_own_correction() -> None:
    plan = HostedArm.of("tis", None, "vLLM")
    given = config(Path("out"), use_vllm=True, vllm_importance_sampling_clip_max=9.0)
    with pytest.raises(SpecError, match=r"clip_max=9\.0, arm 'tis' needs 2\.0; remove it"):
        plan.apply_settings(given)


@pytest.mark.parametrize("outside", ["vLLM", "rollout_func"])
@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.3}])
def test_an_external_sampler_that_cuts_the_distribution_is_refused(outside: str, cut: dict[str, Any]) -> None:
    plan = HostedArm.of("tis", None, outside)
    whole = config(Path("out"), use_vllm=outside == "vLLM")
    plan.apply_settings(whole)
    (name,) = cut
    setattr(whole, name, cut[name])
    with pytest.raises(SpecError, match=f"has {name}=.* so {outside} must sample from it too; remove {name}"):
        plan.apply_settings(whole)


def test_tools_are_refused(tmp_path: Path) -> None:
    def clock() -> str:
        """Tell the time.

        Returns:
            The time.
        """
        return "now"

    with pytest.raises((SpecError, ValueError), match=r"several turns|tool calling"):
        trainer(tmp_path, tools=[clock])


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        (None, "rollout_func returned no log-probs, and every arm needs one per token"),
        ([[-1.0, -2.0], [-1.0], [-1.0, -2.0], [-1.0, -2.0]], "returned 1 log-probs for the 2 tokens of rollout 1"),
        (
            [[-1.0, None], [-1.0, 0.7], [-1.0, -2.0], [-1.0, -2.0]],
            "returned log-prob 0.7 in rollout 1, wanted at most 0",
        ),
    ],
)
def test_a_sampler_without_log_probs_is_one_line(logprobs: Any, words: str, tmp_path: Path) -> None:
    def rollouts(prompts: list[Any], _: Any) -> dict[str, Any]:
        return {"prompt_ids": [[5, 6]] * len(prompts), "completion_ids": [[7, 8]] * 4, "logprobs": logprobs}

    with pytest.raises(DataError) as caught:
        trainer(tmp_path, "naive", None, rollout_func=rollouts).train()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("deepspeed", "version", "state_dict", "words"),
    [
        (True, None, "", "cannot read weights that DeepSpeed or FSDP version 1 shards"),
        (False, 1, "FULL_STATE_DICT", r"launch with FSDP version 2 \(fsdp_version: 2\)"),
        (False, 2, "SHARDED_STATE_DICT", "fsdp_state_dict_type is not FULL_STATE_DICT, so no checkpoint would be"),
    ],
)
def test_sharding_that_our_cache_cannot_sample_from_is_refused(
    deepspeed: bool, version: int | None, state_dict: str, words: str, untrained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = untrained
    monkeypatch.setattr(made, "is_deepspeed_enabled", deepspeed)
    if version:
        plugin = SimpleNamespace(fsdp_version=version, state_dict_type=state_dict)
        monkeypatch.setattr(made, "is_fsdp_enabled", True)
        monkeypatch.setattr(made.accelerator, "state", SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(SpecError, match=words):
        made._check_host()


@pytest.mark.parametrize("found", ["1.15.2", "1.17.0", "2.0", "1.160.0"])
def test_another_trl_is_one_line(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.audit.training.trl.metadata.version", lambda _: found)
    with pytest.raises(RunError, match=rf"supports TRL 1\.16, installed is {found}: pip install") as caught:
        require_trl()
    assert "\n" not in str(caught.value)


def test_without_trl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("kvaudit.audit.training.trl.metadata.version", missing)
    with pytest.raises(RunError, match=r"which is not installed: pip install 'trl==1\.16\.\*'"):
        require_trl()


def test_the_module_loads_nothing_until_its_name_is_used() -> None:
    code = "import sys, kvaudit.trl; print(sorted({'torch', 'trl', 'transformers', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
