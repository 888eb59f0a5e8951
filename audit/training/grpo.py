"""GRPO with paired arms, readable top to bottom.

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

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from audit.cache.ledger import Rollout
from audit.core.records import Outcome
from audit.policies import Policy
from audit.sampling.conversations import Played, play
from audit.sampling.model import LoadedModel
from audit.sampling.sampler import Decoding, Sampler
from audit.training.batch import Batch, collect
from audit.training.checkpoint import FINAL_LEDGER, CheckpointFolder, Position, drop_state
from audit.training.config import TrainConfig
from audit.training.learner import Learned, View, learn, view_logprobs
from audit.training.losses import NORMALISES_BY_STD, group_advantages
from audit.training.mismatch import mismatch_panel
from audit.training.optimiser import Optimiser
from audit.training.schedule import Question, row_seeds, training_items

Progress = Callable[[int, int, dict[str, Any]], None]
Row = dict[str, Any]
CERTIFICATE = ("shadow/max_abs_gap", "shadow/k3_kl")


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
        self.model = replace(base, model=copy.deepcopy(base.model).eval())
        self.policy: Policy = config.rollout_policy
        self.optimiser = Optimiser(
            self.model.model,
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
        )
        self._sampler = Sampler(self.model, self.policy)
        self._questions = training_items(config, base.chat.count_tokens)
        suites = {suite.name: suite for step in self._questions for suite, _ in step}
        self._max_tokens = max(suite.max_new_tokens * suite.max_turns for suite in suites.values())

    def step(self, step: int) -> tuple[Row, Sequence[Any]]:
        """Sample, grade, learn, measure; returns the telemetry row and the rollouts."""
        config = self.config
        clock = _Clock()
        played = self._sample(self._questions[step], row_seeds(config, step))
        clock.lap("rollout")
        scores = [row.grade.score for row in played]
        batch = collect([row.rollout for row in played], scores, config.group, self.model.device)
        by_std = NORMALISES_BY_STD[config.loss]
        advantages = group_advantages(batch.rewards, batch.graded, batch.group, by_std=by_std)
        certificate = self._certify(batch, advantages) if self._is_ledger_step(step) else dict.fromkeys(CERTIFICATE)
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
        panel = mismatch_panel(batch.sampler_logprobs, learned.logprobs, batch.sampled, advantages)
        row = {"step": step + 1} | _reward_numbers(played, config) | _learning_numbers(learned)
        return row | _memory_numbers(played, batch) | panel | certificate | clock.laps, batch.rollouts

    def last_rollouts(self) -> Sequence[Rollout]:
        """The last step's questions sampled anew by the finished weights, from which no gradient is taken.

        They are what the checkpoint can be verified against: earlier rollouts came from weights that are not kept.
        """
        seeds = row_seeds(self.config, self.config.steps)
        return [row.rollout for row in self._sample(self._questions[-1], seeds)]

    def _sample(self, questions: Sequence[Question], seeds: Sequence[int]) -> list[Played]:
        decoding = Decoding(max_new_tokens=self._max_tokens, temperature=self.config.temperature)
        return play(self._sampler, list(questions), decoding, list(seeds), group=self.config.group)

    def _is_ledger_step(self, step: int) -> bool:
        return self.config.ledger_every > 0 and (step + 1) % self.config.ledger_every == 0

    def _certify(self, batch: Batch, advantages: Tensor) -> Row:
        """What the ledger says of this step's rollouts: near 0 in every arm, or the sampler and ledger disagree."""
        view: View = "shadow" if self.config.recipe.rollout == "compressed" else "dense"
        replayed = view_logprobs(self.model.model, batch, view, self.config)
        panel = mismatch_panel(batch.sampler_logprobs, replayed, batch.sampled, advantages)
        return {name: panel[name.replace("shadow/", "mismatch/")] for name in CERTIFICATE}


class _Clock:
    """Seconds per part of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to ``name``."""
        now = time.perf_counter()
        self.laps[f"seconds_{name}"], self._last = now - self._last, now


def _reward_numbers(played: Sequence[Played], config: TrainConfig) -> Row:
    scores = [row.grade.score for row in played]
    graded = [score for score in scores if score is not None]
    groups = [scores[start : start + config.group] for start in range(0, len(scores), config.group)]
    flat = [len({score for score in group if score is not None}) <= 1 for group in groups]
    outcomes = [row.grade.outcome for row in played]
    by_suite = {name: [row.grade.score for row in played if row.item.suite == name] for name in config.suites}
    return {
        "reward_mean": _mean(graded),
        "reward_std": statistics.pstdev(graded) if graded else None,
        "frac_reward_zero_std": _mean(flat),
        "frac_degenerate": outcomes.count(Outcome.DEGENERATE) / len(played),
        "frac_unscored": outcomes.count(Outcome.UNSCORED) / len(played),
        "length_mean": _mean([row.new_tokens for row in played]),
    } | {f"reward/{name}": _mean([s for s in known if s is not None]) for name, known in by_suite.items()}


def _learning_numbers(learned: Learned) -> Row:
    metrics = learned.metrics
    return {
        "loss": learned.loss,
        "grad_norm": learned.grad_norm,
        "update_skipped": learned.grad_norm is None,
        "entropy": metrics.get("entropy"),
        "clip_fraction": metrics.get("clipped"),
        "kl_ref": metrics.get("kl_ref"),
        "distill_kl": metrics.get("distill_kl"),
        "mismatch/rejection_rate": metrics["rejection_rate"],
        "mismatch/veto_rate": metrics["veto_rate"],
    }


def _memory_numbers(played: Sequence[Played], batch: Batch) -> Row:
    """Bytes are sums over the step's rows; token savings is 1 - retention when the last answers start."""
    rollouts = batch.rollouts
    retention = _mean([rollout.retention for rollout in rollouts])
    return {
        "learner_tokens": batch.learner_tokens,
        "prompt_tokens_mean": _mean([row.prompt_tokens for row in played]),
        "kv_bytes_peak": sum(rollout.kv_bytes_peak for rollout in rollouts),
        "kv_bytes_dense": sum(rollout.kv_bytes_dense for rollout in rollouts),
        "token_savings": None if retention is None else 1.0 - retention,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
