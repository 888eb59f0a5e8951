"""Verify recorded rollouts: replay them and compare the log-probs with the recorded ones.

In the replay (the shadow pass) every query sees the entries that the ledger says the sampler saw, so only rounding may
remain. Each rollout is replayed alone. The learner passes the shared prompt of a group only once; that would hide a
wrong prompt entry in the ledger of one rollout of the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvaudit.audit.cache.hints import Strays
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.routing import hook_expert_blocks
from kvaudit.audit.policies import Policy
from kvaudit.audit.replay.learner_pass import LearnerPass, suffix_logits
from kvaudit.audit.replay.ranking_check import RankingAgreement, check_ranking
from kvaudit.audit.replay.rollout_checks import (
    RecordedRollouts,
    check_replayable,
    eviction_breach,
    quantisation_breach,
    selection_breach,
)
from kvaudit.audit.rerun.measure import Measure, checkpoint_rollouts
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.training.batch import microbatches
from kvaudit.core.errors import SpecError
from kvaudit.core.text import inline
from kvaudit.reports.sections.shared.tables import Table
from kvaudit.reports.sections.shared.words import scientific

# nats on the worst token, and a tenth of it on the mean: several times the measured rounding error
# (docs/replaying.md), so that a longer context or another kernel raises no alarm
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
    torch.float16: 0.125,
    torch.bfloat16: 1.0,
}
MEAN_SHARE = 10
PASSES: tuple[LearnerPass, LearnerPass] = ("shadow", "dense")
PASS_TOKENS = 4096  # padded tokens of one pass
_ROWS = 512  # of logits that are converted to float64 at once
_HEADERS = ("view", "max |log p_s - log p|", "mean |log p_s - log p|", "mismatch_kl", "mismatch_kl (k3)")


@dataclass(frozen=True)
class LogprobGaps:
    """How far a pass (replayed, or dense) is from the recorded log-probs of the sampled tokens, in nats.

    A token's gap is log p_sampler - log p_pass. ``largest`` and ``mean`` are of the gaps' absolute values. ``kl`` is
    the mean gap, an estimate of KL(sampler || pass); ``k3`` is the mean of r - log r - 1 with r = p_pass / p_sampler,
    an estimate of the same that is never negative (Schulman 2020).
    """

    largest: float
    mean: float
    kl: float
    k3: float


class WidestGap(NamedTuple):
    """The sampled token whose recorded and replayed log-probs (in nats) differ most."""

    rollout: int
    token: int
    recorded: float
    replayed: float


@dataclass(frozen=True)
class Verification:
    """The result of verifying the rollouts of one file.

    ``breach`` describes the first rule that a ledger breaks (such as evicting at another time than the policy does),
    None if there is none. ``ranked`` compares the recorded evictions with those that the policy chooses again, or is
    the reason why they could not be compared.
    """

    tokens: int
    shadow: LogprobGaps
    dense: LogprobGaps
    worst: WidestGap
    tolerance: float  # on the worst token, nats; a tenth of it on the mean
    breach: str | None
    rerouted: bool  # the rollouts record no experts, so the model chose them again
    ranked: RankingAgreement | str

    @property
    def explained(self) -> bool:
        """Whether all differences of log-probs are within tolerance and every ledger follows its policy."""
        return self.token_explained and self.mean_explained and self.breach is None and self.rank_explained

    @property
    def rank_explained(self) -> bool:
        """Whether the policy, choosing again, evicts enough of the entries that left; True if that was not checked."""
        return isinstance(self.ranked, str) or self.ranked.lowest >= self.ranked.required

    @property
    def token_explained(self) -> bool:
        """Whether the token with the largest difference of log-probs is within tolerance."""
        return self.shadow.largest <= self.tolerance

    @property
    def mean_explained(self) -> bool:
        """Whether the mean difference of log-probs is within a tenth of the tolerance for a single token."""
        return self.shadow.mean <= self.tolerance / MEAN_SHARE


class ReplayedRollout(NamedTuple):
    """The log-probs of the n sampled tokens of one replayed rollout, in nats and float64.

    ``strays`` are the layers with a recorded rounding hint that cannot be right. A hint says to which code the sampler
    quantised a value near the border between two codes. It cannot be right if the value is near no border in the
    replay.
    """

    number: int
    recorded: Tensor  # [n]
    shadow: Tensor  # [n]
    dense: Tensor  # [n]
    strays: list[int]


class Verify(Measure[RecordedRollouts, list[ReplayedRollout], Verification]):
    """Replays recorded rollouts with the model that is said to have sampled them, and compares the log-probs.

    ``tolerance`` is the largest gap that a token may have, in nats (default: the dtype's); ``temperature`` replaces the
    recorded one.
    """

    name = "verify"
    decides = True

    def __init__(
        self,
        model: LoadedModel,
        sources: Sequence[RecordedRollouts],
        *,
        tolerance: float | None = None,
        temperature: float | None = None,
    ) -> None:
        self._model, self._sources = model, sources
        self._tolerance, self._temperature = tolerance, temperature

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        folder = run.checkpoint(*run.spec.arms[0])
        return cls(load_model(str(folder)), checkpoint_rollouts(folder))

    def units(self) -> Sequence[RecordedRollouts]:
        return self._sources

    def size(self, unit: RecordedRollouts) -> int:
        return len(unit.rollouts)

    def model(self, unit: RecordedRollouts) -> LoadedModel:  # noqa: ARG002
        return self._model

    def serve(self, unit: RecordedRollouts, model: LoadedModel) -> Iterator[list[ReplayedRollout]]:
        check_replayable(unit, model.model.config, model.max_positions)
        rollouts, policy = unit.rollouts, unit.policy
        if policy is not None and not policy.replayable:
            raise SpecError(f"rollouts {unit.source!r} are of policy {policy.canonical}, which cannot be replayed")
        for numbers in microbatches(rollouts, 1, PASS_TOKENS):
            batch, strays = [rollouts[number] for number in numbers], Strays()
            shadow, dense = (self._logprobs(model.model, batch, view, unit, strays) for view in PASSES)
            yield [
                ReplayedRollout(
                    number,
                    batch[row].sampler_logprobs[batch[row].sampled].double(),
                    shadow[row],
                    dense[row],
                    [layer for place, layer in strays if place == row],
                )
                for row, number in enumerate(numbers)
            ]

    def reduce(
        self, unit: RecordedRollouts, model: LoadedModel, batches: Iterator[list[ReplayedRollout]]
    ) -> Verification:
        rows = sorted((row for batch in batches for row in batch), key=lambda row: row.number)
        columns = zip(*((row.recorded, row.shadow, row.dense) for row in rows), strict=True)
        recorded, shadow, dense = map(torch.cat, columns)
        policy, net = unit.policy, model.model
        ledger_breach = None if policy is None else _ledger_breach(unit, policy, net.config)
        return Verification(
            tokens=len(recorded),
            shadow=_gaps(recorded, shadow),
            dense=_gaps(recorded, dense),
            worst=_widest_gap(unit.rollouts, recorded, shadow),
            tolerance=TOLERANCE[model.dtype] if self._tolerance is None else self._tolerance,
            breach=ledger_breach or _stray_breach(rows),
            rerouted=_reroutes(unit) and hook_expert_blocks(net) > 0,
            ranked=_ranking_of(net, unit.rollouts, policy, ledger_breach),
        )

    def differs(self, total: Verification) -> bool:
        return not total.explained

    def lines(self, results: Sequence[tuple[RecordedRollouts, Verification]]) -> Iterator[str | Table]:
        for unit, total in results:
            model, policy = self._model, unit.policy
            yield f"rollouts    {len(unit.rollouts)} of {inline(unit.source)}, {total.tokens} sampled tokens"
            yield f"policy      {'not named' if policy is None else inline(policy.canonical)}"
            yield f"model       {inline(model.name)} {model.sha256[:12]}, {str(model.dtype).removeprefix('torch.')}"
            if total.rerouted:
                yield "experts     not recorded: the model chose them again, and a choice changed by rounding is a gap"
            views = (("shadow, under the ledger", total.shadow), ("dense, all visible", total.dense))
            yield Table(_HEADERS, tuple((view, *map(scientific, astuple(gaps))) for view, gaps in views))
            yield f"choices     {_agreement_line(total.ranked)}"
            yield from _verdict(total)

    @torch.no_grad()
    def _logprobs(
        self, net: Any, rollouts: Sequence[Rollout], view: LearnerPass, unit: RecordedRollouts, strays: Strays
    ) -> list[Tensor]:
        """Return the log-probs [n] of the sampled tokens of each rollout in a pass, "shadow" (replayed) or "dense".

        They are in nats and float64. Row and layer of each rounding hint that cannot be right (see ``ReplayedRollout``)
        are added to ``strays``.
        """
        logits, _ = suffix_logits(net, rollouts, group=1, view=view, reroute=_reroutes(unit), strays=strays)
        temperature = unit.temperature if self._temperature is None else self._temperature
        temperature = temperature or 1.0  # greedy rollouts record the log-probs of temperature 1
        logprobs = []
        for row, rollout in enumerate(rollouts):
            suffix = slice(rollout.prompt_length, None)
            sampled = rollout.sampled[suffix].nonzero()[:, 0]
            # [n, V] and [n]: a row's logits j predict token j of its suffix
            predicted, ids = logits[row, sampled.to(logits.device)], rollout.ids[suffix][sampled].to(logits.device)
            logprobs.append(_token_logprobs(predicted, ids, temperature).cpu())
        return logprobs


def _reroutes(unit: RecordedRollouts) -> bool:
    return any(rollout.experts is None for rollout in unit.rollouts)


def _ranking_of(
    net: Any, rollouts: Sequence[Rollout], policy: Policy | None, fault: str | None
) -> RankingAgreement | str:
    if policy is None or fault is not None:
        return "no policy is named" if policy is None else "the ledger does not keep the policy's schedule"
    return check_ranking(net, rollouts, policy)


def _ledger_breach(unit: RecordedRollouts, policy: Policy, config: Any) -> str | None:
    """Return how the ledger of some rollout in a file contradicts the policy that the file names; None if none does."""
    if unit.policy_hash is not None and unit.policy_hash != policy.hash:
        return f"the ledger names {policy.canonical}, whose hash is {policy.hash}, and the hash {unit.policy_hash}"
    trained = unit.trained_policy
    if trained is not None and trained != policy:
        return f"the ledger names {policy.canonical}, the checkpoint was trained with {trained.canonical}"
    plans = layer_plans(config, policy)
    for number, rollout in enumerate(unit.rollouts):
        fault = eviction_breach(rollout, plans) or quantisation_breach(rollout, policy)
        if fault := fault or selection_breach(rollout, policy, plans):
            return f"rollout {number}, {fault}"
    return None


def _stray_breach(rows: Sequence[ReplayedRollout]) -> str | None:
    """Describe the first recorded rounding hint that rounding cannot explain, or return None if there is none.

    A hint is the recorded code of a value near the border of two codes.
    """
    strays = sorted((row.number, layer) for row in rows for layer in row.strays)
    if not strays:
        return None
    rollout, layer = strays[0]
    others = f", and {len(strays) - 1} more" if len(strays) > 1 else ""
    return (
        f"rollout {rollout}, layer {layer}: a recorded code differs from the replay by more than rounding{others}; the "
        "sampler cannot have stored it"
    )


def _token_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return log-probs [n] of ``ids`` [n] from logits [n, V], a few rows at a time in float64."""
    blocks = [
        (block.double() / temperature).log_softmax(-1).gather(1, block_ids[:, None])[:, 0]
        for block, block_ids in zip(torch.split(logits, _ROWS), torch.split(ids, _ROWS), strict=True)
    ]
    return torch.cat(blocks)


def _gaps(recorded: Tensor, replayed: Tensor) -> LogprobGaps:
    gap = _nan_to_inf(recorded - replayed)
    size = gap.abs()
    # with r = exp(-gap), r - log r - 1 is exp(-gap) + gap - 1
    return LogprobGaps(
        *(float(value) for value in (size.max(), size.mean(), gap.mean(), ((-gap).exp() + gap - 1.0).mean()))
    )


def _widest_gap(rollouts: Sequence[Rollout], recorded: Tensor, replayed: Tensor) -> WidestGap:
    place = int(_nan_to_inf(recorded - replayed).abs().argmax())
    # in the order of the concatenated log-probs
    tokens = [(number, token) for number, r in enumerate(rollouts) for token in r.sampled.nonzero()[:, 0].tolist()]
    return WidestGap(*tokens[place], float(recorded[place]), float(replayed[place]))


def _nan_to_inf(gap: Tensor) -> Tensor:
    return torch.where(gap.isnan(), math.inf, gap)


def _agreement_line(agreement: RankingAgreement | str) -> str:
    if isinstance(agreement, str):
        return f"not compared: {agreement}"
    choices = "selections" if agreement.selects else "evictions"
    return (
        f"policy agrees with {_percent(agreement.share)} of {agreement.evicted} {choices}; "
        f"lowest: rollout {agreement.rollout}, {_percent(agreement.lowest)}"
    )


def _percent(share: float) -> str:
    """Return a share as a percentage with two decimals, rounded down, so that only 1 gives "100.00 %"."""
    return f"{math.floor(share * 10_000) / 100:.2f} %"


def _verdict(result: Verification) -> Iterator[str]:
    worst, bound, ranked_result = result.worst, f"{result.tolerance:g} nats", result.ranked
    if result.explained:
        yield f"explained: no token is off by more than {bound}; p_s is the sampler's, numbers are in nats"
    if not result.token_explained:
        yield (
            f"not explained: rollout {worst.rollout}, token {worst.token} is recorded at {worst.recorded:.4f} nats, "
            f"the ledger gives {worst.replayed:.4f}; they may differ by at most {bound}"
        )
    elif not result.mean_explained:
        yield (
            f"not explained: tokens are off by {scientific(result.shadow.mean)} nats on average, rounding explains at "
            f"most {result.tolerance / MEAN_SHARE:g}; the worst is rollout {worst.rollout}, token {worst.token}"
        )
    if result.breach is not None:
        yield f"not explained: {inline(result.breach)}"
    if not isinstance(ranked_result, str) and not result.rank_explained:
        choices = "selections" if ranked_result.selects else "evictions"
        yield (
            f"not explained: the policy agrees with {_percent(ranked_result.lowest)} of the {choices} of rollout "
            f"{ranked_result.rollout}; expected at least {_percent(ranked_result.required)}"
        )
