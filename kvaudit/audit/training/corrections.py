"""Importance-weight corrections for rollouts sampled from another distribution: pure functions of log-probs.

mu is the sampler, pi_old the learner before the update, rho = pi_old / mu per token; rho = 1 changes nothing.

Departure from verl: tokens and rollouts that a correction masks still count in the loss's denominators, so that weights
are the only difference between arms (verl removes them from the response mask, which rescales the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


LOG_CLAMP = 20.0  # nats; exp(20) = 5e8 still squares within float32
VETO_BELOW = 1e-4  # of rho: a token that the learner would hardly ever sample
TIS_CAP = 2.0
MIS_RANGE = (0.5, 5.0)
SPARSE_RL_RANGE = (0.5, 1.5)


class Correction(NamedTuple):
    """The result of an importance-weight correction: each token's weight and old log-prob, all tensors [B, T]."""

    weights: Tensor  # float, 0 where the token was not sampled
    keep: Tensor  # bool, a subset of the mask
    old_logprobs: Tensor  # nats, the denominator of the clipped ratio
    metrics: Mapping[str, Tensor | float]  # of the whole batch; tensors [] still on the device

    def of(self, rows: Tensor | slice | Sequence[int]) -> Correction:
        """Return the correction of the given rows of the batch."""
        return Correction(self.weights[rows], self.keep[rows], self.old_logprobs[rows], self.metrics)


CorrectionRule = Callable[["Tensor", "Tensor", "Tensor"], Correction]


def token_ratios(learner: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """Return rho = exp(clamp(learner - sampler, +-20)) [B, T] from log-probs [B, T]; rho is 1 outside the mask."""
    # masked before exp, because values outside the mask may be anything
    return (learner - sampler).where(mask, 0.0).clamp(-LOG_CLAMP, LOG_CLAMP).exp()


def no_correction(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:  # noqa: ARG001
    """Give every token weight 1, as if the learner had sampled it (no correction)."""
    return _result(mask.to(learner.dtype), mask, learner, mask)


def naive_ratio(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """Give every token weight 1, but use the sampler's log-probs as pi_old (Schulman 2017, 1707.06347).

    PPO's clip then limits the mismatch between sampler and learner.
    """
    return _result(mask.to(learner.dtype), mask, sampler.where(mask, learner), mask)


def tis(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """Weight tokens by min(rho, 2) (Yao 2025, "Your efficient RL framework secretly brings you off-policy RL")."""
    weights = token_ratios(learner, sampler, mask).clamp(max=TIS_CAP) * mask
    return _result(weights, mask, learner, mask)


def mis(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """Weight tokens by rho if it is in [.5, 5], else mask them (IcePop, Ling Team 2025, 2510.18855)."""
    rho = token_ratios(learner, sampler, mask)
    keep = mask & _within(rho, MIS_RANGE)
    return _result(rho * keep, keep, learner, mask)


def tis_sequence(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """Weight rollouts by min(product of rho, 2) (TRL ``sequence_truncate``, verl ``sequence``)."""
    weights = _sequence_ratios(learner, sampler, mask).clamp(max=TIS_CAP) * mask
    return _result(weights, mask, learner, mask)


def mis_sequence(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """Weight rollouts by the product of rho if it is in [.5, 5], else mask them (TRL ``sequence_mask``)."""
    rho = _sequence_ratios(learner, sampler, mask)
    in_range = _within(rho, MIS_RANGE)  # [B, 1]
    keep = mask & in_range
    return _result(rho * keep, keep, learner, mask, vetoed=_mean(~in_range))


def sparse_rl(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """Weight tokens by rho if it is in [.5, 1.5], else mask them (Sparse-RL, 2601.10079, released configuration).

    A rollout is masked whole if any of its tokens has rho < 1e-4. Weights are scaled to mean 1 over the tokens that are
    kept, so the input must be the whole batch.
    """
    rho = token_ratios(learner, sampler, mask)
    vetoed = (mask & (rho < VETO_BELOW)).any(dim=1, keepdim=True)  # [B, 1]
    keep = mask & _within(rho, SPARSE_RL_RANGE) & ~vetoed
    weights = rho * keep
    mean = weights.sum() / keep.sum().clamp(min=1)  # scalar; 0 where every token was masked
    return _result(weights / mean.where(mean > 0, 1.0), keep, learner, mask, vetoed=_mean(vetoed))


def sparse_rl_text(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    """Weight tokens by min(rho, 1.5), as the text of Sparse-RL's paper says (2601.10079).

    A rollout is masked whole if any of its tokens has rho < 1e-4. Unlike the released configuration (``sparse_rl``),
    this correction masks no single token and does not rescale weights.
    """
    rho = token_ratios(learner, sampler, mask)
    vetoed = (mask & (rho < VETO_BELOW)).any(dim=1, keepdim=True)  # [B, 1]
    keep = mask & ~vetoed
    return _result(rho.clamp(max=SPARSE_RL_RANGE[1]) * keep, keep, learner, mask, vetoed=_mean(vetoed))


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
# corrections whose weight of a token depends on the rest of the batch
NEEDS_WHOLE_BATCH = frozenset({"sparse-rl"})


def _sequence_ratios(learner: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """Return the product of rho over each rollout [B, 1]: exp(clamp(sum of learner - sampler, +-20))."""
    return (learner - sampler).where(mask, 0.0).sum(1, keepdim=True).clamp(-LOG_CLAMP, LOG_CLAMP).exp()


def _within(rho: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (rho >= bounds[0]) & (rho <= bounds[1])


def _result(weights: Tensor, keep: Tensor, old: Tensor, mask: Tensor, *, vetoed: Tensor | float = 0.0) -> Correction:
    # share of the sampled tokens of graded rollouts; 0 without any
    masked = (1.0 - keep.sum().double() / mask.sum().clamp(min=1)).where(mask.any(), 0.0)
    return Correction(weights, keep, old, {"masked_tokens": masked, "rejected_sequences": vetoed})


def _mean(flags: Tensor) -> Tensor | float:
    return flags.float().mean() if flags.numel() else 0.0
