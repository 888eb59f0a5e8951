"""Rewards, found by walking this package (``base.REWARDS``)."""
