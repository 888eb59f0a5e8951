"""Does the recorded policy explain the recorded log-probs? Replay rollouts under their ledger and compare, in nats.

The shadow pass sees what the sampler saw, so what remains between the two is rounding. Each row is replayed by itself,
without the shared prompt pass of the learner: a prompt entry that only one member's ledger misstates would hide there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvaudit.audit.rerun.finished import checkpoint_rollouts
from kvaudit.audit.rerun.measure import Measure
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.hints import Strays
from kvaudit.audit.cache.routing import hook_expert_blocks
from kvaudit.audit.policies import Policy
from kvaudit.audit.replay.learner_pass import LearnerPass, suffix_logits
from kvaudit.audit.replay.ranking_check import RankingAgreement, ranked
from kvaudit.audit.replay.rollout_checks import RecordedRollouts, check_replayable
from kvaudit.audit.replay.rollout_checks import breach, quantisation_breach, selection_breach
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.training.batch import microbatches
from kvaudit.core.errors import SpecError
from kvaudit.core.text import inline
from kvaudit.reports.sections.shared.tables import Table
from kvaudit.reports.sections.shared.words import scientific

# Nats on the worst token, and a tenth of it on the mean: several times what rounding was measured to leave
# (docs/replaying.md), so that a longer context or another kernel is no alarm.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
    torch.float16: 0.125,
    torch.bfloat16: 1.0,
}
MEAN_SHARE = 10
PASSES: tuple[LearnerPass, LearnerPass] = ("shadow", "dense")
PASS_TOKENS = 4096  # padded tokens of one pass
_ROWS = 512  # of logits that are made double at once
_HEADERS = ("view", "max |log p_s - log p|", "mean |log p_s - log p|", "mismatch_kl", "mismatch_kl (k3)")


@dataclass(frozen=True)
class LogprobGaps:
    """log p_sampler - log p_pass over sampled tokens, nats: largest and mean size, and two estimates of the KL.

    ``kl`` is the mean, which estimates KL(sampler || pass); ``k3`` the mean of r - log r - 1 with r = pass / sampler,
    which estimates the same and is never below 0 (Schulman 2020).
    """

    largest: float
    mean: float
    kl: float
    k3: float


class WidestGap(NamedTuple):
    """The sampled token with the largest gap; both log-probs in nats."""

    rollout: int
    token: int
    recorded: float
    replayed: float


@dataclass(frozen=True)
class Verification:
    """What a replay says. ``breach`` is a rule of the named policy that a ledger breaks, None where it keeps all.

    ``ranked`` says in words why nothing was ranked again, where nothing was.
    """

    tokens: int
    shadow: LogprobGaps
    dense: LogprobGaps
    worst: WidestGap
    tolerance: float  # on the worst token, nats; a tenth of it on the mean
    breach: str | None
    rerouted: bool  # experts were chosen anew: the rollouts do not say which they were
    ranked: RankingAgreement | str

    @property
    def explained(self) -> bool:
        """Whether every gap is rounding and every ledger is one that its policy leaves behind."""
        return self.token_explained and self.mean_explained and self.breach is None and self.rank_explained

    @property
    def rank_explained(self) -> bool:
        """Whether what left every rollout is what the policy would have chosen; True where nothing was ranked again."""
        return isinstance(self.ranked, str) or self.ranked.least >= self.ranked.wanted

    @property
    def token_explained(self) -> bool:
        """Whether the worst token is within tolerance."""
        return self.shadow.largest <= self.tolerance

    @property
    def mean_explained(self) -> bool:
        """Whether the mean size of the gaps is within its own, narrower tolerance."""
        return self.shadow.mean <= self.tolerance / MEAN_SHARE


class Replayed(NamedTuple):
    """The n sampled tokens of one rollout: log-probs in nats, float64.

    ``strays`` are layers with a recorded code that is at no border in the replay.
    """

    number: int
    recorded: Tensor  # [n]
    shadow: Tensor  # [n]
    dense: Tensor  # [n]
    strays: list[int]


class Verify(Measure[RecordedRollouts, list[Replayed], Verification]):
    """Recorded rollouts replayed by the model that is said to have sampled them.

    ``tolerance`` is in nats on the worst token, by default the dtype's; ``temperature`` replaces the recorded one.
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

    def pieces(self) -> Sequence[RecordedRollouts]:
        return self._sources

    def size(self, piece: RecordedRollouts) -> int:
        return len(piece.rollouts)

    def model(self, piece: RecordedRollouts) -> LoadedModel:  # noqa: ARG002
        return self._model

    def served(self, piece: RecordedRollouts, model: LoadedModel) -> Iterator[list[Replayed]]:
        check_replayable(piece, model.model.config, model.max_positions)
        rollouts, policy = piece.rollouts, piece.policy
        if policy is not None and not policy.replayable:
            raise SpecError(f"rollouts {piece.source!r} are of policy {policy.canonical}, which cannot be replayed")
        for numbers in microbatches(rollouts, 1, PASS_TOKENS):
            picked, strays = [rollouts[number] for number in numbers], Strays()
            shadow, dense = (self._logprobs(model.model, picked, which, piece, strays) for which in PASSES)
            yield [
                Replayed(
                    number,
                    picked[row].sampler_logprobs[picked[row].sampled].double(),
                    shadow[row],
                    dense[row],
                    [layer for place, layer in strays if place == row],
                )
                for row, number in enumerate(numbers)
            ]

    def summed(self, piece: RecordedRollouts, model: LoadedModel, parts: Iterator[list[Replayed]]) -> Verification:
        rows = sorted((row for part in parts for row in part), key=lambda row: row.number)
        columns = zip(*((row.recorded, row.shadow, row.dense) for row in rows), strict=True)
        recorded, shadow, dense = map(torch.cat, columns)
        policy, net = piece.policy, model.model
        broken = None if policy is None else _breach(piece, policy, net.config)
        return Verification(
            tokens=len(recorded),
            shadow=_gaps(recorded, shadow),
            dense=_gaps(recorded, dense),
            worst=_worst(piece.rollouts, recorded, shadow),
            tolerance=TOLERANCE[model.dtype] if self._tolerance is None else self._tolerance,
            breach=broken or _stray(rows),
            rerouted=_reroutes(piece) and hook_expert_blocks(net) > 0,
            ranked=_ranked(net, piece.rollouts, policy, broken),
        )

    def differs(self, total: Verification) -> bool:
        return not total.explained

    def lines(self, found: Sequence[tuple[RecordedRollouts, Verification]]) -> Iterator[str | Table]:
        for piece, total in found:
            model, policy = self._model, piece.policy
            yield f"rollouts    {len(piece.rollouts)} of {inline(piece.source)}, {total.tokens} sampled tokens"
            yield f"policy      {'not named' if policy is None else inline(policy.canonical)}"
            yield f"model       {inline(model.name)} {model.sha256[:12]}, {str(model.dtype).removeprefix('torch.')}"
            if total.rerouted:
                yield "experts     not recorded: the model chose them anew, and a choice that rounding flips is a gap"
            views = (("shadow, under the ledger", total.shadow), ("dense, all visible", total.dense))
            yield Table(_HEADERS, tuple((view, *map(scientific, astuple(gaps))) for view, gaps in views))
            yield f"choices     {_choices(total.ranked)}"
            yield from _verdict(total)

    @torch.no_grad()
    def _logprobs(
        self, net: Any, rollouts: Sequence[Rollout], which: LearnerPass, piece: RecordedRollouts, strays: Strays
    ) -> list[Tensor]:
        """Log-probs [n] of the sampled tokens of each rollout under a pass: float64, nats.

        ``strays`` grows by the row and layer of every recorded code that is at no border in the replay.
        """
        logits, _ = suffix_logits(net, rollouts, group=1, kind=which, reroute=_reroutes(piece), strays=strays)
        told = piece.temperature if self._temperature is None else self._temperature
        temperature = told or 1.0  # greedy draws are recorded with the log-probs of temperature 1
        found = []
        for row, rollout in enumerate(rollouts):
            suffix = slice(rollout.prompt_length, None)
            drawn = rollout.sampled[suffix].nonzero()[:, 0]
            # [n, V] and [n]: a row's logits j predict token j of its suffix
            chosen, ids = logits[row, drawn.to(logits.device)], rollout.ids[suffix][drawn].to(logits.device)
            found.append(_of(chosen, ids, temperature).cpu())
        return found


