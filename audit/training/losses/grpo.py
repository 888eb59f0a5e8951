"""The mean over rollouts of the mean over their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvaudit.audit.training.losses.base import ClippedLoss, LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class Grpo(ClippedLoss):
    """Shao 2024, eq. 3 (2402.03300): -1/B sum_i 1/|o_i| sum_t m c min(w A, clip(w, 1-low, 1+high) A)."""

    name = "grpo"

    def share(self, inputs: LossInputs) -> Tensor:
        # tokens that a correction dropped still count in the length, or dropping some would raise the others
        lengths = inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
        return 1.0 / (lengths * inputs.counts.rows)
