"""The mismatch of rollouts: how far the sampler of some tokens was from the learner's view of them, as numbers.

The trainer's telemetry and ``kvaudit mismatch`` print these numbers, whoever sampled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from audit.training.corrections import LOG_CLAMP, TIS_CAP, VETO_BELOW

THIRDS = ("first_third", "middle_third", "last_third")
SIGNS = ("positive", "zero", "negative")


def mismatch_panel(sampler: Tensor, learner: Tensor, mask: Tensor, advantages: Tensor) -> dict[str, float | None]:
    """How far the sampler was from the learner's view of the same tokens: all ``mismatch/*`` numbers of a batch.

    Log-probs in nats [B, T], mask bool [B, T], advantages [B, T] or [B, 1]. rho = learner / sampler per sampled token,
    log rho clamped to +-20 (except for the gaps, which are raw). Every estimate is under the sampler's tokens.

    kl              mean of -log rho, estimates KL(sampler || learner) in nats
    k3_kl           mean of rho - log rho - 1, the same with less variance and never below 0
    chi2_token      mean of rho^2 - 1; chi2_seq the same with the product of a rollout's ratios
    ess             (sum rho)^2 / (n sum rho^2), in (0, 1]; ess_clamped with min(rho, 2)
    overlap_mean    mean of min(1, rho), whose expectation is 1 - TV; overlap_p5 its 5th percentile over tokens
    max_abs_gap     the largest |log sampler - log learner|; max_abs_log_ratio the same after the clamp
    """
    keep = mask & torch.isfinite(sampler) & torch.isfinite(learner)
    # in double: rho - log rho - 1 is 1e-12 for a gap of 1e-6, which float32 cannot tell from 0 beside 1
    gap = torch.where(keep, learner.double() - sampler.double(), 0.0)
    log_ratio = gap.clamp(-LOG_CLAMP, LOG_CLAMP)
    tokens = log_ratio[keep]
    panel = _token_numbers(tokens) | {
        # clamped again: a rollout's sum of clamped terms can still overflow
        "chi2_seq": _chi2(log_ratio.sum(dim=1)[keep.any(dim=1)].clamp(-LOG_CLAMP, LOG_CLAMP).exp()),
        "max_abs_gap": _number(gap.abs().max() if len(tokens) else None),
        "frac_not_finite": _number((mask & ~keep).sum() / mask.sum() if bool(mask.any()) else None),
    }
    per_token = log_ratio.exp() - log_ratio - 1.0
    for name, part in (_thirds(keep) | _signs(keep, advantages)).items():
        panel[f"k3_kl_{name}"] = _tensor_mean(per_token[part])
    return {f"mismatch/{name}": value for name, value in panel.items()}


def _token_numbers(log_ratio: Tensor) -> dict[str, float | None]:
    """The numbers that need nothing but the sampled tokens' log-ratios [n]."""
    rho = log_ratio.exp()
    overlap = rho.clamp(max=1.0)
    return {
        "kl": _tensor_mean(-log_ratio),
        "k3_kl": _tensor_mean(rho - log_ratio - 1.0),
        "chi2_token": _chi2(rho),
        "ess": _effective(rho),
        "ess_clamped": _effective(rho.clamp(max=TIS_CAP)),
        "max_abs_log_ratio": _number(log_ratio.abs().max() if len(log_ratio) else None),
        "overlap_mean": _tensor_mean(overlap),
        "overlap_p5": _number(torch.quantile(overlap, 0.05) if len(overlap) else None),
        "frac_ratio_below_1e-4": _tensor_mean((rho < VETO_BELOW).double()),
    }


def _thirds(mask: Tensor) -> dict[str, Tensor]:
    """Sampled tokens [B, T] by third of their rollout, counted in sampled tokens."""
    rank = mask.cumsum(dim=1) - 1
    # a rollout without sampled tokens has no thirds; the clamp only keeps the division whole
    third = rank * 3 // mask.sum(dim=1, keepdim=True).clamp(min=1)
    return {name: mask & (third == index) for index, name in enumerate(THIRDS)}


def _signs(mask: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    signs = advantages.sign()
    return {name: mask & (signs == sign) for name, sign in zip(SIGNS, (1, 0, -1), strict=True)}


def _chi2(rho: Tensor) -> float | None:
    return _tensor_mean(rho.square() - 1.0)


def _effective(weights: Tensor) -> float | None:
    return _number(weights.sum().square() / (len(weights) * weights.square().sum()) if len(weights) else None)


def _tensor_mean(values: Tensor) -> float | None:
    return _number(values.mean() if len(values) else None)


def _number(value: Tensor | None) -> float | None:
    """A finite Python float, or None."""
    if value is None or not math.isfinite(float(value)):
        return None
    return float(value)
