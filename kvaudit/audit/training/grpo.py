"""The loop with paired arms, readable top to bottom: rollout, advantage, correction, loss, step.

Departures from Shao 2024 (2402.03300) and its usual code:
* one update per batch by default, so pi_old = pi and the clip is idle; ``minibatches`` and ``updates_per_batch`` take
  several, with pi_old the learner's own at the start of the batch;
* no KL to a reference unless ``beta`` > 0 (their .04); it is k3 as a loss, under the same view as the policy;
* the rollouts' distribution is the sampler's, compressed or not; what the learner does about that is the arm;
* the sampled token's log-probs are at the sampling temperature, in the sampler and in the learner alike;
* rollouts that could not be graded take no gradient; a gradient that is not finite skips the update and is recorded;
* AdamW without weight decay, warm-up then a constant rate; evaluation mode throughout (no dropout).

All randomness is a function of (seed, step, row): a run that was killed and started again, and two arms, meet the same
items and the same uniform numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from pathlib import Path

import torch
from torch import Tensor

from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.adapters import frozen_copy, trainable_copy
from kvaudit.audit.training.batch import Batch, collect, gradient_steps, batch_rewards, training_items
from kvaudit.audit.training.checkpoint import (
    FINAL_LEDGER,
    CheckpointFolder,
    Position,
    Resumable,
    drop_state,
    write_ledgers,
)
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.corrections import CORRECTIONS, NEEDS_WHOLE_BATCH
from kvaudit.audit.training.validation import EarlyStop
from kvaudit.audit.training.engine_rollouts import EngineRolloutSampler, EngineUse, engine_gap_numbers
from kvaudit.audit.training.learner import OldPolicy, Learner
from kvaudit.audit.training.losses.base import LOSSES, LossInputs, StepCounts
from kvaudit.audit.training.optimiser import StepResult
from kvaudit.audit.training.ranks import ALONE, RankGroup, on_all_ranks
from kvaudit.audit.training.optimiser import read_floats
from kvaudit.audit.training.rollouts import RolloutSampler, StepRollouts, rollouts_by_policy
from kvaudit.audit.training.ranks import gather_weights, full_weights
from kvaudit.audit.training.telemetry import Clock, LearningResult, Tally, TelemetryRow, step_row, tally_metrics
from kvaudit.audit.training.validation import Validation
from kvaudit.core.alarms import alarm_numbers

Progress = Callable[[int, int, TelemetryRow], None]


def train(
    config: TrainConfig,
    model: LoadedModel,
    out: Path,
    progress: Progress,
    *,
    kept: Path | None = None,
    early_stop: EarlyStop | None = None,
    ranks: RankGroup = ALONE,
    engine: EngineUse = EngineUse(),
) -> Path:
    """Train one arm from ``model``, which stays as it is, into the checkpoint folder ``out``; returns ``out``.

    Resumes from the last saved state, bit for bit on CPU; a finished checkpoint is returned as it is. ``progress`` gets
    steps done, steps in all and the telemetry row. What a judge says of rollouts is kept in ``kept``, by default
    ``out``. With ``early_stop`` an arm that has come to its end is left unfinished until all arms of its seed have. The
    first of several ``ranks`` trains, the others obey it, each with a ``TrainingRun`` of its own. ``engine`` is how one
    that draws the rollouts is run. Raises RunError (another run's folder, full disk, a reward that fails, a lost rank
    or engine, an engine on stale weights) and DataError (a changed state, ledger or checkpoint).
    """
    folder = CheckpointFolder(out, config, model.sha256, config.reward_config.inputs)
    if folder.finished:
        drop_state(out)
        return out
    ranks.begun()
    run = TrainingRun(config, model, kept or out, ranks, engine)
    try:
        return _trained(run, folder, progress, early_stop)
    finally:
        run.close()


def _trained(run: TrainingRun, folder: CheckpointFolder, progress: Progress, early_stop: EarlyStop | None) -> Path:
    config, out, end = run.config, folder.path, None if early_stop is None else early_stop.step
    run.resumed(out, position := folder.resume(run.learner, end))
    # once the end is known it is trained to, and no alarm is asked any more
    rows, stop, keep = folder.telemetry.rows(), early_stop if end is None else None, partial(write_ledgers, out)
    # asked at the top: a kill may have come between a saved state and its mark
    while not (ended := stop is not None and stop.ends(position.step, rows)) and position.step < (end or config.steps):
        row, sampled = run.step(position.step)
        done = position.step + 1
        # an alarm compares with the first row, which at the first step is this one
        rows.append(row | alarm_numbers(row, (rows or [row])[0]))
        folder.telemetry.append(rows[-1])
        ledgers = position.ledgers
        if config.keeps_ledger(done):
            ledgers += tuple(starmap(keep, rollouts_by_policy(f"step-{done}", sampled, config)))
        # once its row and ledgers are on disk, so that no saved position counts what is not there
        position = Position(done, run.learner.optimiser.updates, folder.telemetry.size, ledgers)
        if done % config.save_every == 0 or done == config.steps or (early_stop is not None and early_stop.due(done)):
            own = run.learner.tensors()
            folder.save_state(position, own, others=run.save_part, keep_older=early_stop is not None)
        progress(done, config.steps, rows[-1])
    if ended:
        return out
    if early_stop is not None:
        folder.drop_ledgers_beyond(position)
    if config.keeps_ledger(config.ledger_every):
        final = starmap(keep, rollouts_by_policy(FINAL_LEDGER, run.last(position.step), config))
        position = replace(position, ledgers=(*position.ledgers, *final))
    run.gather()
    folder.finish(run.model, position)
    return out


class TrainingRun(Resumable):
    """One arm under way, in one rank: the learner's model, its optimiser, and what asks the questions of every step."""

    def __init__(
        self, config: TrainConfig, base: LoadedModel, kept: Path, ranks: RankGroup, engine: EngineUse = EngineUse()
    ) -> None:
        self.config = config
        keeps = config.gradient_checkpointing
        with ranks.together():
            self.model = trainable_copy(base, config.adapter, config.seed, checkpointing=keeps, ranks=ranks)
            reference = frozen_copy(base, ranks) if config.beta > 0 else None
            self.learner = Learner(self.model.model, config, reference, ranks)
        super().__init__(self.learner, ranks)
        questions = training_items(config, base.chat.count_tokens)
        asked = (config, self.model, questions, config.reward_config.kept_in(kept))
        self._questioner: RolloutSampler
        if config.rollout_engine is None:
            self._questioner = RolloutSampler(*asked, ranks)
        else:
            self._questioner = EngineRolloutSampler(
                *asked, base=base, use=engine, logs=kept / "logs" / "engines", ranks=ranks
            )
        self._validation = None if config.watch is None else Validation(config, config.watch, self.model, questions)

    @on_all_ranks
    def gather(self) -> None:
        """Have the finished weights whole, where they are saved."""
        gather_weights(self.model.model)

    def close(self) -> None:
        """End what was started for it."""
        self._questioner.close()

    @on_all_ranks
    def last(self, steps: int) -> StepRollouts:
        """What the weights after so many steps answer to the last questions."""
        return self._questioner.last(steps)

    @on_all_ranks
    def step(self, step: int) -> tuple[TelemetryRow, StepRollouts]:
        """Sample, grade, learn, measure; returns the telemetry row and the rollouts."""
        config, clock = self.config, Clock()
        sampled = self._questioner.sample(step)
        clock.lap("rollout")
        batch = collect(sampled.rollouts, sampled.rewards, config.group, self.model.device)
        # before a weight moves: the certificate is about the weights that sampled
        replayed, gaps = self._certified(batch) if config.has_certificate(step + 1) else (None, {})
        clock.lap("shadow_check")
        most, allowed = self._questioner.max_tokens, self._questioner.allowed(step)
        learned = learn(self.learner, batch, step=step, max_tokens=most, allowed=allowed)
        clock.lap("learner")
        row = step_row(step + 1, config, sampled, batch, learned, replayed) | gaps
        if self._validation is not None:
            if self._validation.is_due(step + 1):
                with full_weights(self.model.model):
                    row |= self._validation.numbers() if self.ranks.number == 0 else {}  # no training depends on it
            clock.lap("validation")
        return row | clock.laps, sampled

    def _certified(self, batch: Batch) -> tuple[Tensor | None, TelemetryRow]:
        """The learner's log-probs [B, R] of what the sampler saw; of an engine, where known, and the gaps to it."""
        if self.config.rollout_engine is None:
            return self.learner.replayed(batch), {}
        replayed = None if self.config.store is None else self.learner.replayed(batch)
        return replayed, engine_gap_numbers(batch.sampler_logprobs, replayed, self.learner.dense(batch), batch.sampled)


