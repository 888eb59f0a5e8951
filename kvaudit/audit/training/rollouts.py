"""The rollouts of a training step: questions in groups, the policy drawn for each group, and the rewards.

All draws depend on (seed, step, group, row) only, so a resumed run, and two arms, get the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvaudit.audit.cache.layers import kv_heads, layer_plans
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.policies import Dense, Policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.conversations import GradedRow, play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training.batch import TrainingItem, row_seeds
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.losses.base import has_equal_rewards
from kvaudit.audit.training.rewards.base import RewardFn


@dataclass(frozen=True)
class StepRollouts:
    """The graded rollouts of a step, ordered by group (one question each), their rewards, and each group's policy."""

    graded_rows: list[GradedRow]
    rewards: list[float | None]
    policies: list[Policy]
    resampled_groups: int = 0  # groups sampled once more because all their rewards were equal

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts, in order."""
        return [row.rollout for row in self.graded_rows]


class RolloutSampler:
    """The sampler of graded rollouts for every step; ``max_tokens`` is the largest number of tokens of any rollout."""

    def __init__(
        self,
        config: TrainConfig,
        model: LoadedModel,
        questions: Sequence[Sequence[TrainingItem]],
        reward: RewardFn,
    ) -> None:
        self._config, self._model, self._questions, self._reward = config, model, questions, reward
        # over all steps: otherwise dr_grpo's constant would depend on the items of a step
        self.max_tokens = max(suite.answer_tokens for step in questions for suite, _ in step)

    def close(self) -> None:
        """Stop the processes that sample; does nothing for kvaudit's own cache, which has none."""

    def token_limits(self, step: int) -> list[int]:
        """Return the maximum number of tokens of each rollout of a step."""
        return [suite.answer_tokens for suite, _ in self._questions[step] for _ in range(self._config.group)]

    def sample(self, step: int) -> StepRollouts:
        """Return a step's rollouts; groups with equal rewards are sampled again in up to ``resample`` rounds."""
        size, questions, resampled = self._config.group, self._questions[step], 0
        policies = group_policies(self._config, step)
        graded_rows = self._play(questions, policies, row_seeds(self._config, step))
        rewards = list(self._reward(graded_rows))
        for attempt in range(1, (self._config.resample or 0) + 1):
            # groups with equal rewards have no advantage and teach nothing
            flat = [n for n in range(len(questions)) if has_equal_rewards(rewards[n * size : (n + 1) * size])]
            if not flat:
                break
            seeds = row_seeds(self._config, step, attempt)
            rows = [row for n in flat for row in range(n * size, (n + 1) * size)]
            # under the policy already drawn: a new draw would favour policies whose rewards differ
            fresh = self._play([questions[n] for n in flat], [policies[n] for n in flat], [seeds[row] for row in rows])
            for row, graded, reward in zip(rows, fresh, self._reward(fresh), strict=True):
                graded_rows[row], rewards[row] = graded, reward
            resampled += len(flat)
        return StepRollouts(graded_rows, rewards, policies, resampled)

    def sample_final(self, steps: int) -> StepRollouts:
        """Sample the questions of step ``steps``, the last one, with the finished weights; rewards are None.

        The checkpoint is verified against these rollouts, since the weights of earlier ones are not kept.
        """
        policies = group_policies(self._config, steps)
        graded_rows = self._play(self._questions[steps - 1], policies, row_seeds(self._config, steps))
        return StepRollouts(graded_rows, [None] * len(graded_rows), policies)

    def _play(
        self, questions: Sequence[TrainingItem], policies: Sequence[Policy], seeds: Sequence[int]
    ) -> list[GradedRow]:
        """Return the graded rollouts of every question: a group for each, sampled under the question's own policy.

        ``seeds`` has one seed per rollout. At most as many rollouts run at a time as the configuration's
        ``rollout_rows`` (0: all).
        """
        config, size, by_question = self._config, self._config.group, dict[int, list[GradedRow]]()
        decoding, at_once = Decoding(self.max_tokens, temperature=config.temperature), config.rollout_rows
        for policy in dict.fromkeys(policies):
            sampler = Sampler(self._model, policy)
            # policy by policy, because all rows of a cache share its schedule
            members = [n for n, drawn in enumerate(policies) if drawn == policy]
            rows = [seeds[n * size + member] for n in members for member in range(size)]
            graded_rows = play(sampler, [questions[n] for n in members], decoding, rows, group=size, at_once=at_once)
            by_question |= {n: graded_rows[start * size : (start + 1) * size] for start, n in enumerate(members)}
        return [row for n in range(len(questions)) for row in by_question[n]]


def group_policies(config: TrainConfig, step: int) -> list[Policy]:
    """Return the policy of every group of a step; all arms that compress get the same ones.

    If the policy is a mixture, one of its policies is drawn for each group.
    """
    policy, groups = config.rollout_policy, range(config.prompts_per_step)
    return [policy.drawn(derive_seed("policy", config.seed, step, group)) for group in groups]


def rollouts_by_policy(
    stem: str, sampled: StepRollouts, config: TrainConfig
) -> Iterator[tuple[str, Policy, list[Rollout]]]:
    """Yield (file stem, policy, rollouts) for each policy that was drawn, because a ledger file has one policy."""
    size, mixed = config.group, len(config.rollout_policy.draws) > 1
    for policy in dict.fromkeys(sampled.policies):
        groups = [n for n, drawn in enumerate(sampled.policies) if drawn == policy]
        rows = [sampled.graded_rows[n * size + member].rollout for n in groups for member in range(size)]
        yield ledger_stem(stem, policy, mixed=mixed), policy, rows


def dense_rollout(config: Any, ids: Tensor, prompt_length: int, sampled: Tensor, logprobs: Tensor) -> Rollout:
    """Return a rollout without evictions; its ledger is a single "never", expanded to all entries without a copy.

    ``config`` is the model's configuration. ``ids``, ``sampled`` (bool) and ``logprobs`` (nats) are [T].
    """
    layers, heads = len(layer_plans(config, Dense())), kv_heads(config)
    return Rollout(
        ids=ids,
        prompt_length=prompt_length,
        sampled=sampled,
        sampler_logprobs=logprobs,
        evicted_at=torch.tensor(NEVER, dtype=torch.int32).expand(layers, heads, len(ids)),  # [L, H, T]
        kv_bytes_peak=0,
        kv_bytes_dense=0,
        retention=1.0,
        answer_start=prompt_length,
    )


def ledger_stem(stem: str, policy: Policy, *, mixed: bool) -> str:
    """Return the name, without its ending, of the file for rollouts under ``policy`` and their ledgers (evictions).

    It is ``stem``. If the run samples under a mixture of policies (``mixed``), the policy's hash is added.
    """
    return f"{stem}--{policy.hash}" if mixed else stem
