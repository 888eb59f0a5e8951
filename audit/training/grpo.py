"""GRPO with paired arms, readable top to bottom: rollout, advantage, correction, loss, step.

Departures from Shao 2024 (2402.03300) and its usual code:
* one update per batch by default, so pi_old = pi and the clip is idle; ``updates_per_batch`` keeps pi_old fixed;
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audit.cache.ledger import Rollout
from audit.policies import Policy
from audit.replay.learner_pass import LearnerPass
from audit.sampling.conversations import Played, play
from audit.sampling.model import LoadedModel
from audit.sampling.sampler import Decoding, Sampler
from audit.training.adapters import learner_of
from audit.training.batch import Batch, Question, collect, halves, row_seeds, training_items
from audit.training.checkpoint import FINAL_LEDGER, CheckpointFolder, Position, drop_state
from audit.training.config import REWARD, TrainConfig
from audit.training.corrections import CORRECTIONS, NEEDS_WHOLE_BATCH, Correction
from audit.training.learner import Read, pass_logprobs, read_tokens
from audit.training.losses import LOSSES, LossInputs
from audit.training.optimiser import Halves, Optimiser
from audit.training.rewards import REWARDS
from audit.training.telemetry import Clock, Learned, Row, Tally, step_row

Progress = Callable[[int, int, Row], None]
STD_FLOOR = 1e-6  # reward units


def train(config: TrainConfig, model: LoadedModel, out: Path, progress: Progress) -> Path:
    """Train one arm from ``model``, which stays as it is, into the checkpoint folder ``out``; returns ``out``.

    Resumes from the last saved state, bit for bit on CPU; a finished checkpoint is returned as it is. ``progress`` gets
    steps done, steps in all and the telemetry row. Raises RunError (another run's folder, full disk) and DataError
    (a changed state, ledger or checkpoint).
    """
    folder = CheckpointFolder(out, config, model.sha256)
    if folder.finished:
        drop_state(out)
        return out
    run = _Run(config, model)
    position = folder.resume(run.optimiser)
    while position.step < config.steps:
        row, rollouts = run.step(position.step)
        done = position.step + 1
        folder.telemetry.append(row)
        ledgers = position.ledgers
        if config.ledger_every and done % config.ledger_every == 0:
            ledgers += (folder.save_ledgers(f"step-{done}", rollouts, run.policy),)
        # once its row and ledgers are on disk, so that no saved position counts what is not there
        position = Position(done, run.optimiser.updates, folder.telemetry.size, ledgers)
        if done % config.save_every == 0 or done == config.steps:
            folder.save_state(position, run.optimiser)
        progress(done, config.steps, row)
    if config.ledger_every:
        final = folder.save_ledgers(FINAL_LEDGER, run.last_rollouts(), run.policy)
        position = replace(position, ledgers=(*position.ledgers, final))
    folder.finish(run.model, position)
    return out


class _Run:
    """One arm under way: the learner's model, its optimiser, its sampler and the questions of every step."""

    def __init__(self, config: TrainConfig, base: LoadedModel) -> None:
        self.config, self._reference = config, base.model if config.beta > 0 else None
        self.model = learner_of(base, config.adapter, config.seed, checkpointing=config.gradient_checkpointing)
        self.policy: Policy = config.rollout_policy
        self.optimiser = Optimiser(
            self.model.model,
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
        )
        self._sampler = Sampler(self.model, self.policy)
        self._questions = training_items(config, base.chat.count_tokens)
        self._reward = REWARDS.get(REWARD)()
        # a bound that no batch changes, or dr_grpo's constant would depend on which items a step draws
        suites = {suite.name: suite for step in self._questions for suite, _ in step}
        self._max_tokens = max(suite.max_new_tokens * suite.max_turns for suite in suites.values())

    def step(self, step: int) -> tuple[Row, Sequence[Rollout]]:
        """Sample, grade, learn, measure; returns the telemetry row and the rollouts."""
        config, clock = self.config, Clock()
        played = self._sample(self._questions[step], row_seeds(config, step))
        clock.lap("rollout")
        rewards = [self._reward(row) for row in played]
        batch = collect([row.rollout for row in played], rewards, config.group, self.model.device)
        by_std = LOSSES.get(config.loss).by_std
        advantages = group_advantages(batch.rewards, batch.graded, config.group, by_std=by_std)
        # before a weight moves: the certificate is about the weights that sampled
        replayed = self._replay(batch) if self._is_ledger_step(step) else None
        clock.lap("shadow_check")
        learned = learn(
            self.model.model,
            self.optimiser,
            batch,
            advantages,
            config,
            max_tokens=self._max_tokens,
            reference=self._reference,
        )
        clock.lap("learner")
        row = step_row(step + 1, config, played, rewards, batch, advantages, learned, replayed)
        return row | clock.laps, batch.rollouts

    def last_rollouts(self) -> Sequence[Rollout]:
        """The last step's questions sampled anew by the finished weights, from which no gradient is taken.

        They are what the checkpoint can be verified against: earlier rollouts came from weights that are not kept.
        """
        seeds = row_seeds(self.config, self.config.steps)
        return [row.rollout for row in self._sample(self._questions[-1], seeds)]

    def _sample(self, questions: Sequence[Question], seeds: Sequence[int]) -> list[Played]:
        decoding, group = Decoding(self._max_tokens, temperature=self.config.temperature), self.config.group
        at_once, found = self.config.rollout_rows // group or len(questions), list[Played]()
        for n in range(0, len(questions), at_once):
            own = list(seeds[n * group : (n + at_once) * group])
            found += play(self._sampler, list(questions[n : n + at_once]), decoding, own, group=group)
        return found

    def _is_ledger_step(self, step: int) -> bool:
        return self.config.ledger_every > 0 and (step + 1) % self.config.ledger_every == 0

    def _replay(self, batch: Batch) -> Tensor:
        """The learner's log-probs [B, R] of what the sampler saw, whatever the arm's learner sees."""
        kind: LearnerPass = "shadow" if self.config.recipe.rollout == "compressed" else "dense"
        return pass_logprobs(self.model.model, batch, kind, self.config)


def group_advantages(rewards: Tensor, graded: Tensor, group: int, *, by_std: bool) -> Tensor:
    """Reward minus its group's mean, over the group's population std if asked; 0 for ungraded rows.

    rewards [B], graded bool [B], rows of a group consecutive; returns [B]. 0 where all rewards of a group are equal.
    """
    assert rewards.ndim == 1, rewards.shape
    assert len(rewards) % group == 0, (len(rewards), group)
    values, known = rewards.view(-1, group), graded.view(-1, group)  # [B / group, group]
    count = known.sum(dim=1, keepdim=True).clamp(min=1)
    mean = (values * known).sum(dim=1, keepdim=True) / count
    centred = (values - mean) * known
    if by_std:
        std = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()
        centred = torch.where(std > STD_FLOOR, centred / std.clamp(min=STD_FLOOR), 0.0)
    return centred.reshape(-1)


def learn(
    model: Any,
    optimiser: Optimiser,
    batch: Batch,
    advantages: Tensor,
    config: TrainConfig,
    *,
    max_tokens: int,
    reference: Any,
) -> Learned:
    """Take ``config.updates_per_batch`` gradient steps on one batch; ``reference`` is a model or None.

    pi_old is the learner's own log-prob before the first update. Where one pass over one microbatch is all there is,
    it is that pass, detached; otherwise a pass without gradient comes first.
    """
    arm, loss, correct = config.recipe, LOSSES.get(config.loss)(), CORRECTIONS[config.recipe.correction]
    parts = halves(batch, config.microbatch_tokens)
    splits = [rows for part in parts for rows in part]
    fixed: Correction | None = None  # where pi_old must be known before a weight moves, or over the whole batch
    if config.updates_per_batch > 1 or (len(splits) > 1 and arm.correction in NEEDS_WHOLE_BATCH):
        fixed = correct(pass_logprobs(model, batch, arm.learner, config), batch.sampler_logprobs, batch.mask)
    # under the arm's own view, so that beta pulls to what the reference says of what the policy sees
    anchor = None if reference is None else pass_logprobs(reference, batch, arm.learner, config)
    first, tally, total, norm = torch.zeros_like(batch.sampler_logprobs), Tally(), 0.0, None
    apart = Halves(model)
    noise: dict[str, float | None] = {}
    for update in range(config.updates_per_batch):
        total = 0.0
        for rows in splits:
            part = batch.of(rows)
            read = read_tokens(model, part.rollouts, part.group, arm.learner, config.temperature)
            logprobs = part.spread(read.logprobs)
            correction = (
                correct(logprobs.detach(), part.sampler_logprobs, part.mask) if fixed is None else fixed.of(rows)
            )
            inputs = LossInputs(
                logprobs=logprobs,
                correction=correction,
                advantages=advantages[rows],
                mask=part.mask,
                batch_rows=len(batch.rollouts),
                max_tokens=max_tokens,
                epsilon_low=config.epsilon_low,
                epsilon_high=config.epsilon_high,
                beta=config.beta,
                ref_logprobs=None if anchor is None else anchor[rows],
                distill_weight=config.distill_weight,
                distill_kl=_distill(model, part, read, config.temperature) if arm.distill else None,
            )
            outputs = loss(inputs)
            torch.autograd.backward(outputs.loss)  # now, so that the activations of one microbatch are held at a time
            total += float(outputs.loss.detach())
            tally.add(
                outputs.metrics | {"entropy": float(read.entropy[part.graded_tokens].sum())}, int(part.mask.sum())
            )
            if update == 0:  # later updates read weights that have moved
                first[rows] = logprobs.detach()
            if update == 0 and len(parts) > 1 and rows is parts[0][-1]:
                apart.mark()
        noise = noise or apart.numbers()
        norm = optimiser.step()
    # once more over the whole batch: rates of microbatches are not sums, so a tally cannot add them up
    rates = correct(first, batch.sampler_logprobs, batch.mask).metrics
    return Learned(first, total, norm, {**tally.means(), **rates, **noise})


def _distill(model: Any, part: Batch, shadow: Read, temperature: float) -> Tensor:
    """KL(dense || sg(shadow)) per token [b, R], 0 where a group earned nothing: a starved shadow is a bad teacher."""
    dense = read_tokens(model, part.rollouts, part.group, "dense", temperature)
    return part.spread(dense.distributions.kl(shadow.distributions)) * part.earned[:, None]
