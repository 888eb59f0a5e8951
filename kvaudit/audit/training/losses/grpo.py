"""GRPO, and three variants that average tokens (Dr. GRPO, DAPO) or compute the ratio (GSPO) in another way."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from kvaudit.audit.training.losses.base import ClippedLoss, LossInputs, token_mean_share

if TYPE_CHECKING:
    from torch import Tensor


class Grpo(ClippedLoss):
    """The mean over rollouts of the mean over their tokens.

    Shao 2024, eq. 3 (2402.03300): -1/B sum_i 1/|o_i| sum_t m c min(w A, clip(w, 1-low, 1+high) A).
    """

    name = "grpo"

    def share(self, inputs: LossInputs) -> Tensor:
        # masked tokens count in the length, or masking some would raise the weight of the others
        lengths = inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]
        return 1.0 / (lengths * inputs.counts.rows)


class DrGrpo(ClippedLoss):
    """The sum over tokens divided by a constant, so that long wrong answers are not favoured; A without std.

    Liu 2025, eq. 3 (2503.20783): -1/(B L) sum_i sum_t m c min(w A, clip(w, 1-low, 1+high) A).
    """

    name = "dr_grpo"
    by_std = False

    def share(self, inputs: LossInputs) -> Tensor:
        count = inputs.counts.max_tokens * inputs.counts.rows
        return inputs.logprobs.new_full((len(inputs.mask), 1), 1.0 / count)


class Dapo(ClippedLoss):
    """The mean over all tokens of a step, so that rollouts count in proportion to their length.

    Yu 2025, eq. 8 (2503.14476): -1/N sum_i sum_t m c min(w A, clip(w, 1-low, 1+high) A), N sampled tokens. By default
    the upper bound is wider, groups with equal rewards are sampled again, and the last fifth of the allowed length
    costs reward. Departures: a group is sampled again with new seeds for the same question, because arms are paired by
    their questions; a group with equal rewards after ``resample`` rounds is kept and teaches nothing.
    """

    name = "dapo"
    defaults = MappingProxyType({"epsilon_high": 0.28, "resample": 3, "overlong": 0.2})

    def share(self, inputs: LossInputs) -> Tensor:
        return token_mean_share(inputs)


class Gspo(Grpo):
    """One ratio per rollout, so that clipping acts on whole sequences, as the reward does.

    Zheng 2025, eq. 13 and 14 (2507.18071): as grpo with w_t = sg(s) pi_t / sg(pi_t), s = (pi / pi_old)^(1/|o|). Value
    and gradient equal those of eq. 5 if all tokens of a rollout have one advantage and weight; here both may differ by
    token. Tokens masked by a correction count in s.
    """

    name = "gspo"
    defaults = MappingProxyType({"epsilon_low": 3e-4, "epsilon_high": 4e-4})

    def ratio(self, inputs: LossInputs) -> Tensor:
        log_ratio = (inputs.logprobs - inputs.correction.old_logprobs).where(inputs.mask, 0.0)  # [B, T] nats
        # [B, 1] nats a token
        sequence = log_ratio.sum(dim=1, keepdim=True) / inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
        # value of the whole rollout, gradient of each token
        return (sequence.detach() + (log_ratio - log_ratio.detach())).exp()
