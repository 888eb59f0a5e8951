"""The sum over tokens over a constant, so that long wrong answers are not favoured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvaudit.audit.training.losses.base import ClippedLoss, LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class DrGrpo(ClippedLoss):
    """Liu 2025, eq. 3 (2503.20783): -1/(B L) sum_i sum_t m c min(w A, clip(w, 1-low, 1+high) A), A without std."""

    name = "dr_grpo"
    by_std = False

    def share(self, inputs: LossInputs) -> Tensor:
        import torch

        return torch.full_like(inputs.logprobs[:, :1], 1.0 / (inputs.counts.max_tokens * inputs.counts.rows))
