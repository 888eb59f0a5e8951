"""Telemetry: what a step says of itself, as one flat row of numbers (of a mixture, and the draws of its groups).

A row is the union of the numbers below and of ``seconds_*``, the only keys in which two identical runs may differ.
None stands where nothing supports a number. Names follow verl's rollout_corr metrics where those exist.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.training.losses.base import has_equal_rewards
from kvaudit.audit.training.batch import Batch
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.mismatch import mismatch_panel
from kvaudit.audit.training.optimiser import HALF_METRICS
from kvaudit.audit.training.optimiser import read_floats
from kvaudit.audit.training.rollouts import StepRollouts
from kvaudit.core.records import Outcome

TelemetryRow = dict[str, Any]
CERTIFICATE = ("shadow/max_abs_gap", "shadow/k3_kl")


class Clock:
    """Seconds per part of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to ``name``."""
        now = time.perf_counter()
        self.laps[f"seconds_{name}"], self._last = now - self._last, now


@dataclass
class Tally:
    """Sums over the tokens of a batch's microbatches and updates, read as means per token."""

    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def add(self, sums: Mapping[str, float], tokens: int) -> None:
        """Count one microbatch."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.tokens += tokens  # of graded rollouts, again in every pass over a batch

    def __add__(self, other: Tally) -> Tally:
        """Both counted together."""
        both = Tally()
        for tally in (self, other):
            both.add(tally.sums, tally.tokens)
        return both

    def means(self) -> dict[str, float | None]:
        """Each sum per token; None without any token."""
        return {name: value / self.tokens if self.tokens else None for name, value in self.sums.items()}


def tally_metrics(sums: Sequence[Mapping[str, Tensor | float]], tokens: Sequence[int]) -> Tally:
    """What microbatches said, counted in their order, by one read."""
    numbers, tally = iter(read_floats([value for one in sums for value in one.values()])), Tally()
    for one, count in zip(sums, tokens, strict=True):
        tally.add({name: next(numbers) for name in one}, count)
    return tally


class LearningResult(NamedTuple):
    """One batch's learning. ``logprobs`` [B, R] are the view's before the first update, 0 where nothing was sampled;
    ``advantages`` [B, R] what the loss made of the rewards.

    ``metrics`` are means over tokens of graded rollouts (nats), over all updates of the batch; None without any.
    ``grad_norm`` is the last update's, as ``loss`` is; None where that of any was not finite and changed nothing.
    """

    logprobs: Tensor
    advantages: Tensor
    loss: float
    grad_norm: float | None
    metrics: dict[str, float | None]


def step_row(
    step: int,
    config: TrainConfig,
    sampled: StepRollouts,
    batch: Batch,
    learned: LearningResult,
    replayed: Tensor | None,
) -> TelemetryRow:
    """All numbers of a step but its seconds.

    ``replayed`` [B, R] are the learner's log-probs of what the sampler saw, None at steps that keep no ledger.
    """
    played, rewards = sampled.played, sampled.rewards
    row: TelemetryRow = {"step": step}
    row |= reward_numbers(played, rewards, config) | learning_numbers(learned) | memory_numbers(played, batch)
    row |= mismatch_panel(batch.sampler_logprobs, learned.logprobs, batch.sampled, learned.advantages)
    row |= certificate(batch.sampler_logprobs, replayed, batch.sampled, learned.advantages)
    row["groups_sampled_again"] = sampled.again
    draws = config.rollout_policy.draws
    if len(draws) > 1:  # of a mixture, which of its policies every group drew, by their places in it
        row["group_policies"] = [draws.index(policy) for policy in sampled.policies]
    return row


def reward_numbers(played: Sequence[GradedRow], rewards: Sequence[float | None], config: TrainConfig) -> TelemetryRow:
    """What the rollouts earned, over all and by suite, and how many could not be graded or told anything."""
    earned = [reward for reward in rewards if reward is not None]
    # rows of one question are consecutive
    groups = [rewards[start : start + config.group] for start in range(0, len(rewards), config.group)]
    flat = [has_equal_rewards(group) for group in groups]
    outcomes = [row.grade.outcome for row in played]
    row: TelemetryRow = {
        "reward_mean": _mean(earned),
        "reward_std": statistics.pstdev(earned) if earned else None,
        "frac_reward_zero_std": _mean(flat),
        "frac_degenerate": sum(map(outcomes.count, (Outcome.DEGENERATE, Outcome.TRUNCATED))) / len(played),
        "frac_truncated": outcomes.count(Outcome.TRUNCATED) / len(played),
        "frac_unscored": rewards.count(None) / len(played),
        "length_mean": _mean([row.new_tokens for row in played]),
    }
    for name in config.suites:
        of_suite = [reward for row, reward in zip(played, rewards, strict=True) if row.item.suite == name]
        row[f"reward/{name}"] = _mean([reward for reward in of_suite if reward is not None])
    return row


def learning_numbers(learned: LearningResult) -> TelemetryRow:
    """The loss, its gradient, and how much of it the clip and the correction took away."""
    metrics = learned.metrics
    return {
        "loss": learned.loss,
        "grad_norm": learned.grad_norm,
        **{name: metrics.get(name) for name in HALF_METRICS},
        "update_skipped": learned.grad_norm is None,
        "entropy": metrics.get("entropy"),
        "clip_fraction": metrics.get("clipped"),
        **{name: metrics.get(name) for name in ("kl_ref", "distill_kl", "value_loss")},
        **{f"mismatch/{name}": metrics[name] for name in ("masked_tokens", "rejected_sequences")},
    }


def memory_numbers(played: Sequence[GradedRow], batch: Batch) -> TelemetryRow:
    """Bytes are sums over the step's rows; token savings is the share of entries that decoding steps did not see."""
    rollouts = batch.rollouts
    kept, dense = (sum(counts) for counts in zip(*map(entries_seen, rollouts), strict=True))
    return {
        "learner_tokens": batch.learner_tokens,
        "prompt_tokens_mean": _mean([row.prompt_tokens for row in played]),
        "kv_bytes_peak": sum(rollout.kv_bytes_peak for rollout in rollouts),
        "kv_bytes_dense": sum(rollout.kv_bytes_dense for rollout in rollouts),
        "token_savings": 1.0 - kept / dense if dense else None,
    }


def entries_seen(rollout: Rollout) -> tuple[float, float]:
    """Cache entries that the queries of all decoding steps saw, mean over layers and KV heads; and of a dense cache.

    The query of a sampled token is the token before it.
    """
    length = len(rollout.ids)
    queries = torch.zeros(length, dtype=torch.int64)
    queries[rollout.sampled.nonzero()[:, 0] - 1] = 1  # 1 at every token whose query drew the next one
    before = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)])  # [T + 1], queries with a lower index
    own = before[:-1]  # of each entry: it is seen from its own query on
    # queries from an entry's own to its eviction [L, H, T]: mean over layers and heads, sum over entries
    kept = (before[rollout.evicted_at.long().clamp(max=length)] - own).double().mean((0, 1)).sum()
    return float(kept), float((before[-1] - own).sum())  # a dense cache keeps every entry to the end


def certificate(sampler: Tensor, replayed: Tensor | None, mask: Tensor, advantages: Tensor) -> TelemetryRow:
    """What the ledger says of this step's rollouts: near 0 in every arm, or sampler and ledger disagree."""
    if replayed is None:
        return dict.fromkeys(CERTIFICATE)
    panel = mismatch_panel(sampler, replayed, mask, advantages)
    return {name: panel[name.replace("shadow/", "mismatch/")] for name in CERTIFICATE}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
