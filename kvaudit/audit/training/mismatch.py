"""The mismatch between the sampler's and the learner's log-probs of the same rollouts.

Used by training telemetry and ``kvaudit replay mismatch``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kvaudit.audit.training.corrections import LOG_CLAMP, TIS_CAP, VETO_BELOW
from kvaudit.core.alarms import MISMATCH_BOUNDS, Bound

THIRDS = ("first_third", "middle_third", "last_third")
SIGNS = ("positive", "zero", "negative")
_MAX_EXACT = 1 << 20  # values kept exactly, 8 MiB
_BINS = 1 << 20  # of the histogram over [0, 1] that replaces them when there are more


def mismatch_panel(sampler: Tensor, learner: Tensor, mask: Tensor, advantages: Tensor) -> dict[str, float | None]:
    """Return all mismatch numbers of one batch under keys ``mismatch/<name>``; ``MismatchPanel`` explains the names."""
    panel = MismatchPanel()
    panel.add(sampler, learner, mask, advantages)
    return {f"mismatch/{name}": value for name, value in panel.numbers().items()}


class MismatchPanel:
    """The accumulator of mismatch numbers, batch by batch.

    rho is the learner's probability of a sampled token divided by the sampler's; log rho is clamped to +-20, but not in
    max_abs_gap. Means are over sampled tokens, so they estimate expectations under the sampler.

    kl              mean of -log rho, estimates KL(sampler || learner) in nats
    k3_kl           mean of rho - log rho - 1, the same with less variance and at least 0; also for each third of a
                    rollout and each sign of the advantage
    chi2_token      mean of rho^2 - 1; chi2_seq the same with rho multiplied over each rollout
    ess             (sum rho)^2 / (n sum rho^2), in (0, 1]; ess_clamped with min(rho, 2)
    overlap_mean    mean of min(1, rho), whose expectation is 1 - total variation distance; overlap_p5 the 5th
                    percentile of min(1, rho) over tokens (for more than a million tokens approximate, within 1e-6)
    max_abs_gap     the largest |log sampler - log learner|; max_abs_log_ratio the same after the clamp
    frac_ratio_*    share of tokens with rho below 1e-4, and above 2, where truncated importance sampling cuts
    frac_sequences_vetoed   share of rollouts with a token whose rho is below 1e-4, which Sparse-RL rejects (2601.10079,
                    released config)
    frac_not_finite share of sampled tokens with a log-prob that is not finite; all other numbers leave these out
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._overlap = PercentileCounter()

    def add(self, sampler: Tensor, learner: Tensor, mask: Tensor, advantages: Tensor) -> None:
        """Add a batch: log-probs in nats [B, T], mask bool [B, T] of sampled tokens, advantages [B, T] or [B, 1].

        Pass NaN for advantages that are unknown.
        """
        # on the host, because many numbers are read
        sampler, learner, mask, advantages = (values.cpu() for values in (sampler, learner, mask, advantages))
        keep = mask & torch.isfinite(sampler) & torch.isfinite(learner)
        # in double: rho - log rho - 1 is 1e-12 for a gap of 1e-6, below float32 precision
        gap = torch.where(keep, learner.double() - sampler.double(), 0.0)
        log_ratio = gap.clamp(-LOG_CLAMP, LOG_CLAMP)
        log_ratios, has_tokens = log_ratio[keep], keep.any(dim=1)  # [n] nats; bool [B]
        self._add("sampled", mask.sum())
        self._add("not_finite", (mask & ~keep).sum())
        self._add_tokens(log_ratios)
        # clamped again: a rollout's sum of clamped terms can still overflow
        product = log_ratio.sum(dim=1)[has_tokens].clamp(-LOG_CLAMP, LOG_CLAMP).exp()
        self._add("rollouts", has_tokens.sum())
        self._add("chi2_seq", (product.square() - 1.0).sum())
        self._add("vetoed", (keep & (log_ratio.exp() < VETO_BELOW)).any(dim=1).sum())
        k3 = log_ratio.exp() - log_ratio - 1.0  # [B, T], 0 outside keep
        for name, part in (_thirds(keep) | _signs(keep, advantages)).items():
            self._add(f"k3_kl_{name}", k3[part].sum())
            self._add(f"tokens_{name}", part.sum())
        self._add_largest("gap", gap)
        self._add_largest("log_ratio", log_ratios)

    def numbers(self) -> dict[str, float | None]:
        """Return all numbers; a number is None if there is no token from which it could be computed."""
        tokens = self._sums.get("tokens", 0.0)
        return {
            **{name: self._mean(name, tokens) for name in ("kl", "k3_kl", "chi2_token")},
            "ess": self._effective("ratio", "squares", tokens),
            "ess_clamped": self._effective("capped", "capped_squares", tokens),
            "max_abs_log_ratio": _finite(self._largest["log_ratio"]) if tokens else None,
            "overlap_mean": self._mean("overlap", tokens),
            "overlap_p5": self._overlap.percentile(0.05),
            "frac_ratio_below_1e-4": self._mean("below", tokens),
            "frac_ratio_above_2": self._mean("above", tokens),
            "chi2_seq": self._mean("chi2_seq", self._sums.get("rollouts", 0.0)),
            "frac_sequences_vetoed": self._mean("vetoed", self._sums.get("rollouts", 0.0)),
            "max_abs_gap": _finite(self._largest["gap"]) if tokens else None,
            "frac_not_finite": self._mean("not_finite", self._sums.get("sampled", 0.0)),
            **{
                f"k3_kl_{name}": self._mean(f"k3_kl_{name}", self._sums.get(f"tokens_{name}", 0.0))
                for name in THIRDS + SIGNS
            },
        }

    def _add_tokens(self, log_ratio: Tensor) -> None:
        """Add the log-ratios [n] (log rho) of sampled tokens to the sums."""
        rho = log_ratio.exp()
        overlap, capped = rho.clamp(max=1.0), rho.clamp(max=TIS_CAP)
        self._overlap.add(overlap)
        self._sums["tokens"] = self._sums.get("tokens", 0.0) + len(log_ratio)
        for name, values in (
            ("kl", -log_ratio),
            ("k3_kl", rho - log_ratio - 1.0),
            ("chi2_token", rho.square() - 1.0),
            ("ratio", rho),
            ("squares", rho.square()),
            ("capped", capped),
            ("capped_squares", capped.square()),
            ("overlap", overlap),
            ("below", rho < VETO_BELOW),
            ("above", rho > TIS_CAP),
        ):
            self._add(name, values.sum())

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def _add_largest(self, name: str, values: Tensor) -> None:
        largest = float(values.abs().max()) if values.numel() else 0.0
        self._largest[name] = max(self._largest.get(name, 0.0), largest)

    def _mean(self, name: str, count: float) -> float | None:
        return _finite(self._sums[name] / count) if count else None

    def _effective(self, weights: str, squares: str, count: float) -> float | None:
        return _finite(self._sums[weights] ** 2 / (count * self._sums[squares])) if count else None


