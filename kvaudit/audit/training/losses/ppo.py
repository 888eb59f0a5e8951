"""PPO: advantages per token from a value head, instead of a group mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvaudit.audit.training.losses.base import (
    BatchRewards,
    ClippedLoss,
    Estimate,
    LossInputs,
    LossOutputs,
    generalised_advantages,
    token_mean_share,
    whiten,
)

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(ClippedLoss):
    """The token means of the clipped policy loss and the clipped value loss (Schulman 2017, eq. 9, 1707.06347).

    The critic reads the arm's view: in the dense view the whole text before a token, in the shadow view what the
    sampler's cache still held. Arm ``naive`` and the corrected arms therefore have values of the dense state although
    the sampler was compressed. Advantages are whitened over the batch (as in Ziegler 2019, 1909.08593).

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
