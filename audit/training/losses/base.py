"""The contract of a loss, and the parts that losses share; pure functions of log-probs.

w = pi / pi_old per token, c the correction's weight, A the advantage of the rollout, m the sampled tokens:

    - sum over rollouts and tokens of m c gain(w, A) share + beta share k3 + distill_weight share KL(dense || shadow)

Departures from the papers: two clip bounds (Yu 2025, 2503.14476); c and the token mask; the KL terms average like the
policy term and are not weighted by c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from audit.core.registry import Registry
from audit.training.corrections import Correction


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One microbatch. Log-probs are nats [B, T]; ``logprobs`` and ``distill_kl`` carry gradient."""

    logprobs: Tensor
    correction: Correction
    advantages: Tensor  # [B]
    mask: Tensor  # bool [B, T], sampled tokens of graded rollouts
    batch_rows: int  # rollouts of the whole batch
    max_tokens: int  # the most tokens that a rollout can sample, L of dr_grpo
    epsilon_low: float
    epsilon_high: float
    beta: float = 0.0
    ref_logprobs: Tensor | None = None
    distill_weight: float = 0.0
    distill_kl: Tensor | None = None  # [B, T], nats


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """``loss`` is a scalar with gradient; ``metrics`` are sums over tokens, so that microbatches add up."""

    loss: Tensor
    metrics: dict[str, float]


class Loss:
    """A policy loss. Subclass in a file of its own, with a ``name``; the registry finds it.

    What a loss gives for a batch is the sum of what it gives for its microbatches of whole groups.
    """

    name: ClassVar[str] = ""
    by_std: ClassVar[bool] = True  # whether its advantages are over their group's standard deviation

    def share(self, inputs: LossInputs) -> Tensor:
        """How much each token counts, broadcastable to [B, T]."""
        raise NotImplementedError

    def gain(self, ratio: Tensor, inputs: LossInputs) -> Tensor:
        """What each token is worth [B, T], from w [B, T]; this one is clipped (Schulman 2017)."""
        return clipped_surrogate(ratio, inputs.advantages, inputs.epsilon_low, inputs.epsilon_high)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss of a microbatch."""
        share, mask, correction = self.share(inputs), inputs.mask, inputs.correction
        active = mask & correction.keep
        # Padding and foreign tokens may hold anything: replace before exp, or inf times 0 becomes NaN in the gradient.
        ratio = torch.where(active, inputs.logprobs - correction.old_logprobs, 0.0).exp()
        gain = self.gain(ratio, inputs)
        loss = -(gain * correction.weights * active * share).sum()
        clipped = active & (gain < ratio * inputs.advantages[:, None])  # the minimum took the clipped side
        metrics = {"clipped": float(clipped.sum())}
        if inputs.ref_logprobs is not None:
            per_token = k3(torch.where(mask, inputs.logprobs, 0.0), torch.where(mask, inputs.ref_logprobs, 0.0))
            loss = loss + inputs.beta * (per_token * share).sum()
            metrics["kl_ref"] = float(per_token.detach().sum())
        if inputs.distill_kl is not None:
            per_token = torch.where(mask, inputs.distill_kl, 0.0)
            loss = loss + inputs.distill_weight * (per_token * share).sum()
            metrics["distill_kl"] = float(per_token.detach().sum())
        return LossOutputs(loss, metrics)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """min(w A, clip(w, 1-low, 1+high) A) [B, T] (Schulman 2017, eq. 7, 1707.06347); ratio [B, T], advantages [B]."""
    gain = advantages[:, None]
    return torch.minimum(ratio * gain, ratio.clamp(1.0 - low, 1.0 + high) * gain)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """r - log r - 1 with r = ref / pi, per token (Schulman 2020, "Approximating KL divergence").

    As a loss over samples of pi its expected gradient is that of KL(ref || pi), which agrees with KL(pi || ref) near
    pi = ref; that of mean(log pi - log ref) is 0.
    """
    log_ratio = reference - logprobs
    return log_ratio.exp() - log_ratio - 1.0


def full_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(student || sg(teacher)) over the whole vocabulary, exact; logits [..., V] -> nats [...]."""
    student = student_logits.log_softmax(dim=-1)
    teacher = teacher_logits.detach().log_softmax(dim=-1)
    return (student.exp() * (student - teacher)).sum(dim=-1)


LOSSES: Registry[Loss] = Registry("loss", "audit.training.losses", Loss)