def _reroutes(piece: RecordedRollouts) -> bool:
    return any(rollout.experts is None for rollout in piece.rollouts)


def _ranked(net: Any, rollouts: Sequence[Rollout], policy: Policy | None, broken: str | None) -> RankingAgreement | str:
    if policy is None or broken is not None:
        return "no policy is named" if policy is None else "the ledger does not keep the policy's schedule"
    return ranked(net, rollouts, policy)


def _breach(piece: RecordedRollouts, policy: Policy, config: Any) -> str | None:
    """What of a file is not as the policy it names leaves it, in words."""
    if piece.policy_hash is not None and piece.policy_hash != policy.hash:
        return f"the ledger names {policy.canonical}, whose hash is {policy.hash}, and the hash {piece.policy_hash}"
    trained = piece.trained_policy
    if trained is not None and trained != policy:
        return f"the ledger names {policy.canonical}, the checkpoint was trained with {trained.canonical}"
    plans = layer_plans(config, policy)
    for number, rollout in enumerate(piece.rollouts):
        fault = breach(rollout, plans) or quantisation_breach(rollout, policy)
        if fault := fault or selection_breach(rollout, policy, plans):
            return f"rollout {number}, {fault}"
    return None


def _stray(rows: Sequence[Replayed]) -> str | None:
    """A recorded code that rounding cannot have decided, in words."""
    strays = sorted((row.number, layer) for row in rows for layer in row.strays)
    if not strays:
        return None
    rollout, layer = strays[0]
    others = f", and {len(strays) - 1} more" if len(strays) > 1 else ""
    return (
        f"rollout {rollout}, layer {layer}: a recorded code is at no border in the replay{others}; it was not sampled"
    )


