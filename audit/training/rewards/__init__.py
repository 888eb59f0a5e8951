"""Rewards: one file each, found by walking this package; what a rollout earned, which the loss learns from."""

from kvaudit.audit.training.rewards.base import REWARDS, Paying, Pays, Reward, paying_of

__all__ = ["REWARDS", "Paying", "Pays", "Reward", "paying_of"]
