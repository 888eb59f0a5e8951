"""The training loop of the paired arms, in reading order: rollouts, advantages, correction, loss, gradient step.

Departures from Shao 2024 (2402.03300) and its usual code:
* one update per batch by default, so pi_old = pi and the clip has no effect; ``minibatches`` and ``updates_per_batch``
  allow several, with pi_old the learner's policy at the start of the batch;
* no KL to a reference model unless ``beta`` > 0 (the paper: .04); it is the estimate k3, added to the loss, and the
  reference model reads the same cache (full or the sampler's) as the learner;
* rollouts come from the sampler's distribution, compressed or not; the arm decides how the learner corrects for that;
* log-probs of sampled tokens are at the sampling temperature, in the sampler and in the learner;
* ungraded rollouts get no gradient; a gradient that is not finite skips the update and is recorded;
* AdamW without weight decay, warm-up then a constant rate; evaluation mode throughout (no dropout).

All randomness is a function of (seed, step, row): a resumed run, and two arms, get the same items and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.adapters import trainable_copy
from kvaudit.audit.training.batch import Batch, GradientStep, batch_rewards, collect, gradient_steps, training_items
from kvaudit.audit.training.checkpoint import FINAL_LEDGER, CheckpointFolder, Position, drop_state, write_ledgers
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.corrections import CORRECTIONS, NEEDS_WHOLE_BATCH, Correction
from kvaudit.audit.training.engine_rollouts import EngineRolloutSampler, EngineUse, engine_gap_numbers
from kvaudit.audit.training.learner import Learner, OldPolicy, pass_logprobs
from kvaudit.audit.training.losses.base import LOSSES, CriticInputs, Loss, LossInputs, LossOutputs, StepCounts
from kvaudit.audit.training.optimiser import StepResult, read_floats
from kvaudit.audit.training.rollouts import RolloutSampler, StepRollouts, rollouts_by_policy
from kvaudit.audit.training.telemetry import Clock, LearningResult, TelemetryRow, mean_metrics, step_row
from kvaudit.audit.training.validation import EarlyStop, Validation
from kvaudit.core.alarms import alarm_numbers

Progress = Callable[[int, int, TelemetryRow], None]  # steps done, of all, telemetry of the last one


def train(
    config: TrainConfig,
    model: LoadedModel,
    out: Path,
    progress: Progress,
    *,
    run_folder: Path | None = None,
    early_stop: EarlyStop | None = None,
    engine: EngineUse = EngineUse(),
) -> Path:
    """Train one arm from ``model``, which is not changed, into the checkpoint folder ``out``; return ``out``.

    Resumes from the last saved state, bit for bit on CPU; does nothing if the checkpoint is finished. ``progress`` is
    called after each step with the numbers of finished and of all steps, and the telemetry row. ``run_folder``, by
    default ``out``, stores judge answers and engine logs. With ``early_stop``, a stopped arm stays unfinished until all
    arms of its seed have stopped. ``engine``: how to run an engine that samples. Raises RunError (folder of another
    run, full disk, failing reward, lost engine, stale engine weights) and DataError (changed state, ledger or
    checkpoint).
    """
    folder = CheckpointFolder(out, config, model.sha256, config.reward_config.inputs)
    if folder.finished:
        drop_state(out)
        return out
    run = TrainingRun(config, model, run_folder or out, engine)
    try:
        return _train_steps(run, folder, progress, early_stop)
    finally:
        run.sampler.close()


def _train_steps(run: TrainingRun, folder: CheckpointFolder, progress: Progress, early_stop: EarlyStop | None) -> Path:
    config, out = run.config, folder.path
    end = None if early_stop is None else early_stop.step
    position = folder.resume(run.learner, end)
    rows = folder.telemetry.rows()

    def write(stem: str, sampled: StepRollouts) -> tuple[tuple[str, str], ...]:
        return tuple(write_ledgers(out, *ledger) for ledger in rollouts_by_policy(stem, sampled, config))

    while True:
        # checked before the step: the process may have been killed between saving a state and marking the stop;
        # once all arms agree on the end, train up to it and ignore alarms
        if early_stop is not None and end is None and early_stop.ends(position.step, rows):
            return out
        if position.step >= (end or config.steps):
            break
        row, sampled = run.step(position.step)
        done = position.step + 1
        # an alarm compares with the first row, which at the first step is this one
        rows.append(row | alarm_numbers(row, (rows or [row])[0]))
        folder.telemetry.append(rows[-1])
        ledgers = position.ledgers
        if config.keeps_ledger(done):
            ledgers += write(f"step-{done}", sampled)
        # after its row and ledgers are on disk, so that no saved position refers to missing data
        position = Position(done, run.learner.optimiser.updates, folder.telemetry.size, ledgers)
        is_stop_due = early_stop is not None and early_stop.is_due(done)
        if done % config.save_every == 0 or done == config.steps or is_stop_due:
            folder.save_state(position, run.learner.tensors(), keep_older=early_stop is not None)
        progress(done, config.steps, rows[-1])
    if early_stop is not None:
        folder.drop_ledgers_beyond(position)
    if config.rollouts is None and config.ledger_every:
        final = write(FINAL_LEDGER, run.sampler.sample_final(position.step))
        position = replace(position, ledgers=position.ledgers + final)
    folder.finish(run.model, position)
    return out


class TrainingRun:
    """The training of one arm: learner, rollout sampler and validation."""

    def __init__(self, config: TrainConfig, base: LoadedModel, folder: Path, engine: EngineUse = EngineUse()) -> None:
        self.config = config
        self.model = trainable_copy(base, config.adapter, config.seed, checkpointing=config.gradient_checkpointing)
        self.learner = Learner(self.model.model, config, base.model if config.beta > 0 else None)
        questions = training_items(config, base.chat.count_tokens)
        arguments = (config, self.model, questions, config.reward_config.kept_in(folder))
        self.sampler = RolloutSampler(*arguments)
        if config.rollout_engine is not None:
            self.sampler = EngineRolloutSampler(*arguments, base=base, use=engine, logs=folder / "logs" / "engines")
        self._validation = None if config.watch is None else Validation(config, config.watch, self.model, questions)

    def step(self, step: int) -> tuple[TelemetryRow, StepRollouts]:
        """Run one step (sample, grade, learn, measure); return its telemetry row and rollouts."""
        config, clock = self.config, Clock()
        sampled = self.sampler.sample(step)
        clock.lap("rollout")
        batch = collect(sampled.rollouts, sampled.rewards, config.group, self.model.device)
        # before the update: the certificate is about the weights that sampled
        replayed, gaps = self._certificate(batch) if config.has_certificate(step + 1) else (None, {})
        clock.lap("shadow_check")
        limits = self.sampler.token_limits(step)
        learned = learn(self.learner, batch, step=step, max_tokens=self.sampler.max_tokens, limits=limits)
        clock.lap("learner")
        row = step_row(step + 1, config, sampled, batch, learned, replayed) | gaps
        if self._validation is not None:
            if self._validation.is_due(step + 1):
                row |= self._validation.numbers()
            clock.lap("validation")
        return row | clock.laps, sampled

    def _certificate(self, batch: Batch) -> tuple[Tensor | None, TelemetryRow]:
        """Replay a batch with the cache that the sampler had, to check the sampler's log-probs.

        Returns two things. The first are the replayed log-probs [B, R]; None if an engine sampled and it is unknown how
        it stores keys and values. The second are the numbers of ``engine_gap_numbers``; {} if no engine sampled.
        """
        if self.config.rollout_engine is None:
            return self.learner.sampler_view(batch), {}
        replayed = None if self.config.store is None else self.learner.sampler_view(batch)
        dense = pass_logprobs(self.model.model, batch, "dense", self.config)
        return replayed, engine_gap_numbers(batch.sampler_logprobs, replayed, dense, batch.sampled)


def learn(
    learner: Learner, batch: Batch, *, step: int, max_tokens: int, limits: Sequence[int] | None = None
) -> LearningResult:
    """Take every gradient step on one batch of rollouts; return the results of all steps together.

    ``limits`` has the token limit of each rollout, by default ``max_tokens``, the most that any rollout of the run may
    have.
    """
    config, loss = learner.config, LOSSES.get(learner.config.loss)()
    plan = gradient_steps(batch, config, step)
    token_limits = torch.tensor(max_tokens if limits is None else limits, device=batch.rewards.device)  # [] or [B]
    targets = _prepare_targets(learner, batch, plan, loss, token_limits)
    first_logprobs = torch.zeros_like(batch.sampler_logprobs)  # [B, R], under the arm's view, before the first update
    # metrics stay on the device until the end: reading them earlier would stall it
    metrics, losses, steps = list[dict[str, Tensor | float]](), list[Tensor](), list[StepResult]()
    tokens = 0  # of graded rollouts, counted in every pass over the batch
    for update in plan:
        counts = StepCounts.of(targets.advantages[update.rows], batch.mask[update.rows], batch.group, max_tokens)
        losses = []  # telemetry reports the last update's loss
        for half in update.halves:
            for rows in half:
                part, index = batch.of(rows), upload(torch.tensor(rows), batch.rewards.device)
                outputs, logprobs = _microbatch_loss(learner, part, index, targets, loss, counts)
                # backward right away, so that only one microbatch's activations are held
                torch.autograd.backward(outputs.loss)
                losses.append(outputs.loss.detach())
                metrics.append(outputs.metrics)
                tokens += int(part.host_mask.sum())
                if update is plan[0]:
                    first_logprobs[index] = logprobs.detach()
            if update is plan[0]:
                learner.optimiser.end_half()
        steps.append(learner.step())
    # rows of later minibatches were passed after the first update, so their log-probs come from before it
    for later in plan[1 : config.minibatches]:
        assert targets.old is not None
        first_logprobs[later.rows] = targets.old.logprobs[later.rows]
    # one skipped update counts for the whole batch
    norm = None if None in [result.norm for result in steps] else steps[-1].norm
    # over the whole batch, because rates of microbatches cannot be added up
    rates = CORRECTIONS[config.design.correction](first_logprobs, batch.sampler_logprobs, batch.mask).metrics
    numbers = dict(zip(rates, read_floats([*rates.values()]), strict=True))
    means = {**mean_metrics(metrics, tokens), **numbers, **steps[0].halves}
    return LearningResult(first_logprobs, targets.advantages, _sum(losses), norm, means)


class _Targets(NamedTuple):
    """The inputs of the loss that are fixed before the first update of a batch, [B, R] each."""

    advantages: Tensor
    returns: Tensor | None  # None without a critic
    ref_logprobs: Tensor | None  # None without a KL to the reference
    old: OldPolicy | None  # None if the gradient pass itself gives pi_old
    correction: Correction | None  # from ``old``; None if each microbatch computes its own


def _prepare_targets(
    learner: Learner, batch: Batch, plan: Sequence[GradientStep], loss: Loss, limits: Tensor
) -> _Targets:
    """Compute what a batch's losses need: advantages, pi_old and its correction, and log-probs of the reference model.

    Usually pi_old is not computed here: the gradient pass itself gives it, detached. An extra pass without gradient
    computes it here if the batch has several updates, if there is a critic, or if the correction needs the whole batch
    and the batch has several microbatches.
    """
    config, correction = learner.config, learner.config.design.correction
    is_split = len(plan[0].microbatches) > 1
    old = None
    if len(plan) > 1 or loss.critic or (is_split and correction in NEEDS_WHOLE_BATCH):
        parts = [rows for update in plan[: config.minibatches] for rows in update.microbatches]
        old = learner.read_old_policy(batch, parts)
    ref_logprobs = learner.ref_logprobs(batch)
    rewards = batch_rewards(batch, None if old is None else old.values, config, limits)
    advantages, returns = loss.estimate(rewards)
    fixed = None if old is None else CORRECTIONS[correction](old.logprobs, batch.sampler_logprobs, batch.mask)
    return _Targets(advantages, returns, ref_logprobs, old, fixed)


def _microbatch_loss(
    learner: Learner, part: Batch, index: Tensor, targets: _Targets, loss: Loss, counts: StepCounts
) -> tuple[LossOutputs, Tensor]:
    """Return the loss of a microbatch and its log-probs [b, R], both with gradient.

    ``index`` gives the microbatch's rows in the whole batch, to which ``targets`` belong.
    """
    config, old, ref_logprobs = learner.config, targets.old, targets.ref_logprobs
    read, values = learner.read(part)
    logprobs = part.spread(read.logprobs)  # [n] to [b, R]
    if targets.correction is None:
        correct = CORRECTIONS[config.design.correction]
        correction = correct(logprobs.detach(), part.sampler_logprobs, part.mask)
    else:
        correction = targets.correction.of(index)
    critic = None
    if values is not None and targets.returns is not None and old is not None and old.values is not None:
        critic = CriticInputs(values, old.values[index], targets.returns[index], config.critic.clip)
    inputs = LossInputs(
        logprobs=logprobs,
        correction=correction,
        advantages=targets.advantages[index],
        mask=part.mask,
        group=part.group,
        counts=counts,
        epsilon_low=config.epsilon_low,
        epsilon_high=config.epsilon_high,
        beta=config.beta,
        ref_logprobs=None if ref_logprobs is None else ref_logprobs[index],
        distill_weight=config.distill_weight,
        distill_kl=learner.distillation_kl(part, read),
        critic=critic,
    )
    outputs = loss(inputs)
    entropy = part.select_graded(read.entropy).sum()  # nats, of graded rollouts
    return LossOutputs(outputs.loss, outputs.metrics | {"entropy": entropy}), logprobs


def _sum(losses: Sequence[Tensor]) -> float:
    total = 0.0  # not sum(), which rounds otherwise from Python 3.12 on
    for loss in read_floats(losses):
        total += loss
    return total