class PercentileCounter:
    """A counter of values in [0, 1] that gives their percentiles.

    The percentiles are exact up to a million values. For more values they come from a histogram with bins of 1e-6.
    """

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._count = 0
        self._bin_counts: Tensor | None = None  # [_BINS] int64

    def add(self, values: Tensor) -> None:
        """Add values [n]."""
        self._values.append(values)
        self._count += len(values)
        if self._bin_counts is not None or self._count > _MAX_EXACT:
            bins = (torch.cat(self._values) * _BINS).long().clamp(max=_BINS - 1)
            counts = torch.bincount(bins, minlength=_BINS)
            self._bin_counts = counts if self._bin_counts is None else self._bin_counts + counts
            self._values, self._count = [], 0

    def percentile(self, share: float) -> float | None:
        """Return the quantile at ``share``; None if no value was added.

        It is interpolated between values, but not if it comes from the histogram.
        """
        if self._bin_counts is not None:
            cumulative = self._bin_counts.cumsum(0)  # [_BINS]
            # the middle of the bin with that rank is off by 5e-7 at most
            index = int(torch.searchsorted(cumulative, share * (int(cumulative[-1]) - 1), right=True))
            return (index + 0.5) / _BINS
        return float(torch.quantile(torch.cat(self._values), share)) if self._count else None


def alarms(panel: Mapping[str, float | None]) -> list[Bound]:
    """Return those bounds of ``MISMATCH_BOUNDS`` that are violated by ``panel``, the numbers of a ``MismatchPanel``."""
    return [bound for bound in MISMATCH_BOUNDS if bound.is_passed(panel[bound.name])]


def _thirds(mask: Tensor) -> dict[str, Tensor]:
    """Return three masks [B, T] by name: the sampled tokens in the first, middle and last third of their rollout."""
    position = mask.cumsum(dim=1) - 1  # [B, T], among the rollout's sampled tokens
    # the clamp avoids dividing by 0 in rollouts without sampled tokens
    third = position * 3 // mask.sum(dim=1, keepdim=True).clamp(min=1)
    return {name: mask & (third == index) for index, name in enumerate(THIRDS)}


def _signs(mask: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    # comparisons, because NaN must match none, and its sign would be 0
    parts = zip(SIGNS, (advantages > 0, advantages == 0, advantages < 0), strict=True)
    return {name: mask & part for name, part in parts}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
