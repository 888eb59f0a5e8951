"""A value head instead of a group's mean: every token has an advantage of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvaudit.audit.training.losses.base import BatchRewards, Estimate, generalised_advantages, whiten
from kvaudit.audit.training.losses.base import ClippedLoss, LossInputs, LossOutputs, token_mean_share

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(ClippedLoss):
    """Schulman 2017, eq. 9 (1707.06347): the token mean of the clipped policy term, and of the clipped value term.

    The critic sees the state that the arm's learner sees: in a dense view the whole text before the token, in a shadow
    view what the sampler's cache had left of it. Under ``naive`` and the corrections the sampler was in the second kind
    of state and the value is of the first. Advantages are whitened over the batch (as in Ziegler 2019, 1909.08593).

    Departures: the critic is a linear head on the policy's own last hidden states, which takes no gradient to them and
    has an optimiser of its own, so that arms differ in the policy term alone; no entropy bonus; the distance to the
    reference is a term of the loss (``beta``) and no part of the reward.
    """

    name = "ppo"
    critic = True

    def estimate(self, rewarded: BatchRewards) -> Estimate:
        found = generalised_advantages(rewarded)  # [B, T]; the returns stay as they are, which the critic learns
        return found._replace(advantages=whiten(found.advantages, rewarded.mask))

    def share(self, inputs: LossInputs) -> Tensor:
        return token_mean_share(inputs)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        policy = super().__call__(inputs)
        if inputs.critic is None:
            return policy
        critic = inputs.critic
        # no further from old than clip, so that one batch cannot move V far
        held = critic.old + (critic.values - critic.old).clamp(-critic.clip, critic.clip)
        # half the squared error [B, T], the larger of that of V and of V held within clip of what it was
        larger = (critic.values - critic.returns).square().maximum((held - critic.returns).square())
        errors = 0.5 * larger * inputs.mask  # squared reward units
        return LossOutputs(
            policy.loss + (errors * self.share(inputs)).sum(),
            policy.metrics | {"value_loss": errors.detach().sum()},
        )
