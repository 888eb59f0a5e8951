"""Losses: one file each, found by walking this package; ``LOSSES.get(name)()`` is called on ``LossInputs``."""

from audit.training.losses.base import LOSSES, Loss, LossInputs, LossOutputs, full_kl

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutputs", "full_kl"]
