"""The telemetry row of a training step: a flat row of numbers, and for a policy mixture the groups' policies.

``seconds_*`` are the only keys that may differ between two identical runs. None means not measurable. Names follow
verl's rollout_corr metrics where those exist.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.training.batch import Batch
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.losses.base import has_equal_rewards
from kvaudit.audit.training.mismatch import mismatch_panel
from kvaudit.audit.training.optimiser import HALF_METRICS, read_floats
from kvaudit.audit.training.rollouts import StepRollouts
from kvaudit.core.records import Outcome

TelemetryRow = dict[str, Any]
CERTIFICATE = ("shadow/max_abs_gap", "shadow/k3_kl")


class Clock:
    """The clock that records the seconds of each phase of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the seconds since the last lap, or since the start, as ``seconds_<name>``."""
        now = time.perf_counter()
        self.laps[f"seconds_{name}"], self._last = now - self._last, now


def mean_metrics(metrics: Sequence[Mapping[str, Tensor | float]], tokens: int) -> dict[str, float | None]:
    """Return the means per token of the metrics of microbatches, which are sums over tokens.

    ``tokens`` is the number of tokens of all microbatches; if it is 0, every mean is None. The device is read once.
    """
    values, totals = iter(read_floats([value for sums in metrics for value in sums.values()])), dict[str, float]()
    for name in (name for sums in metrics for name in sums):
        totals[name] = totals.get(name, 0.0) + next(values)
    return {name: total / tokens if tokens else None for name, total in totals.items()}


class LearningResult(NamedTuple):
    """The results of the gradient steps on one batch.

    ``metrics`` are means (nats) over the tokens of graded rollouts and over all updates; None if no rollout is graded.
    """

    logprobs: Tensor  # [B, R], under the arm's view before the first update, 0 where nothing was sampled
    advantages: Tensor  # [B, R]
    loss: float  # of the last update
    grad_norm: float | None  # of the last update; None if any update was skipped
    metrics: dict[str, float | None]


def step_row(
    step: int,
    config: TrainConfig,
    sampled: StepRollouts,
    batch: Batch,
    learned: LearningResult,
    replayed: Tensor | None,
) -> TelemetryRow:
    """Return all numbers of a step except its seconds.

    ``replayed`` [B, R] are the learner's log-probs with the cache that the sampler had; None at steps without this
    check.
    """
    rows, rewards = sampled.graded_rows, sampled.rewards
    row: TelemetryRow = {"step": step}
    row |= reward_numbers(rows, rewards, config) | learning_numbers(learned) | memory_numbers(rows, batch)
    row |= mismatch_panel(batch.sampler_logprobs, learned.logprobs, batch.sampled, learned.advantages)
    row |= certificate(batch.sampler_logprobs, replayed, batch.sampled, learned.advantages)
    row["groups_sampled_again"] = sampled.resampled_groups
    draws = config.rollout_policy.draws
    if len(draws) > 1:  # a mixture: the index of the policy that each group drew
        row["group_policies"] = [draws.index(policy) for policy in sampled.policies]
    return row


def reward_numbers(rows: Sequence[GradedRow], rewards: Sequence[float | None], config: TrainConfig) -> TelemetryRow:
    """Return the mean rewards, overall and by suite, and two shares: groups with equal rewards and unusable answers.

    The standard deviation of the rewards and the mean length of answers are added.
    """
    graded = [reward for reward in rewards if reward is not None]
    groups = [rewards[start : start + config.group] for start in range(0, len(rewards), config.group)]
    outcomes = [row.grade.outcome for row in rows]
    row: TelemetryRow = {
        "reward_mean": _mean(graded),
        "reward_std": statistics.pstdev(graded) if graded else None,
        "frac_reward_zero_std": _mean([has_equal_rewards(group) for group in groups]),
        "frac_degenerate": sum(map(outcomes.count, (Outcome.DEGENERATE, Outcome.TRUNCATED))) / len(rows),
        "frac_truncated": outcomes.count(Outcome.TRUNCATED) / len(rows),
        "frac_unscored": rewards.count(None) / len(rows),
        "length_mean": _mean([row.new_tokens for row in rows]),
    }
    for name in config.suites:
        suite_rewards = [reward for row, reward in zip(rows, rewards, strict=True) if row.item.suite == name]
        row[f"reward/{name}"] = _mean([reward for reward in suite_rewards if reward is not None])
    return row


def learning_numbers(learned: LearningResult) -> TelemetryRow:
    """Return the loss, its gradient's norm, KL terms, and the shares that the clip and the correction took out.

    The shares are of tokens, and for a correction that rejects whole rollouts also of rollouts.
    """
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


def memory_numbers(rows: Sequence[GradedRow], batch: Batch) -> TelemetryRow:
    """Return token counts, the peak bytes of the rollouts' caches, and what compression saved.

    The saving is the share of a full cache's entries that decoding did not have to read.
    """
    rollouts = batch.rollouts
    seen, dense = (sum(counts) for counts in zip(*map(entries_seen, rollouts), strict=True))
    return {
        "learner_tokens": batch.learner_tokens,
        "prompt_tokens_mean": _mean([row.prompt_tokens for row in rows]),
        "kv_bytes_peak": sum(rollout.kv_bytes_peak for rollout in rollouts),
        "kv_bytes_dense": sum(rollout.kv_bytes_dense for rollout in rollouts),
        "token_savings": 1.0 - seen / dense if dense else None,
    }


def entries_seen(rollout: Rollout) -> tuple[float, float]:
    """Return how many cache entries a rollout's decoding queries read, and how many they would read from a full cache.

    A decoding query is that of a token after which a token was sampled. Both numbers are sums over these queries; the
    first is a mean over layers and KV heads.
    """
    length = len(rollout.ids)
    queries = torch.zeros(length, dtype=torch.int64)
    queries[rollout.sampled.nonzero()[:, 0] - 1] = 1  # 1 at every token whose query drew the next one
    before = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)])  # [T + 1], queries with a lower index
    first = before[:-1]  # an entry is seen from its own query on
    # queries from an entry's own to its eviction [L, H, T]: mean over layers and heads, sum over entries
    seen = (before[rollout.evicted_at.long().clamp(max=length)] - first).double().mean((0, 1)).sum()
    return float(seen), float((before[-1] - first).sum())


def certificate(sampler: Tensor, replayed: Tensor | None, mask: Tensor, advantages: Tensor) -> TelemetryRow:
    """Return numbers of the gap between the sampler's log-probs and a replay's.

    The replay is the learner's pass over the same tokens with the cache that the sampler had. The numbers are near 0 in
    every arm if sampling and replay agree, and None without a replay.
    """
    if replayed is None:
        return dict.fromkeys(CERTIFICATE)
    panel = mismatch_panel(sampler, replayed, mask, advantages)
    return {name: panel[name.replace("shadow/", "mismatch/")] for name in CERTIFICATE}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
