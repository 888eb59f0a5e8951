"""The mean over all tokens of a step, so that a long rollout counts for its length."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from kvaudit.audit.training.losses.base import ClippedLoss, LossInputs, token_mean

if TYPE_CHECKING:
    from torch import Tensor


class Dapo(ClippedLoss):
    """Yu 2025, eq. 8 (2503.14476): -1/N sum_i sum_t m c min(w A, clip(w, 1-low, 1+high) A), N sampled tokens.

    By default the upper bound is wider, a group whose rewards are all alike is sampled again, and the last fifth of the
    length that is allowed costs reward. Departures: the same question is asked again with other seeds, and not another
    one, since arms are paired by what they are asked; a group that stays alike after ``resample`` rounds is kept, and
    teaches nothing.
    """

    name = "dapo"
    defaults = MappingProxyType({"epsilon_high": 0.28, "resample": 3, "overlong": 0.2})

    def share(self, inputs: LossInputs) -> Tensor:
        return token_mean(inputs)
