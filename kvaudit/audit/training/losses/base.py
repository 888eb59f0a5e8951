"""The contract of a loss, and the parts that losses share; pure functions of log-probs.

w = pi / pi_old per token, c the correction's weight, A the token's advantage, m the sampled tokens:

    - sum over rollouts and tokens of m c gain(w, A) share + beta share k3 + distill_weight share KL(learner || teacher)

Departures from the papers: two clip bounds (Yu 2025, 2503.14476); c and the token mask; the KL terms average like the
policy term and are not weighted by c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvaudit.audit.training.losses.base import BatchRewards, Estimate, group_advantages
from kvaudit.audit.training.corrections import Correction
from kvaudit.core.plugins import Registry

if TYPE_CHECKING:
    from torch import Tensor


class StepCounts(NamedTuple):
    """What the gradient step holds, of which a microbatch is a part."""

    rows: int  # rollouts
    tokens: int  # sampled tokens of graded rollouts
    pairs: int  # groups in which anything has an advantage
    max_tokens: int  # the most tokens that a rollout can sample, L of dr_grpo

    @classmethod
    def of(cls, advantages: Tensor, mask: Tensor, group: int, max_tokens: int) -> StepCounts:
        """The counts of whole groups; advantages and mask [B, T]."""
        import torch

        some = (advantages != 0).view(len(mask) // group, -1).any(dim=1).sum()
        tokens, pairs = torch.stack([mask.sum(), some]).tolist()
        return cls(len(mask), tokens, pairs, max_tokens)


class CriticInputs(NamedTuple):
    """A critic's side of a microbatch, [B, T]; ``values`` carry the gradient of the value head."""

    values: Tensor
    old: Tensor  # before the first update
    returns: Tensor
    clip: float


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One microbatch, of whole groups where the loss asks for them.

    Log-probs are nats [B, T]; ``logprobs`` and ``distill_kl`` carry gradient.
    """

    logprobs: Tensor
    correction: Correction
    advantages: Tensor  # [B, T], 0 outside the mask
    mask: Tensor  # bool [B, T], sampled tokens of graded rollouts
    group: int
    counts: StepCounts
    epsilon_low: float
    epsilon_high: float
    beta: float = 0.0
    ref_logprobs: Tensor | None = None
    distill_weight: float = 0.0
    distill_kl: Tensor | None = None  # [B, T], nats
    critic: CriticInputs | None = None

    @property
    def active(self) -> Tensor:
        """The tokens that take part in the policy's gradient, bool [B, T]."""
        return self.mask & self.correction.keep


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """``loss`` is a scalar with gradient; ``metrics`` are sums over tokens, so that microbatches add up.

    Numbers, or tensors [] that are read once a batch is done.
    """

    loss: Tensor
    metrics: dict[str, Tensor | float]


