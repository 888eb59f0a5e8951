"""What a step samples: its questions by groups, the policy that each group draws, and what its rollouts earned.

All draws are functions of (seed, step, group, row): a resumed run, and two arms, meet the same policies and the same
uniform numbers.
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
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.sampler import Decoding, Sampler
from kvaudit.audit.training.losses.base import has_equal_rewards
from kvaudit.audit.training.batch import TrainingItem, row_seeds
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.ranks import ALONE, RankGroup
from kvaudit.audit.training.rewards.base import RewardFn
from kvaudit.audit.training.ranks import full_weights


@dataclass(frozen=True)
class StepRollouts:
    """Rollouts, groups of one question consecutive: what they earned, and the policy of each group.

    ``again`` counts groups that were sampled again since all their rewards were alike.
    """

    played: list[GradedRow]
    rewards: list[float | None]
    policies: list[Policy]
    again: int = 0

    @property
    def rollouts(self) -> list[Rollout]:
        """In their order."""
        return [row.rollout for row in self.played]


class RolloutSampler:
    """Asks the questions of every step of a run; ``max_tokens`` bounds what one rollout can sample."""

    def __init__(
        self,
        config: TrainConfig,
        model: LoadedModel,
        questions: Sequence[Sequence[TrainingItem]],
        pays: RewardFn,
        ranks: RankGroup = ALONE,
    ) -> None:
        self._config, self._model, self._questions, self._pays, self._ranks = config, model, questions, pays, ranks
        # a bound that no batch changes, or dr_grpo's constant would depend on which items a step draws
        self.max_tokens = max(suite.answer_tokens for step in questions for suite, _ in step)

    def close(self) -> None:
        """End what was started to ask them; of our own cache nothing is."""

    def allowed(self, step: int) -> list[int]:
        """The most tokens that each rollout of a step can sample."""
        return [suite.answer_tokens for suite, _ in self._questions[step] for _ in range(self._config.group)]

    def sample(self, step: int) -> StepRollouts:
        """A step's rollouts; groups whose rewards are all alike are sampled again where the configuration says so.

        Of several ranks each samples and pays its own groups, and all get those of every one.
        """
        with full_weights(self._model.model):  # rows end when they like, so ranks cannot sample in step
            own = self._sampled(step, self._own)
        return _joined(self._ranks.gathered(own))

    @property
    def _own(self) -> slice:
        own = self._ranks.share(self._config.prompts_per_step)
        return slice(own.start, own.stop)

    def _sampled(self, step: int, own: slice) -> StepRollouts:
        group, questions, again = self._config.group, self._questions[step][own], 0
        policies = group_policies(self._config, step)[own]
        rows_of_own = slice(own.start * group, own.stop * group)
        played = self._play(questions, policies, row_seeds(self._config, step)[rows_of_own])
        rewards = list(self._pays(played))  # one a row, None where nobody could tell
        for attempt in range(1, (self._config.resample or 0) + 1):
            # groups that teach nothing
            flat = [n for n in range(len(questions)) if has_equal_rewards(rewards[n * group : (n + 1) * group])]
            if not flat:
                break
            seeds = row_seeds(self._config, step, attempt)[rows_of_own]
            rows = [row for n in flat for row in range(n * group, (n + 1) * group)]
            # each under the policy it drew: a new draw would favour policies whose rewards differ
            fresh = self._play([questions[n] for n in flat], [policies[n] for n in flat], [seeds[row] for row in rows])
            for row, found, earned in zip(rows, fresh, self._pays(fresh), strict=True):
                played[row], rewards[row] = found, earned
            again += len(flat)
        return StepRollouts(played, rewards, policies, again)

    def last(self, steps: int) -> StepRollouts:
        """The questions of the last of so many steps sampled anew by the finished weights; no gradient is sampled.

        They are what the checkpoint can be verified against: earlier rollouts came from weights that are not kept.
        """
        own, group = self._own, self._config.group
        policies = group_policies(self._config, steps)[own]
        seeds = row_seeds(self._config, steps)[own.start * group : own.stop * group]
        with full_weights(self._model.model):
            played = self._play(self._questions[steps - 1][own], policies, seeds)
        return _joined(self._ranks.gathered(StepRollouts(played, [None] * len(played), policies)))

    def _play(
        self, questions: Sequence[TrainingItem], policies: Sequence[Policy], seeds: Sequence[int]
    ) -> list[GradedRow]:
        """Rollouts of every question under its own policy, ``rollout_rows`` at once."""
        config, group, found = self._config, self._config.group, dict[int, list[GradedRow]]()
        # tokens at most; rows at once, 0 for all
        decoding, at_once = Decoding(self.max_tokens, temperature=config.temperature), config.rollout_rows
        for policy in dict.fromkeys(policies):
            sampler = Sampler(self._model, policy)
            # by policy, since a cache has one: rows of a batch share its schedule
            own = [n for n, drawn in enumerate(policies) if drawn == policy]
            # item-major, group members consecutive
            rows = [seeds[n * group + member] for n in own for member in range(group)]
            played = play(sampler, [questions[n] for n in own], decoding, rows, group=group, at_once=at_once)
            found |= {n: played[place * group : (place + 1) * group] for place, n in enumerate(own)}
        return [row for n in range(len(questions)) for row in found[n]]


def _joined(parts: Sequence[StepRollouts]) -> StepRollouts:
    played, rewards = [row for part in parts for row in part.played], [one for part in parts for one in part.rewards]
    policies = [policy for part in parts for policy in part.policies]
    return StepRollouts(played, rewards, policies, sum(part.again for part in parts))


def group_policies(config: TrainConfig, step: int) -> list[Policy]:
    """The policy of every group of a step, the same in every arm that compresses: of a mixture each draws its own."""
    policy, groups = config.rollout_policy, range(config.prompts_per_step)
    return [policy.drawn(derive_seed("policy", config.seed, step, group)) for group in groups]


def rollouts_by_policy(stem: str, sampled: StepRollouts, config: TrainConfig) -> Iterator[tuple[str, Policy, list[Rollout]]]:
    """The rollouts by the policy they were sampled under, each with the stem of its file: a ledger is of one policy."""
    group, mixed = config.group, len(config.rollout_policy.draws) > 1
    for policy in dict.fromkeys(sampled.policies):
        own = [n for n, drawn in enumerate(sampled.policies) if drawn == policy]
        rows = [sampled.played[n * group + member].rollout for n in own for member in range(group)]
        yield ledger_stem(stem, policy, mixed=mixed), policy, rows


def dense_rollout(config: Any, ids: Tensor, prompt_length: int, sampled: Tensor, logprobs: Tensor) -> Rollout:
    """A rollout of a cache that nothing left, whose ledger takes no memory; ``config`` is the model's."""
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
    """The name of a ledger, without its ending: a mixture leaves one of every policy that was drawn."""
    return f"{stem}--{policy.hash}" if mixed else stem
