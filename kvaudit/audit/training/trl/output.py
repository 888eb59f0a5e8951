"""The output folder of an audited trainer of TRL: what it is of, its telemetry, and at its end a checkpoint of ours.

training.json       arm, policy, settings and base weights; who resumes is held to them
telemetry.jsonl     one row per optimiser step
recipe.json         what training began from, as docs/recipe.schema.json describes it
checkpoint-N/       TRL's own, by which it resumes
ledgers/final.safetensors    rollouts of the finished weights, where our cache sampled and they can be replayed
config.json, model.safetensors, tokenizer files (of LoRA the adapter's), provenance.json    in the end, provenance last
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from kvaudit.audit.cache.attention import inner_model
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.policies import Policy
from kvaudit.audit.sampling.checkpoints import adapter_sha256, is_adapter
from kvaudit.audit.sampling.weights import INDEX, SINGLE, file_sha256, weights_sha256
from kvaudit.audit.training.checkpoint import CLAIM, FINAL_LEDGER, FORMAT, Position, write_provenance, write_ledgers
from kvaudit.audit.training.files import TELEMETRY, TelemetryLog, guarded, move_into
from kvaudit.core.alarms import alarm_numbers
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.plugins import sha256_of
from kvaudit.core.provenance import PROVENANCE
from kvaudit.core.provenance import RECIPE, seal_recipe

# settings of TRL that decide what is learnt; paths, logging and keys of services are none
LEARNING_SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs", "optim"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "bf16", "fp16", "shuffle_dataset"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"),
    *("num_generations", "max_completion_length", "temperature", "mask_truncated_completions", "disable_dropout"),
    *("loss_type", "beta", "epsilon", "epsilon_high", "delta", "scale_rewards", "importance_sampling_level"),
    *("reward_weights", "multi_objective_aggregation"),
    *("off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef", "use_vllm", "vllm_mode"),
)
_LEFT = (".bin", ".md")  # pickles and cards that are saved beside a model: no part of it


class TrainingResult(NamedTuple):
    """What a run came to."""

    steps: int
    disclosed: Mapping[str, Any]  # what a reader of the checkpoint has to know
    policy: Policy | None
    rollouts: Sequence[Rollout]  # of the finished weights, perhaps none


class OutputFolder:
    """The folder, in the process that writes; the others have none. Construction writes nothing."""

    def __init__(self, path: Path, config: Mapping[str, Any], base_sha256: str) -> None:
        self.path, self.telemetry = path, TelemetryLog(path / TELEMETRY)
        self._claim: dict[str, Any] = {
            "format": FORMAT,
            "config": dict(config),
            "config_hash": sha256_of(config)[:12],
            "base_sha256": base_sha256,
        }
        self._first: Mapping[str, Any] | None = None  # row of telemetry

    def begin(self, done: int, sections: Mapping[str, Any]) -> None:
        """Start, or go on after ``done`` steps; ``sections`` are those of the recipe.

        Raises RunError for a folder of another run, or of this one unless it is resumed, and DataError where telemetry
        lacks a step that is done.
        """
        with guarded(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / CLAIM).exists():
            self._check_claim(read_json(self.path / CLAIM))
        if not done and self.telemetry.size:
            raise RunError(
                f"folder {str(self.path)!r} holds {self.telemetry.count} steps of this run; go on with "
                "train(resume_from_checkpoint=True), give another output_dir, or delete it"
            )
        # a kill may have come between a saved state and later rows, and have left half of a line
        lines = self.telemetry.path.read_bytes().splitlines(keepends=True) if self.telemetry.size else []
        self.telemetry.truncate(sum(map(len, [line for line in lines if line.endswith(b"\n")][:done])))
        self.telemetry.check_steps(done)
        self._first = next(iter(self.telemetry.rows()), None)
        with guarded(self.path):
            (self.path / PROVENANCE).unlink(missing_ok=True)  # the weights are about to move
            write_json(self.path / CLAIM, self._claim)
            write_json(self.path / RECIPE, seal_recipe(sections))

    def add(self, row: Mapping[str, Any]) -> dict[str, int]:
        """Write a row with its alarms; returns those."""
        self._first = self._first or row
        alarms = alarm_numbers(row, self._first)
        self.telemetry.append({**row, **alarms})
        return alarms

    def finish(self, staged: Path, done: TrainingResult, versions: Mapping[str, str]) -> None:
        """Take what was saved in ``staged`` over, and mark the folder whole; provenance.json comes last."""
        self.telemetry.check_steps(done.steps)
        files = {path.name: file_sha256(path) for path in sorted(staged.iterdir()) if path.suffix not in _LEFT}
        base = self._claim["base_sha256"]
        weights = adapter_sha256(staged, base) if is_adapter(staged) else weights_sha256(staged)
        move_into(staged, self.path)
        position = Position(done.steps, done.steps)  # every step of TRL counts as an update
        if done.policy is not None and done.rollouts:
            ledger = write_ledgers(self.path, FINAL_LEDGER, done.policy, done.rollouts)
            position = Position(done.steps, done.steps, ledgers=(ledger,))
        said = {"sha256": weights, "files": files, "versions": dict(versions)}
        write_provenance(self.path, self._claim, done.disclosed, position, said)

    def _check_claim(self, found: Mapping[str, Any]) -> None:
        theirs, ours = found.get("config"), self._claim["config"]
        if not isinstance(theirs, dict):
            raise DataError(f"{str(self.path / CLAIM)!r} does not say what it is of; give another output_dir")
        names = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
        if names or found.get("base_sha256") != self._claim["base_sha256"]:
            what = f"with another {', '.join(sorted(names))}" if names else "from other base weights"
            raise RunError(f"folder {str(self.path)!r} was trained {what}; give another output_dir, or delete it")


def settings_of(config: Any) -> dict[str, Any]:
    """What of a GRPOConfig decides what is learnt, as JSON holds it."""
    found = {name: getattr(config, name) for name in LEARNING_SETTINGS}
    return {
        name: value if isinstance(value, bool | int | float | None) else str(value) for name, value in found.items()
    }


def base_sha256(model: Any) -> str:
    """The sha256 of the weights that training begins from: of the files that they were loaded from, as every command
    names a model, or of the tensors where those are of another format or nowhere.
    """
    whole = inner_model(model)
    folder = _loaded_from(whole.config)
    if folder is not None and any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return weights_sha256(folder)
    digest = hashlib.sha256()
    # under the names that they have without an adapter
    tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in whole.state_dict().items()}
    for name, tensor in sorted(tensors.items()):
        if "lora_" in name:  # beside the weights that it begins from
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _loaded_from(config: Any) -> Path | None:
    """The folder of a model, that of the hub's cache included; None for one that was made in memory."""
    name = str(config._name_or_path)
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
    except HFValidationError:  # no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def reward_sha256(functions: Iterable[Any]) -> str:
    """What rewards follow from: the source of every function, the name of a model."""
    return sha256_of([_source(function) for function in functions])


def _source(function: Any) -> str:
    if hasattr(function, "config"):  # a model
        return str(function.config._name_or_path)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # of an object, or typed in
        return f"{type(function).__module__}.{type(function).__qualname__}"


def questions_sha256(dataset: Any) -> str:
    """The sha256 of all prompts; of a stream, of what it is called, since nobody has seen them yet."""
    rows = dataset["prompt"] if hasattr(dataset, "__len__") and "prompt" in dataset.column_names else [str(dataset)]
    return sha256_of([str(row) for row in rows])


def sections_of(
    arm: str, policy: str, model: Mapping[str, Any], reward: Mapping[str, Any], data: str, training: Mapping[str, Any]
) -> dict[str, Any]:
    """The sections of ``recipe.json``: a data set is no suite of ours, and its prompts are as long as they are."""
    training_seed = str(training["seed"])
    return {
        "model": dict(model),
        "reward": dict(reward),
        "constitution": None,
        "data": {"suites": {}, "weights": [], "context_tokens": 0, "items_sha256_by_seed": {training_seed: data}},
        "policy": {arm: policy},
        "refusal_set": {},
        "training": dict(training),
    }
