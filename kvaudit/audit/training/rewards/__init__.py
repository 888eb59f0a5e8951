"""Rewards: one file each, found by walking this package; what a rollout earned, which the loss learns from."""
