"""The losses that papers describe: GRPO with three variants, PPO, and online DPO."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from kvaudit.audit.training.losses.base import (
    BatchRewards,
    ClippedLoss,
    Estimate,
    Loss,
    LossInputs,
    LossOutputs,
    add_distillation,
    best_and_worst,
    generalised_advantages,
    reference_kl,
    token_mean_share,
    whiten,
)

if TYPE_CHECKING:
    from torch import Tensor


class Grpo(ClippedLoss):
    """The mean over rollouts of the mean over their tokens.

    Shao 2024, eq. 3 (2402.03300): -1/B sum_i 1/|o_i| sum_t m c min(w A, clip(w, 1-low, 1+high) A), where m is the mask
    and c the weight that the correction gives a token.
    """

    name = "grpo"

    def share(self, inputs: LossInputs) -> Tensor:
        # masked tokens count in the length, or masking some would raise the weight of the others
        lengths = inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]
        return 1.0 / (lengths * inputs.counts.rows)


class DrGrpo(ClippedLoss):
    """The sum over tokens divided by a constant, so that long wrong answers are not favoured.

    Advantages are not divided by the standard deviation. Liu 2025, eq. 3 (2503.20783):
    -1/(B L) sum_i sum_t m c min(w A, clip(w, 1-low, 1+high) A), where L is the largest token limit of any rollout, m
    the mask and c the weight that the correction gives a token.
    """

    name = "dr_grpo"
    by_std = False

    def share(self, inputs: LossInputs) -> Tensor:
        count = inputs.counts.max_tokens * inputs.counts.rows
        return inputs.logprobs.new_full((len(inputs.mask), 1), 1.0 / count)


class Dapo(ClippedLoss):
    """The mean over all tokens of a step, so that rollouts count in proportion to their length.

    Yu 2025, eq. 8 (2503.14476): -1/N sum_i sum_t m c min(w A, clip(w, 1-low, 1+high) A), where N is the number of
    sampled tokens, m the mask and c the weight that the correction gives a token. By default the upper bound is wider,
    groups with equal rewards are sampled again, and the last fifth of the allowed length costs reward.

    Departures: a group is sampled again with new seeds for the same question, because arms are paired by their
    questions; a group with equal rewards after ``resample`` rounds is kept and teaches nothing.
    """

    name = "dapo"
    defaults = MappingProxyType({"epsilon_high": 0.28, "resample": 3, "overlong": 0.2})

    def share(self, inputs: LossInputs) -> Tensor:
        return token_mean_share(inputs)


class Gspo(Grpo):
    """One ratio per rollout, so that clipping acts on whole sequences, as the reward does.

    Zheng 2025, eq. 13 and 14 (2507.18071): the loss of grpo with w_t = sg(s) pi_t / sg(pi_t). Here s is
    (pi / pi_old)^(1/|o|) of the whole rollout, |o| its number of tokens, and sg stops the gradient. Advantages and
    weights may differ by token; if they do not within a rollout, value and gradient equal those of eq. 5. Tokens that a
    correction masks count in s.
    """

    name = "gspo"
    defaults = MappingProxyType({"epsilon_low": 3e-4, "epsilon_high": 4e-4})

    def ratio(self, inputs: LossInputs) -> Tensor:
        log_ratio = (inputs.logprobs - inputs.correction.old_logprobs).where(inputs.mask, 0.0)  # [B, T] nats
        # [B, 1] nats a token
        sequence = log_ratio.sum(dim=1, keepdim=True) / inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
        # value of the whole rollout, gradient of each token
        return (sequence.detach() + (log_ratio - log_ratio.detach())).exp()


class Ppo(ClippedLoss):
    """The token means of the clipped policy loss and the clipped value loss (Schulman 2017, eq. 9, 1707.06347).

    The critic reads what the arm's learner reads (its view): in the dense view the whole text before a token, in the
    shadow view what the sampler's cache still held. Arm ``naive`` and the corrected arms therefore have values of the
    dense state although the sampler was compressed. Advantages are whitened over the batch (as in Ziegler 2019,
    1909.08593).

    Departures: the critic is a linear head on the policy's last hidden states, without gradient to them and with its
    own optimiser, so that arms differ in the policy term only; no entropy bonus; the KL to the reference is a term of
    the loss (``beta``), not of the reward.
    """

    name = "ppo"
    critic = True

    def estimate(self, batch: BatchRewards) -> Estimate:
        estimate = generalised_advantages(batch)
        return estimate._replace(advantages=whiten(estimate.advantages, batch.mask))

    def share(self, inputs: LossInputs) -> Tensor:
        return token_mean_share(inputs)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        policy = super().__call__(inputs)
        if inputs.critic is None:
            return policy
        critic = inputs.critic
        # values move by at most clip per batch; the larger error of V and clipped V counts
        clipped = critic.old + (critic.values - critic.old).clamp(-critic.clip, critic.clip)
        larger = (critic.values - critic.returns).square().maximum((clipped - critic.returns).square())
        errors = 0.5 * larger * inputs.mask  # squared reward units
        return LossOutputs(
            policy.loss + (errors * self.share(inputs)).sum(),
            policy.metrics | {"value_loss": errors.detach().sum()},
        )


class OnlineDpo(Loss):
    """The mean of -log sigma(beta h) over the batch's pairs (Rafailov 2023, eq. 7, 2305.18290; Guo 2024, 2402.04792).

    A pair is the best and the worst rollout of a group; a group with equal rewards has none. h is sum_t log(pi/ref) of
    the best minus that of the worst; pi and ref both read under the arm's view. The loss does not use pi_old, so the
    arms "naive" and "naive-ratio", which differ in pi_old only, train alike.

    Departure: if the arm's correction gives a token a weight c, c scales the token's gradient. The value of h does not
    change, since it measures how sure the policy is of the pair.
    """

    name = "online-dpo"
    reference = True
    whole_groups = True
    defaults = MappingProxyType({"beta": 0.1})

    def estimate(self, batch: BatchRewards) -> Estimate:
        """Give advantage 1 to the tokens of a group's best rollout, -1 to those of its worst, and 0 to all others."""
        graded = batch.graded & batch.mask.any(dim=1)  # a rollout without sampled tokens cannot be in a pair
        return Estimate(best_and_worst(batch.rewards, graded, batch.group)[:, None] * batch.mask)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        from torch.nn.functional import logsigmoid

        assert inputs.ref_logprobs is not None, "online-dpo needs a reference"
        log_ratio = (inputs.logprobs - inputs.ref_logprobs).where(inputs.mask, 0.0)  # nats [B, T]
        weights = inputs.correction.weights * inputs.active  # [B, T]
        # value of log_ratio, gradient scaled by the weights
        weighed = log_ratio.detach() + weights * (log_ratio - log_ratio.detach())
        signs = inputs.advantages.sum(dim=1).sign()  # [B]
        margins = (weighed.sum(dim=1) * signs).view(-1, inputs.group).sum(dim=1)  # h [B / group]
        paired = signs.view(-1, inputs.group).any(dim=1)  # bool [B / group]
        loss = -(logsigmoid(inputs.beta * margins) * paired).sum() / max(inputs.counts.pairs, 1)
        outputs = LossOutputs(loss, {"clipped": 0.0, "kl_ref": reference_kl(inputs).detach().sum()})
        return add_distillation(inputs, token_mean_share(inputs), outputs)
