"""The output folder of an audited TRL trainer: its claim, its telemetry, and finally a kvaudit checkpoint.

training.json       the claim: arm, policy, settings and base weights, which a resumed run must match
telemetry.jsonl     one row per optimiser step
recipe.json         what training started from (docs/recipe.schema.json)
checkpoint-N/       TRL's own state, from which it resumes
ledgers/final.safetensors    rollouts of the finished weights, if our cache sampled and they can be replayed
config.json, model.safetensors, tokenizer files (LoRA: the adapter's), provenance.json    at the end, provenance last
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor

from kvaudit.audit.cache.attention import inner_model
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.policies import Policy
from kvaudit.audit.sampling.checkpoints import adapter_sha256, is_adapter
from kvaudit.audit.sampling.weights import INDEX, SINGLE, file_sha256, weights_sha256
from kvaudit.audit.training.checkpoint import (
    CLAIM,
    FINAL_LEDGER,
    FORMAT,
    TELEMETRY,
    Position,
    TelemetryLog,
    claim_difference,
    guarded,
    move_into,
    write_ledgers,
    write_provenance,
)
from kvaudit.audit.training.mismatch import MismatchPanel
from kvaudit.audit.training.optimiser import HALF_METRICS
from kvaudit.audit.training.telemetry import CERTIFICATE, TelemetryRow, entries_seen
from kvaudit.core.alarms import alarm_numbers
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.plugins import sha256_of
from kvaudit.core.provenance import PROVENANCE, RECIPE, seal_recipe

# the settings of TRL that affect what is learned; not paths, logging or service keys
LEARNING_SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs", "optim"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "bf16", "fp16", "shuffle_dataset"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"),
    *("num_generations", "max_completion_length", "temperature", "mask_truncated_completions", "disable_dropout"),
    *("loss_type", "beta", "epsilon", "epsilon_high", "delta", "scale_rewards", "importance_sampling_level"),
    *("reward_weights", "multi_objective_aggregation"),
    *("off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef", "use_vllm", "vllm_mode"),
)
_NOT_MODEL = (".bin", ".md")  # pickles and cards that are saved with a model

# TRL's metric -> ours, of a batch of rollouts and of a microbatch
SAMPLED = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "completions/clipped_ratio": "frac_truncated",
    "completions/mean_length": "length_mean",
}
LEARNED = {"entropy": "entropy", "clip_ratio/region_mean": "clip_fraction", "kl": "kl_ref"}
_ABSENT = (*HALF_METRICS, "frac_degenerate", "distill_kl", "value_loss")  # measured by our own trainer only
COUNTS = ("tokens", "kept", "dense", "peak", "dense_bytes", "prompt", "rows")


class TrainingResult(NamedTuple):
    """The result of a training run: its number of steps, how it was trained (recipe), rollouts of the final weights."""

    steps: int
    recipe: Mapping[str, Any]  # how the checkpoint was trained, for provenance.json
    policy: Policy | None
    rollouts: Sequence[Rollout]  # of the finished weights, possibly none


class OutputFolder:
    """The output folder of one training run, used by the one process that writes it; the constructor writes nothing."""

    def __init__(self, path: Path, config: Mapping[str, Any], base_sha256: str) -> None:
        self.path, self.telemetry = path, TelemetryLog(path / TELEMETRY)
        self._claim: dict[str, Any] = {
            "format": FORMAT,
            "config": dict(config),
            "config_hash": sha256_of(config)[:12],
            "base_sha256": base_sha256,
        }
        self._first_row: Mapping[str, Any] | None = None

    def begin(self, done: int, sections: Mapping[str, Any]) -> None:
        """Reserve the folder for this run, to start it or to resume it after ``done`` steps.

        The claim (training.json) is checked if there is one, and written. ``sections`` are the contents of
        ``recipe.json``. Raises RunError if the folder belongs to another run, or to this run and it is not resumed.
        Raises DataError if telemetry of finished steps is missing.
        """
        with guarded(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / CLAIM).exists():
            self._check_claim(read_json(self.path / CLAIM))
        if not done and self.telemetry.size:
            raise RunError(
                f"folder {str(self.path)!r} already has {self.telemetry.count} steps of this run; resume with "
                "train(resume_from_checkpoint=True), give another output_dir, or delete it"
            )
        # a kill may leave rows after the saved state, and half a line
        lines = self.telemetry.path.read_bytes().splitlines(keepends=True) if self.telemetry.size else []
        self.telemetry.truncate(sum(map(len, [line for line in lines if line.endswith(b"\n")][:done])))
        self.telemetry.check_steps(done)
        self._first_row = next(iter(self.telemetry.rows()), None)
        with guarded(self.path):
            (self.path / PROVENANCE).unlink(missing_ok=True)  # the weights are about to change
            write_json(self.path / CLAIM, self._claim)
            write_json(self.path / RECIPE, seal_recipe(sections))

    def add(self, row: Mapping[str, Any]) -> dict[str, int]:
        """Write a row of telemetry together with the alarms that it raises; return the alarms."""
        self._first_row = self._first_row or row
        alarms = alarm_numbers(row, self._first_row)
        self.telemetry.append({**row, **alarms})
        return alarms

    def finish(self, staged: Path, result: TrainingResult, versions: Mapping[str, str]) -> None:
        """Move the files of ``staged``, the saved model, into the folder, and write provenance.json last.

        That file marks the checkpoint as complete.
        """
        self.telemetry.check_steps(result.steps)
        files = {path.name: file_sha256(path) for path in sorted(staged.iterdir()) if path.suffix not in _NOT_MODEL}
        base = self._claim["base_sha256"]
        weights = adapter_sha256(staged, base) if is_adapter(staged) else weights_sha256(staged)
        move_into(staged, self.path)
        ledgers: tuple[tuple[str, str], ...] = ()
        if result.policy is not None and result.rollouts:
            ledgers = (write_ledgers(self.path, FINAL_LEDGER, result.policy, result.rollouts),)
        position = Position(result.steps, result.steps, ledgers=ledgers)  # every step of TRL counts as an update
        saved = {"sha256": weights, "files": files, "versions": dict(versions)}
        write_provenance(self.path, self._claim, result.recipe, position, saved)

    def _check_claim(self, claim: Mapping[str, Any]) -> None:
        if not isinstance(claim.get("config"), dict):
            raise DataError(f"{str(self.path / CLAIM)!r} has no config; give another output_dir")
        if claim != self._claim:
            difference = claim_difference(claim, self._claim)
            raise RunError(f"folder {str(self.path)!r} was trained {difference}; give another output_dir, or delete it")


class StepNumbers:
    """The telemetry of one optimiser step, accumulated from its batches of rollouts and its microbatches.

    Names are those of ``kvaudit.audit.training.telemetry``; means are over microbatches, like TRL's own metrics. A step
    that draws no rollouts reuses those of ``before``, the previous step.
    """

    def __init__(self, before: StepNumbers | None = None) -> None:
        self._panel = MismatchPanel()
        self._learned: dict[str, list[float]] = defaultdict(list)
        self._sampled: dict[str, list[float]] = defaultdict(list)
        self._earlier: dict[str, list[float]] = {} if before is None else dict(before._sampled or before._earlier)
        self.loss, self.seconds = 0.0, {"seconds_rollout": 0.0, "seconds_learner": 0.0}
        self.counts = dict.fromkeys(COUNTS, 0.0)  # of this process

    def add_rollouts(self, metrics: Mapping[str, Sequence[float]], numbers: Mapping[str, float]) -> None:
        """Add the numbers of a batch of rollouts.

        ``metrics`` are TRL's lists of values, whose last one is the batch's; ``numbers`` are kvaudit's own.
        """
        for name, metric in SAMPLED.items():
            self._sampled[metric].append(metrics[name][-1])
        for name, values in metrics.items():
            if name.startswith("rewards/") and name.endswith("/mean"):
                self._sampled["reward/" + name.removeprefix("rewards/").removesuffix("/mean")].append(values[-1])
        for name, value in numbers.items():
            self._sampled[name].append(value)

    def add_microbatch(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Add a microbatch's numbers; ``metrics`` are TRL's lists of values, whose last one is the microbatch's."""
        for name, metric in LEARNED.items():
            if metrics.get(name):
                self._learned[metric].append(metrics[name][-1])

    def add_logprobs(self, gathered: Tensor) -> None:
        """Add a microbatch of all processes, [N, T, 4].

        The last dimension has four numbers per token: the sampler's log-prob and the learner's (nats), computed with
        the weights that sampled; 1 if the token was sampled, else 0; and the advantage before correction.
        """
        sampler, learner, mask, advantages = gathered.unbind(-1)  # each [N, T]
        self._panel.add(sampler, learner, mask.bool(), advantages)

    def add_caches(self, rollouts: Sequence[Rollout], tokens: int) -> None:
        """Add this process's microbatch: its number of ``tokens``, and the cache sizes of its rollouts."""
        self.counts["tokens"] += tokens
        for rollout in rollouts:
            seen, dense = entries_seen(rollout)
            sizes = (seen, dense, rollout.kv_bytes_peak, rollout.kv_bytes_dense, rollout.prompt_length, 1)
            for name, size in zip(COUNTS[1:], sizes, strict=True):
                self.counts[name] += size

    def row(self, step: int, grad_norm: float | None, totals: Mapping[str, float], *, replays: bool) -> TelemetryRow:
        """Return the step's row of telemetry from the ``totals`` of all processes.

        ``replays``: in the learner's passes, every query sees only the cache entries that the sampler had.
        """
        means = {name: _mean(values) for name, values in (self._sampled or self._earlier).items()}
        row: TelemetryRow = {"step": step, **dict.fromkeys(_ABSENT), **dict.fromkeys(LEARNED.values()), **means}
        row |= {name: _mean(values) for name, values in self._learned.items()}
        norm = grad_norm if grad_norm is not None and math.isfinite(grad_norm) else None
        row |= {"loss": self.loss, "grad_norm": norm, "update_skipped": False, "groups_sampled_again": 0}
        rows, dense = totals["rows"], totals["dense"]
        row |= {
            "learner_tokens": int(totals["tokens"]),
            "prompt_tokens_mean": totals["prompt"] / rows if rows else None,
            "kv_bytes_peak": int(totals["peak"]) if rows else None,
            "kv_bytes_dense": int(totals["dense_bytes"]) if rows else None,
            "token_savings": 1.0 - totals["kept"] / dense if dense else None,
        }
        row |= {f"mismatch/{name}": value for name, value in self._panel.numbers().items()}
        # a learner that replays ledgers has measured its certificate already; other arms have none
        row |= {name: row[name.replace("shadow/", "mismatch/")] if replays else None for name in CERTIFICATE}
        return row | self.seconds


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def settings_of(config: Any) -> dict[str, Any]:
    """Return the learning settings of a GRPOConfig as JSON values."""
    settings = {name: getattr(config, name) for name in LEARNING_SETTINGS}
    return {
        name: value if isinstance(value, bool | int | float | None) else str(value) for name, value in settings.items()
    }


