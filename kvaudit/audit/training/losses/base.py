"""The base class of losses, and the advantages and terms that losses share; pure functions of rewards and log-probs.

w = pi / pi_old per token, c the correction's weight, A the token's advantage, m = 1 for tokens with a policy gradient
(``LossInputs.active``). A subclass of ``ClippedLoss`` defines gain(w, A) and share, the token's weight in the average:

    - sum over rollouts and tokens of m c gain(w, A) share + beta share k3 + distill_weight share KL(learner || teacher)

Departures from the papers: the lower and the upper clip bound may differ (Yu 2025, 2503.14476); the factors c and m are
added; the KL terms are averaged like the policy term, but not weighted by c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvaudit.audit.training.corrections import Correction
from kvaudit.core.plugins import Registry

if TYPE_CHECKING:
    from torch import Tensor

STD_FLOOR = 1e-6  # reward units
VARIANCE_FLOOR = 1e-8


class StepCounts(NamedTuple):
    """The sizes of a whole gradient step; each microbatch's loss is divided by them, so that the losses add up."""

    rows: int  # rollouts
    tokens: int  # sampled tokens of graded rollouts
    pairs: int  # groups with any advantage
    max_tokens: int  # the most tokens that a rollout can have, L of dr_grpo

    @classmethod
    def of(cls, advantages: Tensor, mask: Tensor, group: int, max_tokens: int) -> StepCounts:
        """Return the sizes of a step of whole groups, with ``group`` rollouts each; advantages and mask are [B, T]."""
        import torch

        pairs = (advantages != 0).view(len(mask) // group, -1).any(dim=1).sum()
        tokens, pairs = torch.stack([mask.sum(), pairs]).tolist()
        return cls(len(mask), tokens, pairs, max_tokens)


class CriticInputs(NamedTuple):
    """The inputs of the value loss for a microbatch, [B, T] each; ``values`` carry the value head's gradient."""

    values: Tensor
    old: Tensor  # values before the first update
    returns: Tensor
    clip: float


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of the loss for one microbatch; log-probs are nats [B, T].

    ``logprobs`` and ``distill_kl`` carry gradient. A microbatch consists of whole groups if the loss needs them.
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
        """The tokens that get a policy gradient, bool [B, T]: sampled, graded, and kept by the arm's correction."""
        return self.mask & self.correction.keep


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """A microbatch's loss, a scalar with gradient, and ``metrics``: sums over its tokens (floats or 0-d tensors)."""

    loss: Tensor
    metrics: dict[str, Tensor | float]


class BatchRewards(NamedTuple):
    """The rewards of a batch and, with a critic, its ``values`` [B, T] before the first update.

    ``discount`` and ``trace`` are gamma and lambda of GAE.
    """

    rewards: Tensor  # [B], 0 if not graded
    graded: Tensor  # bool [B]
    mask: Tensor  # bool [B, T], sampled tokens of graded rollouts
    group: int
    values: Tensor | None = None
    discount: float = 1.0
    trace: float = 1.0


class Estimate(NamedTuple):
    """The advantages [B, T], 0 outside the mask, and ``returns`` [B, T], the targets of a critic if there is one."""

    advantages: Tensor
    returns: Tensor | None = None


class Loss:
    """The base of policy losses; subclass it in a file of its own, with a ``name``, and the registry finds it.

    The losses of the microbatches of a gradient step must add up to the loss of the step. ``defaults`` are settings of
    the spec's ``train`` section that apply if the spec does not set them.
    """

    name: ClassVar[str] = ""
    whole_groups: ClassVar[bool] = False  # whether it compares rollouts, so that a group must stay in one microbatch
    reference: ClassVar[bool] = False  # whether it needs reference log-probs
    critic: ClassVar[bool] = False  # whether it needs a value head
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def estimate(self, batch: BatchRewards) -> Estimate:
        """Return the advantage of every token, and the targets of a critic, from the rewards of whole groups."""
        raise NotImplementedError

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the loss of a microbatch."""
        raise NotImplementedError


class ClippedLoss(Loss):
    """A policy loss: a weighted sum of the tokens' gains, which are clipped by default, plus KL terms.

    The module's docstring has the formula. A subclass defines ``share``, each token's weight in the sum, and overrides
    other parts as needed.
    """

    by_std: ClassVar[bool] = True  # whether advantages are divided by their group's standard deviation

    def estimate(self, batch: BatchRewards) -> Estimate:
        """Give all tokens of a rollout one advantage: its reward relative to its group (Shao 2024, 2402.03300)."""
        rows = group_advantages(batch.rewards, batch.graded, batch.group, by_std=self.by_std)
        return Estimate(rows[:, None] * batch.mask)

    def share(self, inputs: LossInputs) -> Tensor:
        """Return the weight of each token in the average, broadcastable to [B, T]."""
        raise NotImplementedError

    def ratio(self, inputs: LossInputs) -> Tensor:
        """Return the probability ratio w = pi / pi_old [B, T]; 1 for tokens without gradient."""
        # masked before exp: padding may hold anything, and inf times 0 would be NaN in the gradient
        return (inputs.logprobs - inputs.correction.old_logprobs).where(inputs.active, 0.0).exp()

    def gain(self, ratio: Tensor, inputs: LossInputs) -> Tensor:
        """Return gain(w, A), each token's objective [B, T], for ratios w [B, T]; here clipped (Schulman 2017)."""
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


# --- terms of a loss -----------------------------------------------------------------------------------------------


def token_mean_share(inputs: LossInputs) -> Tensor:
    """Return [B, 1]: the weight of a token in the mean over all sampled tokens of the gradient step."""
    return inputs.logprobs.new_full((len(inputs.mask), 1), 1.0 / max(inputs.counts.tokens, 1))


def reference_kl(inputs: LossInputs) -> Tensor:
    """Return the KL estimate ``k3`` between policy and reference model per token [B, T], 0 outside the mask."""
    assert inputs.ref_logprobs is not None
    return k3(inputs.logprobs.where(inputs.mask, 0.0), inputs.ref_logprobs.where(inputs.mask, 0.0))


def add_distillation(inputs: LossInputs, share: Tensor, outputs: LossOutputs) -> LossOutputs:
    """Return ``outputs`` plus the distillation term, if there is one.

    ``share``, broadcastable to [B, T], is each token's weight.
    """
    if inputs.distill_kl is None:
        return outputs
    per_token = inputs.distill_kl.where(inputs.mask, 0.0)  # nats [B, T]
    loss = outputs.loss + inputs.distill_weight * (per_token * share).sum()
    return LossOutputs(loss, outputs.metrics | {"distill_kl": per_token.detach().sum()})


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return min(w A, clip(w, 1-low, 1+high) A), all [B, T] (Schulman 2017, eq. 7, 1707.06347)."""
    return (ratio * advantages).minimum(ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return r - log r - 1 with r = ref / pi, per token (Schulman 2020, "Approximating KL divergence").

    As a loss over samples of pi its expected gradient is that of KL(ref || pi), which agrees with KL(pi || ref) near
    pi = ref. The expected gradient of mean(log pi - log ref), the other usual estimate, is 0.
    """
    log_ratio = reference - logprobs  # [B, T] nats
    return log_ratio.exp() - log_ratio - 1.0


def full_kl(learner_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return KL(learner || teacher) over the whole vocabulary, in nats [...], from logits [..., V].

    The teacher gets no gradient.
    """
    learner = learner_logits.log_softmax(dim=-1)  # [..., V] nats
    teacher = teacher_logits.detach().log_softmax(dim=-1)
    return (learner.exp() * (learner - teacher)).sum(dim=-1)


# --- advantages; rows of a group are consecutive, ungraded rollouts have none ---------------------------------------


def has_equal_rewards(rewards: Sequence[float | None]) -> bool:
    """Return whether the rewards of a group's graded rollouts are all equal, so that its advantages are all 0."""
    return len({reward for reward in rewards if reward is not None}) <= 1


def group_advantages(rewards: Tensor, graded: Tensor, group: int, *, by_std: bool) -> Tensor:
    """Return each reward minus the mean of its group [B]; with ``by_std``, divide by the group's population std.

    ``rewards`` [B] and ``graded`` bool [B] are in order of groups. The result is 0 for ungraded rows, and for groups
    whose rewards are all equal.
    """
    assert rewards.ndim == 1, rewards.shape
    assert len(rewards) % group == 0, (len(rewards), group)
    values, valid = rewards.view(-1, group), graded.view(-1, group)  # [B / group, group]
    count = valid.sum(dim=1, keepdim=True).clamp(min=1)
    mean = (values * valid).sum(dim=1, keepdim=True) / count  # [B / group, 1]
    centred = (values - mean) * valid
    if by_std:
        std = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()  # [B / group, 1], in reward units
        centred = (centred / std.clamp(min=STD_FLOOR)).where(std > STD_FLOOR, 0.0)
    return centred.reshape(-1)


def best_and_worst(rewards: Tensor, graded: Tensor, group: int) -> Tensor:
    """Return [B]: 1 for the best graded rollout of each group, -1 for the worst, 0 for others; ties go to the first.

    A group with equal rewards has no best or worst. ``rewards`` [B] and ``graded`` bool [B] are in order of groups.
    """
    values, valid = rewards.view(-1, group), graded.view(-1, group)
    # each [B / group]
    high, best = values.masked_fill(~valid, float("-inf")).max(dim=1)
    low, worst = values.masked_fill(~valid, float("inf")).min(dim=1)
    sign = (high > low).to(rewards.dtype)[:, None]  # [B / group, 1]: 0 if all are equal
    zeros = values.new_zeros(values.shape)
    return zeros.scatter(1, best[:, None], sign).scatter(1, worst[:, None], -sign).reshape(-1)


def generalised_advantages(batch: BatchRewards) -> Estimate:
    """Return generalised advantage estimates, GAE (Schulman 2016, eq. 16, 1506.02438), and the critic's targets.

    delta_t = r_t + discount V_(t+1) - V_t, A_t = delta_t + discount trace A_(t+1), where discount is gamma and trace is
    lambda. r is the rollout's reward at its last sampled token and 0 before. The steps t are the sampled tokens only;
    tool replies between turns are skipped. The value V after the last token is 0. The targets ``returns`` are A + V.
    """
    assert batch.values is not None
    values, mask = batch.values, batch.mask
    rewards, advantages = batch.rewards, values.new_zeros(values.shape)
    next_value = next_advantage = rewards.new_zeros(rewards.shape)  # of the next sampled token
    for column in reversed(range(values.shape[1])):
        is_sampled, value = mask[:, column], values[:, column]  # bool [B] and [B]
        advantage = rewards + batch.discount * next_value - value + batch.discount * batch.trace * next_advantage
        advantages[:, column] = advantage.where(is_sampled, 0.0)
        next_value, next_advantage = value.where(is_sampled, next_value), advantage.where(is_sampled, next_advantage)
        rewards = rewards.where(~is_sampled, 0.0)  # paid once, at the last sampled token
    return Estimate(advantages, (advantages + values) * mask)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return values [B, T] shifted and scaled to mean 0 and variance 1 over the mask; they are 0 elsewhere.

    If the mask holds a single token, its value becomes 0.
    """
    chosen = values[mask]  # [n], over the whole batch
    if not len(chosen):
        return values.new_zeros(values.shape)
    variance = chosen.var() if len(chosen) > 1 else chosen.new_ones(())  # of one token it would be NaN
    return (values - chosen.mean()) * (variance + VARIANCE_FLOOR).rsqrt() * mask


def overlong_penalty(lengths: Tensor, limits: Tensor, share: float) -> Tensor:
    """Return the penalty [B] that is added to the rewards of long rollouts (Yu 2025, eq. 13, 2503.14476).

    It is 0 up to (1 - ``share``) * limit sampled tokens, then falls linearly and is -1 from the limit on. ``lengths``
    [B] are the numbers of sampled tokens, ``limits`` [B] or [] the most allowed; ``share`` is in (0, 1].
    """
    margin = share * limits
    return ((limits - margin - lengths) / margin).clamp(-1.0, 0.0)


LOSSES: Registry[Loss] = Registry("loss", "kvaudit.audit.training.losses", Loss)
