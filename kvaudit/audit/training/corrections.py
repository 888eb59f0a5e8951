"""Corrections for rollouts that another distribution sampled: pure functions of log-probs.

mu is the sampler, pi_old the learner before the update, rho = pi_old / mu per token. Each correction returns a weight
per token, the tokens that keep their gradient, and the log-probs that the clipped ratio pi / pi_old divides by. Rows
that the sampler's own distribution explains (rho = 1) are left as they are by every one of them.

Departures: masked tokens and vetoed sequences still count in the loss's denominators, in every arm alike, so that the
weights are the only difference between arms (verl removes them from the response mask, which rescales the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


LOG_CLAMP = 20.0  # nats; exp(20) = 5e8 still squares within float32
VETO_BELOW = 1e-4  # of rho: the learner would hardly ever have drawn this token
TIS_CAP = 2.0
MIS_RANGE = (0.5, 5.0)
SPARSE_RL_RANGE = (0.5, 1.5)


class Correction(NamedTuple):
    """What a correction decides; all [B, T]."""

    weights: Tensor  # float, 0 where the token was not sampled
    keep: Tensor  # bool, a subset of the mask
    old_logprobs: Tensor  # nats, the denominator of the clipped ratio
    metrics: Mapping[str, Tensor | float]  # of the whole batch, tensors [] that nobody has read yet

    def of(self, rows: Tensor | slice | Sequence[int]) -> Correction:
        """What it decides about some rows."""
        return Correction(self.weights[rows], self.keep[rows], self.old_logprobs[rows], self.metrics)


CorrectionRule = Callable[["Tensor", "Tensor", "Tensor"], Correction]


def token_ratios(learner: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """rho = exp(clamp(learner - sampler, +-20)) [B, T], 1 outside the mask."""
    # outside the mask both may hold anything: 0 before exp, not after
    return (learner - sampler).where(mask, 0.0).clamp(-LOG_CLAMP, LOG_CLAMP).exp()


def no_correction(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:  # noqa: ARG001
    """Weight 1: the sampler is taken to be the learner."""
    return _result(mask.to(learner.dtype), mask, learner, mask)


def naive_ratio(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """The sampler's log-probs stand for pi_old, so that the mismatch meets the PPO clip (Schulman 2017, 1707.06347)."""
    return _result(mask.to(learner.dtype), mask, sampler.where(mask, learner), mask)


def tis(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """TIS, min(rho, 2) per token (Yao 2025, "Your efficient RL framework secretly brings you off-policy RL")."""
    weights = token_ratios(learner, sampler, mask).clamp(max=TIS_CAP) * mask
    return _result(weights, mask, learner, mask)


def mis(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """MIS, rho on tokens with .5 <= rho <= 5 and nothing elsewhere (IcePop, Ling Team 2025, 2510.18855)."""
    rho = token_ratios(learner, sampler, mask)
    keep = mask & _within(rho, MIS_RANGE)
    return _result(rho * keep, keep, learner, mask)


def tis_sequence(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """TIS of whole rollouts: min(product of rho, 2) for all tokens (TRL ``sequence_truncate``, verl ``sequence``)."""
    weights = _sequence_ratios(learner, sampler, mask).clamp(max=TIS_CAP) * mask
    return _result(weights, mask, learner, mask)


def mis_sequence(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """MIS of whole rollouts: the product of rho where it is in [.5, 5], nothing elsewhere (TRL's ``sequence_mask``)."""
    rho = _sequence_ratios(learner, sampler, mask)
    inside = _within(rho, MIS_RANGE)  # [B, 1]
    keep = mask & inside
    return _result(rho * keep, keep, learner, mask, vetoed=_mean(~inside))


def sparse_rl(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """clip(rho, 0, 1.5), tokens outside [.5, 1.5] masked, sequences with any rho < 1e-4 vetoed (2601.10079, config).

    Weights are scaled to mean 1 over the kept tokens of the whole batch, so pass the whole batch.
    """
    rho = token_ratios(learner, sampler, mask)
    vetoed = (mask & (rho < VETO_BELOW)).any(dim=1, keepdim=True)  # [B, 1], one token decides for its rollout
    keep = mask & _within(rho, SPARSE_RL_RANGE) & ~vetoed
    weights = rho.clamp(0.0, SPARSE_RL_RANGE[1]) * keep
    mean = weights.sum() / keep.sum().clamp(min=1)  # scalar; 0 where every token was masked
    return _result(weights / mean.where(mean > 0, 1.0), keep, learner, mask, vetoed=_mean(vetoed))


def sparse_rl_text(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """Sequences with any rho < 1e-4 rejected, all other tokens weighed by min(rho, 1.5) (2601.10079, as it is written).

    Departs from the released configuration above by masking no single token and by leaving the mean of the weights as
    it falls; the cap is taken from there.
    """
    rho = token_ratios(learner, sampler, mask)
    rejected = (mask & (rho < VETO_BELOW)).any(dim=1, keepdim=True)  # [B, 1]
    keep = mask & ~rejected
    return _result(rho.clamp(max=SPARSE_RL_RANGE[1]) * keep, keep, learner, mask, vetoed=_mean(rejected))


CORRECTIONS: Mapping[str, CorrectionRule] = MappingProxyType(
    {
        "none": no_correction,
        "naive-ratio": naive_ratio,
        "tis": tis,
        "mis": mis,
        "tis-sequence": tis_sequence,
        "mis-sequence": mis_sequence,
        "sparse-rl": sparse_rl,
        "sparse-rl-text": sparse_rl_text,
    }
)
# Rules whose weight of one token depends on the rest of the batch.
NEEDS_WHOLE_BATCH = frozenset({"sparse-rl"})


def _sequence_ratios(learner: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """exp(clamp(sum of learner - sampler over a rollout, +-20)) [B, 1]."""
    return (learner - sampler).where(mask, 0.0).sum(1, keepdim=True).clamp(-LOG_CLAMP, LOG_CLAMP).exp()


def _within(rho: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (rho >= bounds[0]) & (rho <= bounds[1])


def _result(weights: Tensor, keep: Tensor, old: Tensor, mask: Tensor, *, vetoed: Tensor | float = 0.0) -> Correction:
    # a share of the sampled tokens of graded rollouts, 0 of none
    rejected = (1.0 - keep.sum().double() / mask.sum().clamp(min=1)).where(mask.any(), 0.0)
    return Correction(weights, keep, old, {"masked_tokens": rejected, "rejected_sequences": vetoed})


def _mean(flags: Tensor) -> Tensor | float:
    return flags.float().mean() if flags.numel() else 0.0
