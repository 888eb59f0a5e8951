"""The best of a group is preferred to its worst: no advantage, no ratio, no clip."""

from __future__ import annotations

from types import MappingProxyType

from kvaudit.audit.training.losses.base import BatchRewards, Estimate, best_and_worst
from kvaudit.audit.training.losses.base import (
    Loss,
    LossInputs,
    LossOutputs,
    reference_kl,
    token_mean_share,
    add_distillation,
)


class OnlineDpo(Loss):
    """Rafailov 2023, eq. 7 (2305.18290) on fresh pairs (Guo 2024, 2402.04792): mean over pairs of -log sigma(beta h).

    h = sum_t log(pi/ref) of the best rollout minus that of the worst, policy and reference under the arm's view. Equal
    rewards make no pair. pi_old has no place here, so that the arm naive-ratio is the arm naive.

    Departure: a correction's weight c scales what a token adds to the gradient of h and leaves the value of h, which
    says how sure the policy is of the pair, as it is.
    """

    name = "online-dpo"
    reference = True
    whole_groups = True
    defaults = MappingProxyType({"beta": 0.1})

    def estimate(self, rewarded: BatchRewards) -> Estimate:
        """1 on tokens of the best rollout of a group, -1 on those of its worst."""
        graded = rewarded.graded & rewarded.mask.any(dim=1)  # a rollout without a token cannot be preferred to another
        return Estimate(best_and_worst(rewarded.rewards, graded, rewarded.group)[:, None] * rewarded.mask)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        from torch.nn.functional import logsigmoid

        assert inputs.ref_logprobs is not None, "a preference is held against a reference"
        log_ratio = (inputs.logprobs - inputs.ref_logprobs).where(inputs.mask, 0.0)  # nats [B, T]
        weights = inputs.correction.weights * inputs.active  # [B, T]
        # the value of log_ratio, with a gradient that is weights times as large
        weighed = log_ratio.detach() + weights * (log_ratio - log_ratio.detach())
        signs = inputs.advantages.sum(dim=1).sign()  # [B]
        margins = (weighed.sum(dim=1) * signs).view(-1, inputs.group).sum(dim=1)  # h [B / group]
        paired = signs.view(-1, inputs.group).any(dim=1)  # bool [B / group]
        loss = -(logsigmoid(inputs.beta * margins) * paired).sum() / max(inputs.counts.pairs, 1)
        outputs = LossOutputs(loss, {"clipped": 0.0, "kl_ref": reference_kl(inputs).detach().sum()})
        return add_distillation(inputs, token_mean_share(inputs), outputs)
