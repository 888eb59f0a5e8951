"""The sum over tokens over a constant, so that long wrong answers are not favoured."""

from __future__ import annotations

import torch
from torch import Tensor

from kvaudit.audit.training.losses.base import ClippedLoss, LossInputs


class DrGrpo(ClippedLoss):
    """Liu 2025, eq. 3 (2503.20783): -1/(B L) sum_i sum_t m c min(w A, clip(w, 1-low, 1+high) A), A without std."""

    name = "dr_grpo"
    by_std = False

    def share(self, inputs: LossInputs) -> Tensor:
        return torch.full_like(inputs.logprobs[:, :1], 1.0 / (inputs.whole.max_tokens * inputs.whole.rows))