def learn(
    learner: Learner, batch: Batch, *, step: int, max_tokens: int, allowed: Sequence[int] | None = None
) -> LearningResult:
    """Take every gradient step on one batch of rollouts.

    pi_old is the learner's own log-prob before the first of them. Where one pass over one microbatch is all there is,
    it is that pass, detached; otherwise a pass without gradient comes first. A rollout can sample ``max_tokens`` at
    most, or as many as ``allowed`` says of it.
    """
    config, arm = learner.config, learner.config.design
    loss, correct = LOSSES.get(config.loss)(), CORRECTIONS[arm.correction]
    plan, ranks = gradient_steps(batch, config, step, learner.ranks), learner.ranks
    before: OldPolicy | None = None  # where pi_old must be known before a weight moves, or over the whole batch
    in_parts = ranks.count > 1 or len(plan[0].microbatches) > 1
    if len(plan) > 1 or loss.critic or (in_parts and arm.correction in NEEDS_WHOLE_BATCH):
        before = learner.read_old_policy(
            batch, [rows for update in plan[: config.minibatches] for rows in update.microbatches]
        )
    fixed = None if before is None else correct(before.logprobs, batch.sampler_logprobs, batch.mask)
    anchor = learner.anchor(batch)
    # [] or [B], sampled tokens
    most = torch.tensor(max_tokens if allowed is None else allowed, device=batch.rewards.device)
    earned = batch_rewards(batch, None if before is None else before.values, config, most)
    advantages, returns = loss.estimate(earned)  # [B, R]; returns None without a critic
    first = torch.zeros_like(batch.sampler_logprobs)  # [B, R], what the view said before a weight moved
    # what is told is read when all is done: a read in between would leave the device without work
    told, losses, steps = list[dict[str, Tensor | float]](), list[Tensor](), list[StepResult]()
    tokens = list[int]()  # of graded rollouts, by microbatch
    for update in plan:
        counts = StepCounts.of(advantages[update.rows], batch.mask[update.rows], batch.group, max_tokens)
        losses = []  # of this update alone: what is told is the last one's
        for half, passes in zip(update.halves, update.passes, strict=True):
            for rows in half:
                part, at = batch.of(rows), upload(torch.tensor(rows), batch.rewards.device)
                read, values = learner.read(part)
                logprobs = part.spread(read.logprobs)  # [n] to [b, R]
                own = correct(logprobs.detach(), part.sampler_logprobs, part.mask) if fixed is None else fixed.of(at)
                inputs = LossInputs(
                    logprobs=logprobs,
                    correction=own,
                    advantages=advantages[at],
                    mask=part.mask,
                    group=part.group,
                    counts=counts,
                    epsilon_low=config.epsilon_low,
                    epsilon_high=config.epsilon_high,
                    beta=config.beta,
                    ref_logprobs=None if anchor is None else anchor[at],
                    distill_weight=config.distill_weight,
                    distill_kl=learner.distillation_kl(part, read),
                    critic=None if before is None else before.critic_inputs(values, returns, at, config.critic.clip),
                )
                outputs = loss(inputs)
                # now, so that the activations of one microbatch are held at a time
                torch.autograd.backward(outputs.loss)
                losses.append(outputs.loss.detach())
                told.append(outputs.metrics | {"entropy": part.counted(read.entropy).sum()})  # nats, of graded rollouts
                tokens.append(int(part.host_mask.sum()))
                if update is plan[0]:  # later ones read weights that have moved
                    first[at] = logprobs.detach()
            for _ in range(passes - len(half)):
                learner.idle(batch)
            if update is plan[0]:
                learner.optimiser.mark()
        steps.append(learner.step())
    # each rank read its own groups; from here on all know the whole batch
    own_total, tally = 0.0, tally_metrics(told, tokens)
    for part_loss in read_floats(losses):
        own_total += part_loss
    totals, tallies = zip(*ranks.gathered((own_total, tally)), strict=True)
    first, total, tally = ranks.summed(first), sum(totals), sum(tallies, Tally())
    # rows of later minibatches, as they were before any weight moved
    for later in plan[1 : config.minibatches]:
        assert before is not None
        first[later.rows] = before.logprobs[later.rows]
    # one skipped update is said of the whole batch
    norm = None if None in [one.norm for one in steps] else steps[-1].norm
    # once more over the whole batch: rates of microbatches are not sums, so a tally cannot add them up
    metrics = correct(first, batch.sampler_logprobs, batch.mask).metrics
    rates = dict(zip(metrics, read_floats([*metrics.values()]), strict=True))
    return LearningResult(first, advantages, total, norm, {**tally.means(), **rates, **steps[0].halves})
