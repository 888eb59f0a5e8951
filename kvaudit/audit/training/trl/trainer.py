"""TRL's GRPO trainer with kvaudit's sampler and arms; everything else is unchanged.

To rollouts of vLLM, TRL itself applies the corrections ``tis`` (token_truncate at 2) and ``mis`` (token_mask to
.5 .. 5), with the same result as kvaudit's. In all other cases ``audit.training.corrections`` computes the weights, and
each token's advantage is multiplied by its weight. The KL to a reference is never weighted.

Each row's rollout, with its ledger (when each cache entry was evicted), is an entry of TRL's batch, so that TRL
shuffles and splits it with the row.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training.checkpoint import STAGED, versions
from kvaudit.audit.training.corrections import CORRECTIONS
from kvaudit.audit.training.optimiser import read_floats
from kvaudit.audit.training.trl import output, require_trl
from kvaudit.audit.training.trl.hosted import FUNCTION, VLLM, HostedArm, check_logprobs
from kvaudit.audit.training.trl.output import COUNTS, OutputFolder, StepNumbers, TrainingResult, base_sha256
from kvaudit.core.errors import SpecError

# our own keys in TRL's batch
_ROLLOUTS, _LEARNER, _ADVANTAGES = "rollouts", "learner_per_token_logps", "plain_advantages"
_SAMPLER, _OLD = "sampling_per_token_logps", "old_per_token_logps"  # TRL's


class _OnTrainBegin(TrainerCallback):  # type: ignore[misc]
    """A callback that calls ``function`` when training starts.

    After a resume, the number of finished steps is known by then.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._function()


class AuditedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer with rollouts under a cache ``policy`` and the learner of an ``arm``.

    ``arm`` is any of ``kvaudit list arms`` except smd-distill; dense ignores the policy, so that two runs can differ in
    the arm only. By default kvaudit's cache samples the rollouts. In all arms except smd they may come from vLLM
    (``use_vllm``) or your ``rollout_func`` instead; then ``policy`` only describes the sampler in the report.
    ``output_dir`` gets telemetry and, at the end, a checkpoint for a spec's ``checkpoints:``.

        trainer = AuditedGRPOTrainer(model, reward, GRPOConfig("out"), data, arm="smd", policy="snapkv:budget=512")
    """

    _name = "GRPO, audited"

    def __init__(self, model: Any, *args: Any, arm: str, policy: str | None = None, **options: Any) -> None:
        require_trl()
        arguments = signature(GRPOTrainer).bind(model, *args, **options).arguments
        config = arguments.get("args")
        external_sampler = FUNCTION if arguments.get("rollout_func") is not None else None
        external_sampler = VLLM if config is not None and config.use_vllm else external_sampler
        self._hosted = HostedArm.of(arm, policy, external_sampler)
        if config is not None:
            self._hosted.apply_settings(config)
        super().__init__(model, *args, **options)
        self._rollouts: Sequence[Rollout] = ()  # of the rows in the learner's next pass
        self._logprobs: Tensor | None = None  # [b, T] nats, of the learner's last pass
        self._draw = (-1, 0)  # the last batch of rollouts: its optimiser step, and its number in that step
        self._prompts: list[list[int]] = []  # of the last batch
        self._numbers = StepNumbers()
        self._folder: OutputFolder | None = None
        # hashed now, because a resume loads other weights before training begins
        self._base = base_sha256(self.accelerator.unwrap_model(self.model)) if self.is_world_process_zero() else ""
        self.add_callback(_OnTrainBegin(self._begin))
        if external_sampler is None:
            self._check_host()
            prepare_model(inner_model(self.accelerator.unwrap_model(self.model)))

    def _check_host(self) -> None:
        """Raise SpecError for settings with which kvaudit's cache cannot sample."""
        if self.tools or self.environment_factories is not None:
            raise SpecError("tools and environments need several turns, kvaudit's cache samples one; use use_vllm")
        if isinstance(self.processing_class, ProcessorMixin):
            raise SpecError(
                "kvaudit's cache samples from token ids only, but this processor has images; use a tokenizer"
            )
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if self.is_deepspeed_enabled or (plugin is not None and plugin.fsdp_version != 2):
            raise SpecError(
                "kvaudit's cache cannot read weights that DeepSpeed or FSDP version 1 shards; launch with FSDP version "
                "2 (fsdp_version: 2), without sharding, or with use_vllm and another arm than smd"
            )
        if plugin is not None and "FULL" not in str(plugin.state_dict_type):
            raise SpecError(
                "fsdp_state_dict_type is not FULL_STATE_DICT, so no checkpoint would be written; set it in the "
                "configuration of accelerate"
            )

    @contextmanager
    def _full_weights(self) -> Iterator[None]:
        """Gather FSDP2-sharded weights inside the context, so that each process may run any number of forwards.

        Use it for work without gradient. All processes must enter it; they need not leave it at the same time.
        """
        if not self.is_fsdp_enabled:
            yield
            return
        from torch.distributed.fsdp import FSDPModule  # some builds of torch are without torch.distributed

        model = self.accelerator.unwrap_model(self.model)
        sharded = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for part in sharded:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in sharded:
                part.reshard()
                part.set_reshard_after_forward(part is not model, recurse=False)

    # --- rollouts ------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        """Generate as TRL does, and check that an external sampler returned log-probs."""
        generated = super()._generate(prompts)
        if self._hosted.external_sampler is not None:
            # 1 and 4 are the completions' tokens and log-probs in TRL's tuple
            check_logprobs(self._hosted.external_sampler, generated[1], generated[4])
        return generated

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, **more: Any
    ) -> Any:
        """Return completions and their log-probs; TRL calls this method to sample."""
        if self._hosted.policy is None:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **more)
        with self._full_weights():
            self._rollouts, self._prompts = self._sample(prompt_ids), prompt_ids
        completions = [rollout.ids[rollout.prompt_length :].tolist() for rollout in self._rollouts]
        logprobs = [rollout.sampler_logprobs[rollout.prompt_length :].tolist() for rollout in self._rollouts]
        return completions, logprobs

    def _sample(self, prompts: list[list[int]]) -> list[Rollout]:
        """Sample one rollout per prompt; all draws depend on (seed, step, row) only and are equal in all arms."""
        assert self._hosted.policy is not None
        # the number of consecutive rows that share a prompt everywhere
        group = gcd(*(len(list(same)) for _, same in groupby(prompts)))
        first = self.accelerator.process_index * len(prompts)
        split = "rollout" if self.model.training else "rollout-evaluation"
        seeds = [derive_seed(split, self.args.seed, *self._draw, first + n) for n in range(len(prompts))]
        model = inner_model(self.accelerator.unwrap_model(self.model))
        # the attributes of a loaded model that the sampler uses
        sampled_model = SimpleNamespace(
            model=model,
            device=model.device,
            max_positions=model.config.get_text_config(decoder=True).max_position_embeddings,
            chat=SimpleNamespace(stop_ids=frozenset(map(int, self.eos_token_ids))),
        )
        was_training = model.training
        model.eval()
        try:
            episode = Sampler(sampled_model, self._hosted.policy).open(prompts[::group], seeds, group=group)
            episode.decode(Decoding(self.max_completion_length, temperature=self.temperature))
            return episode.rollouts()
        finally:
            model.train(was_training)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and score as TRL does; in training, also apply the arm's importance weights (its correction)."""
        start, step = time.perf_counter(), self.state.global_step
        self._rollouts = ()
        if self.model.training:
            # batches of one step are numbered so that their seeds differ
            self._draw = (step, self._draw[1] + 1 if self._draw[0] == step else 0)
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._rollouts:
            batch[_ROLLOUTS] = list(self._rollouts)
        if not self.model.training:
            return batch
        rates = self._apply_correction(batch)
        self._numbers.add_rollouts(self._metrics["train"], rates | {"frac_unscored": self._unscored_share()})
        self._numbers.seconds["seconds_rollout"] += time.perf_counter() - start
        return batch

    def _unscored_share(self) -> float:
        """Return the share of rows that no reward function scored."""
        rewards = zip(*(list(self._logs["rewards"][name]) for name in self.reward_func_names), strict=True)
        flags = [all(map(isnan, row)) for row in rewards]
        return sum(flags) / len(flags) if flags else 0.0

    def _apply_correction(self, batch: dict[str, Any]) -> dict[str, float]:
        """Apply the arm's importance weights (its correction) to the batch, in place.

        Returns the correction's metrics over all processes.
        """
        arm = self._hosted.arm
        if arm.correction == "none":
            return {"mismatch/masked_tokens": 0.0, "mismatch/rejected_sequences": 0.0}
        mask = _mask(batch)
        learner = batch[_OLD] if _OLD in batch else self._old_logprobs(batch)
        # vLLM returns NaN for tokens it could not score: a ratio of 1, as in TRL
        sampler = torch.where(batch[_SAMPLER].isnan(), learner, batch[_SAMPLER])
        rows, width = mask.shape
        # gathered from all processes, because a token's weight may depend on all others: [N, T, 3]
        gathered = self._gather(torch.stack([learner, sampler, mask.float()], dim=-1))
        correction = CORRECTIONS[arm.correction](gathered[..., 0], gathered[..., 1], gathered[..., 2].bool())
        first = self.accelerator.process_index * rows
        part = correction.of(slice(first, first + rows))
        batch |= {_LEARNER: learner, _ADVANTAGES: batch["advantages"]}
        if not self._hosted.trl_corrects:
            batch["advantages"] = batch["advantages"][:, None] * part.weights[:, :width]  # [B, T]
        if arm.correction == "naive-ratio":
            batch[_OLD] = part.old_logprobs[:, :width]
        rates = read_floats([*correction.metrics.values()])
        return {f"mismatch/{name}": value for name, value in zip(correction.metrics, rates, strict=True)}

    def _old_logprobs(self, batch: dict[str, Any]) -> Tensor:
        """Return the learner's log-probs [B, T] before the first update, for batches in which TRL computes none."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # [B, P + T]
        attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size, checkpointing = self.args.per_device_train_batch_size, self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing):
            logprobs, *_ = self._get_per_token_logps_and_entropies(
                self.model, ids, attended, batch["completion_ids"].shape[1], batch_size=size
            )
        assert isinstance(logprobs, Tensor)
        return logprobs

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
        """Return what TRL's pass returns: log-probs [b, T], entropies or None, and an additional loss or None.

        In arms that learn under the sampler's cache, the pass hides the entries that were evicted while sampling.
        """
        if self._hosted.arm.learner == "dense":
            outputs = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **more
            )
            self._logprobs = outputs[0].detach()
            return outputs  # type: ignore[no-any-return]
        assert len(self._rollouts) == len(input_ids), (len(self._rollouts), len(input_ids))
        size, parts = batch_size or len(input_ids), []
        for start in range(0, len(input_ids), size):
            rows = slice(start, start + size)
            with shadow(self.accelerator.unwrap_model(model), batch_ledger(self._rollouts[rows])):
                part = super()._get_per_token_logps_and_entropies(
                    model, input_ids[rows], attention_mask[rows], logits_to_keep, **more
                )
            parts.append(part)
        logps, entropies, losses = zip(*parts, strict=True)
        self._logprobs = torch.cat(logps).detach()  # [b, T] nats
        return (
            torch.cat(logps),
            None if entropies[0] is None else torch.cat(entropies),
            None if losses[0] is None else torch.stack(losses).mean(),
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._rollouts = inputs.get(_ROLLOUTS, ())
        loss: Tensor = super()._compute_loss(model, inputs)
        if not self.model.training:
            return loss
        assert self._logprobs is not None
        numbers, mask = self._numbers, _mask(inputs)
        # log-probs under the weights that sampled: from before the first update, or this pass if it is the first
        learner = inputs[_LEARNER] if _LEARNER in inputs else inputs.get(_OLD, self._logprobs)
        advantages = inputs.get(_ADVANTAGES, inputs["advantages"])[:, None].expand(mask.shape)
        # stacked to [b, T, 4], so that one gather suffices
        stacked = torch.stack([values.float() for values in (inputs[_SAMPLER], learner, mask, advantages)], dim=-1)
        numbers.add_logprobs(self._gather(stacked))
        numbers.add_microbatch(self._metrics["train"])
        numbers.add_caches(self._rollouts, int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()))
        numbers.loss += float(self.accelerator.reduce(loss.detach().clone(), reduction="mean"))
        return loss

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Run TRL's training step, and add the seconds that it took, less those of sampling, to ``seconds_learner``."""
        start, seconds = time.perf_counter(), self._numbers.seconds
        sampling_before = seconds["seconds_rollout"]
        loss: Tensor = super().training_step(*args, **options)
        seconds["seconds_learner"] += time.perf_counter() - start - (seconds["seconds_rollout"] - sampling_before)
        return loss

    def _gather(self, values: Tensor) -> Tensor:
        """Return the values [b, T, ...] of all processes, joined along b and padded to the longest T among them."""
        gathered: Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(values.contiguous(), dim=1))
        return gathered

    # --- the output folder ---------------------------------------------------------------------------------------

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as TRL does, then finish ``output_dir`` as a checkpoint."""
        result = super().train(*args, **options)
        self._finish()
        return result

    def _begin(self) -> None:
        """Reserve the output folder for this run before the first step, also after a resume.

        Only the main process does this.
        """
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
        config = settings | {"arm": arm, "policy": policy or self._hosted.sampler_settings, "loss": self.loss_type}
        config |= {"steps": self.state.max_steps, "ledger_every": 0, "questions_sha256": questions}
        self._folder = OutputFolder(Path(self.args.output_dir), config, base)
        names = dict.fromkeys(self.reward_func_names, "function")
        reward = {"written": names, "sha256": output.reward_sha256(self.reward_funcs), "graded_by": names}
        origin = {"name": str(model.config._name_or_path), "sha256": base}
        sections = output.sections_of(arm, self._hosted.sampler_settings, origin, reward, questions, settings)
        self._folder.begin(self.state.global_step, sections)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **options: Any) -> None:
        """Write the step's row, then log and save as TRL does, so that no saved state lacks its row."""
        if self._numbers.counts["tokens"]:  # TRL calls this once more at the end of an epoch
            self._write_row(None if grad_norm is None else float(grad_norm))
            self._numbers = StepNumbers(self._numbers)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **options)

    def _write_row(self, grad_norm: float | None) -> None:
        """Write one row of telemetry, and add kvaudit's numbers to TRL's log."""
        values = [self._numbers.counts[name] for name in COUNTS]
        counts = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)  # bytes exceed float32
        totals = dict(zip(COUNTS, self.accelerator.reduce(counts, reduction="sum").tolist(), strict=True))
        replays = self._hosted.arm.learner == "shadow"
        row = self._numbers.row(self.state.global_step, grad_norm, totals, replays=replays)
        alarms = {} if self._folder is None else self._folder.add(row)
        for name, value in (row | alarms).items():
            if name.startswith(("mismatch/", "shadow/", "alarm/", "token_savings")) and value is not None:
                self._metrics["train"][name].append(float(value))

    def _finish(self) -> None:
        """Turn the output folder into a checkpoint; all processes take part in saving."""
        staged = Path(self.args.output_dir) / STAGED
        if self._folder is not None:
            shutil.rmtree(staged, ignore_errors=True)  # left by an interrupted finish
        self.accelerator.wait_for_everyone()
        self.save_model(str(staged), _internal_call=True)  # internal: no push to the hub of unfinished files
        policy = self._hosted.policy
        has_ledger = policy is not None and policy.replayable and bool(self._prompts)
        self._draw = (self.state.global_step, 0)
        # in training mode, because evaluation draws other seeds
        self.model.train()
        with self._full_weights():
            rollouts = self._sample(self._prompts) if has_ledger and self._folder is not None else ()
        if self._folder is None:
            self.accelerator.wait_for_everyone()
            return
        recipe = self._hosted.recipe_summary() | {
            "loss": self.loss_type,
            "reward": ", ".join(self.reward_func_names),
            "reward_sha256": output.reward_sha256(self.reward_funcs),
            "constitution": None,
        }
        result = TrainingResult(self.state.global_step, recipe, policy if has_ledger else None, rollouts)
        self._folder.finish(staged, result, versions(trl=require_trl()))
        self.accelerator.wait_for_everyone()


def _mask(batch: dict[str, Any]) -> Tensor:
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
