"""Online DPO: prefer the best rollout of a group to its worst, without advantage, ratio or clip."""

from __future__ import annotations

from types import MappingProxyType

from kvaudit.audit.training.losses.base import (
    BatchRewards,
    Estimate,
    Loss,
    LossInputs,
    LossOutputs,
    add_distillation,
    best_and_worst,
    reference_kl,
    token_mean_share,
)


class OnlineDpo(Loss):
    """The mean of -log sigma(beta h) over the batch's pairs (Rafailov 2023, eq. 7, 2305.18290; Guo 2024, 2402.04792).

    h = sum_t log(pi/ref) of the best rollout of a group minus that of the worst, both models under the arm's view.
    Equal rewards make no pair. pi_old is not used, so arm naive-ratio equals arm naive.

    Departure: a correction's weight c scales a token's gradient of h but not the value of h, which measures how sure
    the policy is of the pair.
    """

    name = "online-dpo"
    reference = True
    whole_groups = True
    defaults = MappingProxyType({"beta": 0.1})

    def estimate(self, batch: BatchRewards) -> Estimate:
        """Give advantage 1 to tokens of a group's best rollout and -1 to tokens of its worst."""
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
