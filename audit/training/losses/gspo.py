"""One ratio per rollout: what is clipped is the sequence, as it is the sequence that was rewarded."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from kvaudit.audit.training.losses.base import LossInputs
from kvaudit.audit.training.losses.grpo import Grpo

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(Grpo):
    """Zheng 2025, eq. 13 and 14 (2507.18071): as grpo with w_t = sg(s) pi_t / sg(pi_t), s = (pi / pi_old)^(1/|o|).

    Value and gradient are those of eq. 5 where all tokens of a rollout have one advantage and weight; this form lets
    both differ by token. A token that a correction dropped still counts in s.
    """

    name = "gspo"
    defaults = MappingProxyType({"epsilon_low": 3e-4, "epsilon_high": 4e-4})

    def ratio(self, inputs: LossInputs) -> Tensor:
        import torch

        log_ratio = torch.where(inputs.mask, inputs.logprobs - inputs.correction.old_logprobs, 0.0)
        sequence = log_ratio.sum(dim=1, keepdim=True) / inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
        return (sequence.detach() + (log_ratio - log_ratio.detach())).exp()
