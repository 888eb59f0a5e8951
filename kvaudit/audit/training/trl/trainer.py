"""TRL's GRPO with this project's sampler and arms; what is not said here is GRPOTrainer's.

Who corrects: where vLLM samples, TRL's own code, for ``tis`` (token_truncate at 2) and ``mis`` (token_mask to .5 .. 5),
which are ours by definition. It runs for vLLM alone, so what our cache or a ``rollout_func`` sampled is corrected by
``audit.training.corrections``, as ``naive-ratio`` and ``sparse-rl`` always are: weights multiply advantages, which
TRL takes by the token. The KL to a reference stays without weights in both.

A row's rollout, with its ledger, travels in TRL's batch beside its tensors, through shuffling and splitting: rows of
equal tokens keep their own.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from math import gcd, isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import ProcessorMixin, TrainerCallback
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from kvaudit.audit.cache.attention import inner_model
from kvaudit.audit.cache.ledger import Rollout, batch_ledger
from kvaudit.audit.cache.stock import prepare_model
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.replay.shadow import shadow
from kvaudit.audit.sampling.sampler import Decoding, Sampler
from kvaudit.audit.training.checkpoint import STAGED, versions
from kvaudit.audit.training.corrections import CORRECTIONS
from kvaudit.audit.training.optimiser import read_floats
from kvaudit.audit.training.trl import output, require_trl
from kvaudit.audit.training.trl.hosted import FUNCTION, VLLM, HostedArm, check_logprobs
from kvaudit.audit.training.trl.output import TrainingResult, OutputFolder, base_sha256
from kvaudit.audit.training.trl.output import COUNTS, StepNumbers
from kvaudit.core.errors import SpecError

# keys of our own in TRL's batch
_ROLLOUTS, _LEARNER, _ADVANTAGES = "rollouts", "learner_per_token_logps", "plain_advantages"
_SAMPLER, _OLD = "sampling_per_token_logps", "old_per_token_logps"  # TRL's


@dataclass
class _Served:
    """The learner's model as the sampler takes it."""

    model: Any
    device: torch.device
    max_positions: int
    chat: Any


