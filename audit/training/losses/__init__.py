"""Losses: one file each, found by walking this package; ``LOSSES.get(name)()`` is called on ``LossInputs``."""

from kvaudit.audit.training.losses.base import (
    LOSSES,
    ClippedLoss,
    CriticInputs,
    Loss,
    LossInputs,
    LossOutputs,
    StepCounts,
    full_kl,
)

__all__ = ["LOSSES", "ClippedLoss", "CriticInputs", "Loss", "LossInputs", "LossOutputs", "StepCounts", "full_kl"]
