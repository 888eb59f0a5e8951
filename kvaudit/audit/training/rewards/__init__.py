"""Rewards, one file each, found by walking this package (``base.REWARDS``)."""