class _AtTheBeginning(TrainerCallback):  # type: ignore[misc]
    """Calls back once the steps that are done already are known."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begin()


class AuditedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with rollouts under a cache ``policy`` and the learner that an ``arm`` asks for.

    ``arm`` is any of ``kvaudit list arms`` but smd-distill; dense
    samples without compression whatever the policy, so that two runs differ in the arm alone. Everything else is
    GRPOTrainer's. Rollouts come from kvaudit's cache; with ``use_vllm`` or a ``rollout_func`` of yours from there, in
    every arm but smd, and ``policy`` is what the report will say they were sampled under. ``output_dir`` gets telemetry
    and, when training is over, a checkpoint that a spec names under ``checkpoints:``.

        trainer = AuditedGRPOTrainer(model, reward, GRPOConfig("out"), data, arm="smd", policy="snapkv:budget=512")
    """

    _name = "GRPO, audited"

    def __init__(self, model: Any, *args: Any, arm: str, policy: str | None = None, **options: Any) -> None:
        require_trl()
        given = signature(GRPOTrainer).bind(model, *args, **options).arguments
        config = given.get("args")
        outside = FUNCTION if given.get("rollout_func") is not None else None
        outside = VLLM if config is not None and config.use_vllm else outside
        self._hosted = HostedArm.of(arm, policy, outside)
        if config is not None:
            self._hosted.settle(config)
        super().__init__(model, *args, **options)
        self._seen: Sequence[Rollout] = ()  # of the rows that the next pass of the learner is about
        self._passed: Tensor | None = None  # [b, T] nats, what it said
        self._drawn = (-1, 0)  # optimiser step of the last batch of rollouts, and how many that step had
        self._prompts: list[list[int]] = []  # of the last batch
        self._numbers = StepNumbers()
        self._folder: OutputFolder | None = None
        # now: a resume loads other weights before it says so
        self._base = base_sha256(self.accelerator.unwrap_model(self.model)) if self.is_world_process_zero() else ""
        self.add_callback(_AtTheBeginning(self._begin))
        if outside is None:
            self._check_host()
            prepare_model(inner_model(self.accelerator.unwrap_model(self.model)))

    def _check_host(self) -> None:
        """Raise SpecError for hosts that our cache cannot sample in."""
        if self.tools or self.environment_factories is not None:
            raise SpecError("tools and environments take several turns, a row of kvaudit's cache one; use use_vllm")
        if isinstance(self.processing_class, ProcessorMixin):
            raise SpecError("kvaudit's cache samples from token ids alone, and this processor makes images too")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise SpecError(
                "FSDP and DeepSpeed part the weights that kvaudit's cache samples from; launch without them, or "
                "sample with use_vllm and another arm than smd"
            )

    # --- rollouts ------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        """TRL's own; what others sampled is held to having log-probs."""
        made = super()._generate(prompts)
        if self._hosted.outside is not None:
            # the tokens and the log-probs of completions, at their places in TRL's tuple
            check_logprobs(self._hosted.outside, made[1], made[4])
        return made

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, **more: Any
    ) -> Any:
        """TRL's seam for whatever samples: completions, and their log-probs."""
        if self._hosted.policy is None:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **more)
        self._seen, self._prompts = self._sample(prompt_ids), prompt_ids
        completions = [rollout.ids[rollout.prompt_length :].tolist() for rollout in self._seen]
        logprobs = [rollout.sampler_logprobs[rollout.prompt_length :].tolist() for rollout in self._seen]
        return completions, logprobs

    def _sample(self, prompts: list[list[int]]) -> list[Rollout]:
        """One rollout per prompt; all draws are functions of (seed, step, row), the same in every arm."""
        assert self._hosted.policy is not None
        # how many consecutive rows have a prompt in common, throughout
        group = gcd(*(len(list(same)) for _, same in groupby(prompts)))
        first = self.accelerator.process_index * len(prompts)
        split = "rollout" if self.model.training else "rollout-evaluation"
        seeds = [derive_seed(split, self.args.seed, *self._drawn, first + n) for n in range(len(prompts))]
        model, chat = inner_model(self.accelerator.unwrap_model(self.model)), SimpleNamespace()
        chat.stop_ids = frozenset(map(int, self.eos_token_ids))
        was_training, text = model.training, model.config.get_text_config(decoder=True)
        served = _Served(model, model.device, text.max_position_embeddings, chat)
        model.eval()
        try:
            episode = Sampler(served, self._hosted.policy).open(prompts[::group], seeds, group=group)
            episode.decode(Decoding(self.max_completion_length, temperature=self.temperature))
            return episode.rollouts()
        finally:
            model.train(was_training)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's own, and for training what the arm makes of the batch."""
        began, step = time.perf_counter(), self.state.global_step
        self._seen = ()
        if self.model.training:
            # a step may draw several batches, numbered so that none repeats another's seeds
            self._drawn = (step, self._drawn[1] + 1 if self._drawn[0] == step else 0)
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._seen:
            batch[_ROLLOUTS] = list(self._seen)
        if not self.model.training:
            return batch
        rates = self._corrected(batch)
        self._numbers.sampled(self._metrics["train"], rates | {"frac_unscored": self._unscored()})
        self._numbers.seconds["seconds_rollout"] += time.perf_counter() - began
        return batch

    def _unscored(self) -> float:
        """The share of the batch that no reward function could pay."""
        paid = zip(*(list(self._logs["rewards"][name]) for name in self.reward_func_names), strict=True)
        flags = [all(map(isnan, row)) for row in paid]
        return sum(flags) / len(flags) if flags else 0.0

    def _corrected(self, batch: dict[str, Any]) -> dict[str, float]:
        """Let the arm's correction weigh the batch; returns its rates, over all processes."""
        arm = self._hosted.arm
        if arm.correction == "none":
            return {"mismatch/masked_tokens": 0.0, "mismatch/rejected_sequences": 0.0}
        mask = _mask(batch)
        learner = batch[_OLD] if _OLD in batch else self._before_update(batch)
        # vLLM leaves NaN where it could not score: a ratio of 1, as TRL has it
        sampler = torch.where(batch[_SAMPLER].isnan(), learner, batch[_SAMPLER])
        rows, width = mask.shape
        # a rule may weigh a token by all others: [N, T, 3] of every process
        whole = self._gathered(torch.stack([learner, sampler, mask.float()], dim=-1))
        fixed = CORRECTIONS[arm.correction](whole[..., 0], whole[..., 1], whole[..., 2].bool())
        first = self.accelerator.process_index * rows
        own = fixed.of(slice(first, first + rows))
        batch |= {_LEARNER: learner, _ADVANTAGES: batch["advantages"]}
        if not self._hosted.by_trl:
            batch["advantages"] = batch["advantages"][:, None] * own.weights[:, :width]  # [B, T]
        if arm.correction == "naive-ratio":
            batch[_OLD] = own.old_logprobs[:, :width]
        rates = read_floats([*fixed.metrics.values()])
        return {f"mismatch/{name}": value for name, value in zip(fixed.metrics, rates, strict=True)}

    def _before_update(self, batch: dict[str, Any]) -> Tensor:
        """The learner's log-probs [B, T] before a weight moves, where TRL can do without."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # [B, P + T]
        real = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size, checkpointing = self.args.per_device_train_batch_size, self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing):
            found, *_ = self._get_per_token_logps_and_entropies(
                self.model, ids, real, batch["completion_ids"].shape[1], batch_size=size
            )
        assert isinstance(found, Tensor)
        return found

    # --- the learner ---------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's own, under the ledgers of the rows where the arm's learner sees what its sampler saw."""
        if self._hosted.arm.learner == "dense":
            found = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **more
            )
            self._passed = found[0].detach()
            return found  # type: ignore[no-any-return]
        assert len(self._seen) == len(input_ids), (len(self._seen), len(input_ids))
        size, parts = batch_size or len(input_ids), []
        for start in range(0, len(input_ids), size):
            some = slice(start, start + size)
            with shadow(self.accelerator.unwrap_model(model), batch_ledger(self._seen[some])):
                own = super()._get_per_token_logps_and_entropies(
                    model, input_ids[some], attention_mask[some], logits_to_keep, **more
                )
            parts.append(own)
        logps, entropies, losses = zip(*parts, strict=True)
        self._passed = torch.cat(logps).detach()  # [b, T] nats
        return (
            torch.cat(logps),
            None if entropies[0] is None else torch.cat(entropies),
            None if losses[0] is None else torch.stack(losses).mean(),
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._seen = inputs.get(_ROLLOUTS, ())
        loss: Tensor = super()._compute_loss(model, inputs)
        if not self.model.training:
            return loss
        assert self._passed is not None
        numbers, mask = self._numbers, _mask(inputs)
        # the weights that sampled: what was read before the first update, or this very pass where it is that
        learner = inputs[_LEARNER] if _LEARNER in inputs else inputs.get(_OLD, self._passed)
        advantages = inputs.get(_ADVANTAGES, inputs["advantages"])[:, None].expand(mask.shape)
        # [b, T, 4], gathered at once
        compared = torch.stack([part.float() for part in (inputs[_SAMPLER], learner, mask, advantages)], dim=-1)
        numbers.compared(self._gathered(compared))
        numbers.learned(self._metrics["train"])
        numbers.saw(self._seen, int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()))
        numbers.loss += float(self.accelerator.reduce(loss.detach().clone(), reduction="mean"))
        return loss

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """TRL's own, timed."""
        began, seconds = time.perf_counter(), self._numbers.seconds
        sampling = seconds["seconds_rollout"]
        loss: Tensor = super().training_step(*args, **options)
        # rollouts are drawn inside a training step and have their own seconds
        seconds["seconds_learner"] += time.perf_counter() - began - (seconds["seconds_rollout"] - sampling)
        return loss

    def _gathered(self, values: Tensor) -> Tensor:
        """Values [b, T, ...] of all processes, filled up to the longest T."""
        whole: Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(values.contiguous(), dim=1))
        return whole

    # --- what is left --------------------------------------------------------------------------------------------

    def train(self, *args: Any, **options: Any) -> Any:
        """TRL's own; then ``output_dir`` is finished as a checkpoint."""
        result = super().train(*args, **options)
        self._finish()
        return result

    def _begin(self) -> None:
        """Before the first step, here or after a resume: who writes claims the folder."""
        self._numbers = StepNumbers()
        if not self.is_world_process_zero():
            return
        model = inner_model(self.accelerator.unwrap_model(self.model))
        settings = output.settings_of(self.args) | {"seed": self.args.seed, "processes": self.accelerator.num_processes}
        if model is not self.accelerator.unwrap_model(self.model):
            adapter = self.accelerator.unwrap_model(self.model).active_peft_config
            settings["adapter"] = {"rank": getattr(adapter, "r", None), "alpha": getattr(adapter, "lora_alpha", None)}
        arm, base = self._hosted.arm.name, self._base
        questions = output.questions_sha256(self.train_dataset)
        policy = None if self._hosted.policy is None else self._hosted.policy.canonical
        config = settings | {"arm": arm, "policy": policy or self._hosted.sampled_under, "loss": self.loss_type}
        config |= {"steps": self.state.max_steps, "ledger_every": 0, "questions_sha256": questions}
        self._folder = OutputFolder(Path(self.args.output_dir), config, base)
        names = dict.fromkeys(self.reward_func_names, "function")
        reward = {"written": names, "sha256": output.reward_sha256(self.reward_funcs), "graded_by": names}
        origin = {"name": str(model.config._name_or_path), "sha256": base}
        sections = output.sections_of(arm, self._hosted.sampled_under, origin, reward, questions, settings)
        self._folder.begin(self.state.global_step, sections)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **options: Any) -> None:
        """TRL's own, after every optimiser step: the row is on disk before a state is saved that counts it."""
        if self._numbers.counts["tokens"]:  # asked once more at the end of an epoch
            self._write_row(None if grad_norm is None else float(grad_norm))
            self._numbers = StepNumbers(self._numbers)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **options)

    def _write_row(self, grad_norm: float | None) -> None:
        """One row of telemetry, and what of it TRL does not log by itself."""
        own = [self._numbers.counts[name] for name in COUNTS]
        counts = torch.tensor(own, dtype=torch.float64, device=self.accelerator.device)  # bytes pass float32
        totals = dict(zip(COUNTS, self.accelerator.reduce(counts, reduction="sum").tolist(), strict=True))
        replays = self._hosted.arm.learner == "shadow"
        row = self._numbers.row(self.state.global_step, grad_norm, totals, replays=replays)
        alarms = {} if self._folder is None else self._folder.add(row)
        for name, value in (row | alarms).items():
            if name.startswith(("mismatch/", "shadow/", "alarm/", "token_savings")) and value is not None:
                self._metrics["train"][name].append(float(value))

    def _finish(self) -> None:
        """Make a checkpoint of the output folder that says what it is; every process takes part in saving."""
        staged = Path(self.args.output_dir) / STAGED
        if self._folder is not None:
            shutil.rmtree(staged, ignore_errors=True)  # of an end that was broken off
        self.accelerator.wait_for_everyone()
        self.save_model(str(staged), _internal_call=True)  # whoever wants it on the hub pushes the finished folder
        if self._folder is None:
            self.accelerator.wait_for_everyone()
            return
        policy = self._hosted.policy
        replayed = policy is not None and policy.replayable and bool(self._prompts)
        self._drawn = (self.state.global_step, 0)
        # drawn as in training: the seeds of evaluation are others
        self.model.train()
        done = TrainingResult(
            self.state.global_step,
            self._hosted.disclosed()
            | {
                "loss": self.loss_type,
                "reward": ", ".join(self.reward_func_names),
                "reward_sha256": output.reward_sha256(self.reward_funcs),
                "constitution": None,
            },
            policy if replayed else None,
            self._sample(self._prompts) if replayed else (),
        )
        self._folder.finish(staged, done, versions(trl=require_trl()))
        self.accelerator.wait_for_everyone()


def _mask(batch: dict[str, Any]) -> Tensor:
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
