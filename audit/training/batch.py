"""A step's rollouts as padded tensors, and their split into microbatches of whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from audit.cache.ledger import Rollout


@dataclass(frozen=True)
class Batch:
    """B rollouts, groups of one prompt consecutive; R is the longest suffix, right padded.

    ``ids`` int64 [B, R]; ``sampler_logprobs`` float32 [B, R], nats; ``sampled`` bool [B, R]; ``mask`` the sampled
    tokens of graded rollouts; ``rewards`` [B], 0 where not ``graded`` [B].
    """

    rollouts: tuple[Rollout, ...]
    group: int
    ids: Tensor
    sampler_logprobs: Tensor
    sampled: Tensor
    mask: Tensor
    rewards: Tensor
    graded: Tensor

    @property
    def learner_tokens(self) -> int:
        """Tokens of one shared-prompt pass: each prompt once, and every suffix."""
        prompts = sum(rollout.prompt_length for rollout in self.rollouts[:: self.group])
        return prompts + sum(len(rollout.ids) - rollout.prompt_length for rollout in self.rollouts)


def collect(rollouts: Sequence[Rollout], scores: Sequence[float | None], group: int, device: torch.device) -> Batch:
    """Pad a step's rollouts; a score of None is not graded and takes no part in the gradient."""
    rows, width = len(rollouts), max(len(rollout.ids) - rollout.prompt_length for rollout in rollouts)
    ids = torch.zeros(rows, width, dtype=torch.int64)
    logprobs, sampled = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        start, length = rollout.prompt_length, len(rollout.ids) - rollout.prompt_length
        ids[row, :length] = rollout.ids[start:]
        logprobs[row, :length] = rollout.sampler_logprobs[start:]
        sampled[row, :length] = rollout.sampled[start:]
    graded = torch.tensor([score is not None for score in scores])
    rewards = torch.tensor([0.0 if score is None else score for score in scores])
    return Batch(
        rollouts=tuple(rollouts),
        group=group,
        ids=ids.to(device),
        sampler_logprobs=logprobs.to(device),
        sampled=sampled.to(device),
        mask=(sampled & graded[:, None]).to(device),
        rewards=rewards.to(device),
        graded=graded.to(device),
    )


def microbatches(rollouts: Sequence[Rollout], group: int, limit: int) -> list[list[int]]:
    """Rows of each microbatch: whole groups, like lengths together, ``limit`` padded tokens at most.

    A group that alone has more makes a microbatch of its own.
    """
    sizes = [_group_size(rollouts[start : start + group]) for start in range(0, len(rollouts), group)]
    split: list[list[int]] = []
    taken, prompt, suffix = 0, 0, 0
    for index in sorted(range(len(sizes)), key=lambda index: (sizes[index], index)):
        wider = max(prompt, sizes[index][0]), max(suffix, sizes[index][1])
        if not split or (taken + 1) * (wider[0] + group * wider[1]) > limit:
            split.append([])
            taken, wider = 0, sizes[index]
        split[-1].extend(range(index * group, (index + 1) * group))
        taken, (prompt, suffix) = taken + 1, wider
    return split


def _group_size(members: Sequence[Rollout]) -> tuple[int, int]:
    """Prompt tokens and the longest suffix of one group."""
    prompt = members[0].prompt_length
    return prompt, max(len(rollout.ids) for rollout in members) - prompt
