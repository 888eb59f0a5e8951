"""Advantages: what each sampled token was worth; pure functions of rewards, and of a critic's values where one is.

Rows of a group are consecutive. A rollout that nobody could grade takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


STD_FLOOR = 1e-6  # reward units
WHITE_FLOOR = 1e-8  # of a variance


class BatchRewards(NamedTuple):
    """What a batch earned. ``values`` [B, T] are the critic's before the first update, None without a critic."""

    rewards: Tensor  # [B], 0 where not graded
    graded: Tensor  # bool [B]
    mask: Tensor  # bool [B, T], sampled tokens of graded rollouts
    group: int
    values: Tensor | None = None
    discount: float = 1.0
    trace: float = 1.0


class Estimate(NamedTuple):
    """What a loss makes of that, [B, T], 0 outside the mask; ``returns`` are what a critic learns."""

    advantages: Tensor
    returns: Tensor | None = None


def alike(rewards: Sequence[float | None]) -> bool:
    """Whether a group's graded rewards are all equal, so that it has no advantage and teaches nothing."""
    return len({reward for reward in rewards if reward is not None}) <= 1


def group_advantages(rewards: Tensor, graded: Tensor, group: int, *, by_std: bool) -> Tensor:
    """Reward minus its group's mean, over the group's population std if asked; 0 for ungraded rows.

    rewards [B], graded bool [B]; returns [B]. 0 where all rewards of a group are equal.
    """
    assert rewards.ndim == 1, rewards.shape
    assert len(rewards) % group == 0, (len(rewards), group)
    values, known = rewards.view(-1, group), graded.view(-1, group)  # [B / group, group]
    count = known.sum(dim=1, keepdim=True).clamp(min=1)
    mean = (values * known).sum(dim=1, keepdim=True) / count  # [B / group, 1]; ungraded rows hold 0 and are not counted
    centred = (values - mean) * known
    if by_std:
        std = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()  # [B / group, 1], in reward units
        centred = (centred / std.clamp(min=STD_FLOOR)).where(std > STD_FLOOR, 0.0)
    return centred.reshape(-1)


def best_and_worst(rewards: Tensor, graded: Tensor, group: int) -> Tensor:
    """1 for the best rollout of each group, -1 for its worst, 0 else [B]; the first of several that are alike.

    A group whose rewards are all equal has neither.
    """
    values, known = rewards.view(-1, group), graded.view(-1, group)
    # each [B / group], the index of the first where several are best
    high, best = values.masked_fill(~known, float("-inf")).max(dim=1)
    low, worst = values.masked_fill(~known, float("inf")).min(dim=1)
    apart = (high > low).to(rewards.dtype)[:, None]  # [B / group, 1]: 0 where all are alike
    neither = values.new_zeros(values.shape)
    return neither.scatter(1, best[:, None], apart).scatter(1, worst[:, None], -apart).reshape(-1)


def generalised_advantages(rewarded: BatchRewards) -> Estimate:
    """GAE (Schulman 2016, eq. 16, 1506.02438), the reward at a rollout's last sampled token; returns A + V.

    delta_t = r_t + discount V_(t+1) - V_t, A_t = delta_t + discount trace A_(t+1). Time counts sampled tokens, so
    what a tool said between two turns takes none. The value behind the last token is 0.
    """
    assert rewarded.values is not None
    values, mask = rewarded.values, rewarded.mask
    rewards, result = rewarded.rewards, values.new_zeros(values.shape)  # paid once, at the first token met here
    later = ahead = rewards.new_zeros(rewards.shape)  # V and A of the next sampled token
    # backwards, so that each column finds what follows it in later and ahead
    for column in reversed(range(values.shape[1])):
        here, value = mask[:, column], values[:, column]  # bool [B] and [B]
        advantage = rewards + rewarded.discount * later - value + rewarded.discount * rewarded.trace * ahead
        result[:, column] = advantage.where(here, 0.0)
        later, ahead = value.where(here, later), advantage.where(here, ahead)
        rewards = rewards.where(~here, 0.0)
    return Estimate(result, (result + values) * mask)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the mask, 0 elsewhere; values [B, T]. Fewer than two tokens are only centred."""
    chosen = values[mask]  # [n], all tokens of the batch together: a rollout is not whitened by itself
    if not len(chosen):
        return values.new_zeros(values.shape)
    spread = chosen.var() if len(chosen) > 1 else chosen.new_ones(())  # of one token it would be NaN
    return (values - chosen.mean()) * (spread + WHITE_FLOOR).rsqrt() * mask


def overlong_penalty(lengths: Tensor, most: Tensor, share: float) -> Tensor:
    """0 up to (1 - share) most sampled tokens, then linearly down to -1 at ``most`` (Yu 2025, eq. 13, 2503.14476).

    lengths and most [B] or [], share in (0, 1]; returns [B].
    """
    last = share * most
    return ((most - last - lengths) / last).clamp(-1.0, 0.0)  # 0 at most - last tokens, -1 at most