def _of(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-probs [n] of ``ids`` [n] from logits [n, V], a few rows at a time in float64."""
    parts = [
        (block.double() / temperature).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        for block, chosen in zip(torch.split(logits, _ROWS), torch.split(ids, _ROWS), strict=True)
    ]
    return torch.cat(parts)


def _gaps(taken: Tensor, replayed: Tensor) -> LogprobGaps:
    gap = _finite(taken - replayed)
    size = gap.abs()
    # with r = exp(-gap), r - log r - 1 is exp(-gap) + gap - 1
    return LogprobGaps(
        *(float(value) for value in (size.max(), size.mean(), gap.mean(), ((-gap).exp() + gap - 1.0).mean()))
    )


def _worst(rollouts: Sequence[Rollout], taken: Tensor, replayed: Tensor) -> WidestGap:
    place = int(_finite(taken - replayed).abs().argmax())
    # in the order in which log-probs were joined
    tokens = [(number, token) for number, r in enumerate(rollouts) for token in r.sampled.nonzero()[:, 0].tolist()]
    return WidestGap(*tokens[place], float(taken[place]), float(replayed[place]))


def _finite(gap: Tensor) -> Tensor:
    """A log-prob that is no number explains nothing."""
    return torch.where(gap.isnan(), math.inf, gap)


def _choices(found: RankingAgreement | str) -> str:
    if isinstance(found, str):
        return f"not made again: {found}"
    what = "units that queries chose" if found.selects else "entries that left"
    return (
        f"of {found.evicted} {what}, the policy chooses {_percent(found.share)} again; "
        f"rollout {found.rollout} has the least, {_percent(found.least)}"
    )


def _percent(share: float) -> str:
    """Two digits, and 100 % only for all."""
    return f"{math.floor(share * 10_000) / 100:.2f} %"


def _verdict(found: Verification) -> Iterator[str]:
    worst, bound = found.worst, f"{found.tolerance:g} nats"
    if found.explained:
        yield f"explained: no token is off by more than {bound}; p_s is the sampler's, numbers are in nats"
    if not found.token_explained:
        yield (
            f"not explained: rollout {worst.rollout}, token {worst.token} is recorded at {worst.recorded:.4f} nats, "
            f"the ledger gives {worst.replayed:.4f}; at most {bound} may lie between"
        )
    elif not found.mean_explained:
        yield (
            f"not explained: tokens are off by {scientific(found.shadow.mean)} nats in the mean, at most "
            f"{found.tolerance / MEAN_SHARE:g} is rounding; the worst is rollout {worst.rollout}, token {worst.token}"
        )
    if found.breach is not None:
        yield f"not explained: {inline(found.breach)}"
    if not isinstance(found.ranked, str) and not found.rank_explained:
        what = "queries chose in" if found.ranked.selects else "left"
        yield (
            f"not explained: of what {what} rollout {found.ranked.rollout}, the policy would have chosen "
            f"{_percent(found.ranked.least)}; at least {_percent(found.ranked.wanted)} of its own come again"
        )