class Loss:
    """A policy loss. Subclass in a file of its own, with a ``name``; the registry finds it.

    What a loss gives for a gradient step is the sum of what it gives for its microbatches.
    ``defaults`` are values of the ``train`` section that stand where a spec gives none.
    """

    name: ClassVar[str] = ""
    whole_groups: ClassVar[bool] = False  # whether it compares rollouts of a group, which then stays in one microbatch
    reference: ClassVar[bool] = False  # whether it cannot do without reference log-probs
    critic: ClassVar[bool] = False  # whether it needs a value head
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def estimate(self, rewarded: BatchRewards) -> Estimate:
        """The advantage of every token, from the rewards of whole groups."""
        raise NotImplementedError

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss of a microbatch."""
        raise NotImplementedError


class ClippedLoss(Loss):
    """A loss of the form at the top of this file: write ``share``, and what else departs from it."""

    by_std: ClassVar[bool] = True  # whether its advantages are over their group's standard deviation

    def estimate(self, rewarded: BatchRewards) -> Estimate:
        """The same advantage for every token of a rollout, from its group (Shao 2024, 2402.03300)."""
        rows = group_advantages(rewarded.rewards, rewarded.graded, rewarded.group, by_std=self.by_std)
        return Estimate(rows[:, None] * rewarded.mask)

    def share(self, inputs: LossInputs) -> Tensor:
        """How much each token counts, broadcastable to [B, T]."""
        raise NotImplementedError

    def ratio(self, inputs: LossInputs) -> Tensor:
        """w [B, T]; 1 where a token takes no part."""
        # Padding and foreign tokens may hold anything: replace before exp, or inf times 0 becomes NaN in the gradient.
        return (inputs.logprobs - inputs.correction.old_logprobs).where(inputs.active, 0.0).exp()

    def gain(self, ratio: Tensor, inputs: LossInputs) -> Tensor:
        """What each token is worth [B, T], from w [B, T]; this one is clipped (Schulman 2017)."""
        return clipped_surrogate(ratio, inputs.advantages, inputs.epsilon_low, inputs.epsilon_high)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        share, active = self.share(inputs), inputs.active
        ratio = self.ratio(inputs)
        gain = self.gain(ratio, inputs)  # [B, T], in units of the advantage
        loss = -(gain * inputs.correction.weights * active * share).sum()
        clipped = active & (gain < ratio * inputs.advantages)  # the minimum took the clipped side
        metrics: dict[str, Tensor | float] = {"clipped": clipped.sum()}
        if inputs.ref_logprobs is not None:
            per_token = reference_kl(inputs)  # nats [B, T]
            loss = loss + inputs.beta * (per_token * share).sum()
            metrics["kl_ref"] = per_token.detach().sum()
        return add_distillation(inputs, share, LossOutputs(loss, metrics))


def token_mean_share(inputs: LossInputs) -> Tensor:
    """Share of a token where all sampled tokens of the step count alike: [B, 1]."""
    return inputs.logprobs.new_full((len(inputs.mask), 1), 1.0 / max(inputs.counts.tokens, 1))


def reference_kl(inputs: LossInputs) -> Tensor:
    """k3 to the reference per token [B, T], 0 outside the mask."""
    assert inputs.ref_logprobs is not None
    return k3(inputs.logprobs.where(inputs.mask, 0.0), inputs.ref_logprobs.where(inputs.mask, 0.0))


def add_distillation(inputs: LossInputs, share: Tensor, outputs: LossOutputs) -> LossOutputs:
    """The loss with the arm's distillation on top, where it has one; ``share`` broadcasts to [B, T]."""
    if inputs.distill_kl is None:
        return outputs
    per_token = inputs.distill_kl.where(inputs.mask, 0.0)  # nats [B, T]
    loss = outputs.loss + inputs.distill_weight * (per_token * share).sum()
    return LossOutputs(loss, outputs.metrics | {"distill_kl": per_token.detach().sum()})


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """min(w A, clip(w, 1-low, 1+high) A), all [B, T] (Schulman 2017, eq. 7, 1707.06347)."""
    return (ratio * advantages).minimum(ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """r - log r - 1 with r = ref / pi, per token (Schulman 2020, "Approximating KL divergence").

    As a loss over samples of pi its expected gradient is that of KL(ref || pi), which agrees with KL(pi || ref) near
    pi = ref; that of mean(log pi - log ref) is 0.
    """
    log_ratio = reference - logprobs  # [B, T] nats
    return log_ratio.exp() - log_ratio - 1.0


def full_kl(learner_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(learner || sg(teacher)) over the whole vocabulary, exact; logits [..., V] -> nats [...]."""
    learner = learner_logits.log_softmax(dim=-1)  # [..., V] nats
    teacher = teacher_logits.detach().log_softmax(dim=-1)
    return (learner.exp() * (learner - teacher)).sum(dim=-1)


LOSSES: Registry[Loss] = Registry("loss", "kvaudit.audit.training.losses", Loss)