def base_sha256(model: Any) -> str:
    """Return the sha256 of the weights that training starts from.

    As in all commands, it is that of the files from which the weights were loaded. If there are no such files, or they
    have another format, it is that of the tensors.
    """
    stock = inner_model(model)
    folder = _source_folder(stock.config)
    if folder is not None and any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return weights_sha256(folder)
    digest = hashlib.sha256()
    # by their names without an adapter
    tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in stock.state_dict().items()}
    for name, tensor in sorted(tensors.items()):
        if "lora_" not in name:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _source_folder(config: Any) -> Path | None:
    """Return the folder that a model was loaded from, possibly in the hub's cache; None for one made in memory."""
    name = str(config._name_or_path)
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
    except HFValidationError:  # not a valid hub name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def reward_sha256(functions: Iterable[Any]) -> str:
    """Return the sha256 of the source text of reward functions and the names of reward models."""
    return sha256_of([_source(function) for function in functions])


def _source(function: Any) -> str:
    if hasattr(function, "config"):  # a model
        return str(function.config._name_or_path)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # a callable object, or typed at a prompt
        return f"{type(function).__module__}.{type(function).__qualname__}"


def questions_sha256(dataset: Any) -> str:
    """Return the sha256 of all prompts of a data set.

    The prompts of a stream are not known yet; the result is then the sha256 of its description.
    """
    rows = dataset["prompt"] if hasattr(dataset, "__len__") and "prompt" in dataset.column_names else [str(dataset)]
    return sha256_of([str(row) for row in rows])


def sections_of(
    arm: str, policy: str, model: Mapping[str, Any], reward: Mapping[str, Any], data: str, training: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sections of ``recipe.json`` (what training starts from), {name: content}.

    ``data`` is the sha256 of the prompts, which come from no suite.
    """
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
