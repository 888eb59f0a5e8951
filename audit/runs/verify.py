"""Does the recorded policy explain the recorded log-probs? Replay rollouts under their ledger and compare, in nats.

The shadow pass sees what the sampler saw, so what remains between the two is rounding. Each row is replayed by itself,
without the shared prompt pass of the learner: a prompt entry that only one member's ledger misstates would hide there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.quantised.hints import Strays
from kvaudit.audit.cache.routing import watched_blocks
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.replay.interchange import read_rollouts
from kvaudit.audit.replay.learner_pass import LearnerPass, suffix_logits
from kvaudit.audit.replay.ranking_check import Ranked, ranked
from kvaudit.audit.replay.recorded import Recorded, check_replayable
from kvaudit.audit.replay.schedule_check import breach, quantisation_breach, selection_breach
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.arms import get_arm
from kvaudit.audit.training.batch import microbatches
from kvaudit.audit.training.checkpoint import FINAL_LEDGER, LEDGERS
from kvaudit.audit.training.rollouts import ledger_stem
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.files import read_json
from kvaudit.core.provenance import PROVENANCE, check_checkpoint

# Nats on the worst token, and a tenth of it on the mean: several times what rounding was measured to leave
# (docs/verify-rollouts.md), so that a longer context or another kernel is no alarm.
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


@dataclass(frozen=True)
class Gaps:
    """log p_sampler - log p_pass over sampled tokens, nats: largest and mean size, and two estimates of the KL.

    ``kl`` is the mean, which estimates KL(sampler || pass); ``k3`` the mean of r - log r - 1 with r = pass / sampler,
    which estimates the same and is never below 0 (Schulman 2020).
    """

    largest: float
    mean: float
    kl: float
    k3: float


class Worst(NamedTuple):
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

    policy: str | None
    rollouts: int
    tokens: int
    shadow: Gaps
    dense: Gaps
    worst: Worst
    tolerance: float  # on the worst token, nats; a tenth of it on the mean
    breach: str | None
    rerouted: bool  # experts were chosen anew: the rollouts do not say which they were
    ranked: Ranked | str

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
        return self.shadow.mean <= self.mean_tolerance

    @property
    def mean_tolerance(self) -> float:
        """Nats."""
        return self.tolerance / MEAN_SHARE


def checkpoint_rollouts(folder: Path) -> list[Recorded]:
    """The rollouts a finished checkpoint was left with, by the policies that a mixture drew.

    Raises DataError where files are changed or there are none. Intermediate ledgers came from weights that are not
    kept: they are held to their hashes alone.
    """
    if not (folder / PROVENANCE).is_file():
        raise DataError(
            f"{str(folder)!r} holds no {PROVENANCE}; give the folder of a finished checkpoint, such as "
            "RUN/checkpoints/ARM/seed-N, or --rollouts FILE --model MODEL"
        )
    check_checkpoint(folder)
    story = read_json(folder / PROVENANCE)
    try:
        config = story["config"]
        trained = parse_policy(str(config["policy"]) if get_arm(config["arm"]).rollout == "compressed" else "none")
        temperature = float(config["temperature"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{str(folder / PROVENANCE)!r} does not say how it was trained ({error!r})") from None
    mixed = len(trained.draws) > 1
    names = {f"{ledger_stem(FINAL_LEDGER, own, mixed=mixed)}.safetensors": own for own in trained.draws}
    kept = {name: own for name, own in names.items() if name in story["ledgers"]}
    if not kept:
        raise DataError(
            f"checkpoint {str(folder)!r} keeps no {LEDGERS}/{min(names)}; train it again with ledger_every above 0"
        )
    return [
        replace(read_rollouts(folder / LEDGERS / name), temperature=temperature, trained_policy=own)
        for name, own in kept.items()
    ]


def verify(
    model: LoadedModel, recorded: Recorded, *, tolerance: float | None = None, temperature: float | None = None
) -> Verification:
    """Replay the rollouts with ``model``; raises DataError where it cannot have sampled them.

    ``tolerance`` is in nats on the worst token, by default the dtype's; ``temperature`` replaces the recorded one.
    """
    check_replayable(recorded, model.model.config, model.max_positions)
    policy = recorded.policy
    if policy is not None and not policy.replayable:
        raise SpecError(f"rollouts {recorded.source!r} are of policy {policy.canonical}, which cannot be replayed")
    heat = next((value for value in (temperature, recorded.temperature) if value is not None), 1.0)
    rollouts = recorded.rollouts
    basis = TOLERANCE[model.dtype] if tolerance is None else tolerance
    taken = torch.cat([rollout.sampler_logprobs[rollout.sampled] for rollout in rollouts]).double()
    strays: Strays = []
    reroute = any(rollout.experts is None for rollout in rollouts)
    replayed = {which: _logprobs(model.model, rollouts, which, heat, strays, reroute=reroute) for which in PASSES}
    broken = None if policy is None else _breach(recorded, policy, model.model.config)
    return Verification(
        policy=None if policy is None else policy.canonical,
        rollouts=len(rollouts),
        tokens=len(taken),
        shadow=_gaps(taken, replayed["shadow"]),
        dense=_gaps(taken, replayed["dense"]),
        worst=_worst(rollouts, taken, replayed["shadow"]),
        tolerance=basis,
        breach=broken or _stray(strays),
        rerouted=reroute and watched_blocks(model.model) > 0,
        ranked=_ranked(model.model, rollouts, policy, broken),
    )


def _stray(strays: Strays) -> str | None:
    """A recorded code that rounding cannot have decided, in words; ``strays`` are rollouts and layers."""
    if not strays:
        return None
    rollout, layer = min(strays)
    others = f", and {len(strays) - 1} more" if len(strays) > 1 else ""
    return (
        f"rollout {rollout}, layer {layer}: a recorded code is at no border in the replay{others}; it was not sampled"
    )


def _ranked(model: Any, rollouts: Sequence[Rollout], policy: Policy | None, broken: str | None) -> Ranked | str:
    if policy is None or broken is not None:
        return "no policy is named" if policy is None else "the ledger does not keep the policy's schedule"
    return ranked(model, rollouts, policy)


def _breach(recorded: Recorded, policy: Policy, config: Any) -> str | None:
    if recorded.policy_hash is not None and recorded.policy_hash != policy.hash:
        return f"the ledger names {policy.canonical}, whose hash is {policy.hash}, and the hash {recorded.policy_hash}"
    trained = recorded.trained_policy
    if trained is not None and trained != policy:
        return f"the ledger names {policy.canonical}, the checkpoint was trained with {trained.canonical}"
    plans = layer_plans(config, policy)
    found = (
        (
            number,
            breach(rollout, plans) or quantisation_breach(rollout, policy) or selection_breach(rollout, policy, plans),
        )
        for number, rollout in enumerate(recorded.rollouts)
    )
    return next((f"rollout {number}, {words}" for number, words in found if words is not None), None)


@torch.no_grad()
def _logprobs(
    model: Any, rollouts: Sequence[Rollout], which: LearnerPass, temperature: float, strays: Strays, *, reroute: bool
) -> Tensor:
    """Log-probs of every sampled token under a pass: float64 [n], rollout after rollout, nats.

    ``strays`` grows by the rollout and layer of every recorded code that is at no border in the replay.
    """
    found: dict[int, Tensor] = {}
    for rows in microbatches(rollouts, 1, PASS_TOKENS):
        picked = [rollouts[row] for row in rows]
        found_strays: Strays = []
        logits, _ = suffix_logits(model, picked, group=1, kind=which, reroute=reroute, strays=found_strays)
        strays += [(rows[place], layer) for place, layer in found_strays]
        for place, row in enumerate(rows):
            suffix = slice(rollouts[row].prompt_length, None)
            drawn = rollouts[row].sampled[suffix].nonzero()[:, 0]
            chosen = logits[place, drawn.to(logits.device)]
            # greedy draws are recorded with the log-probs of temperature 1
            found[row] = _of(chosen, rollouts[row].ids[suffix][drawn].to(logits.device), temperature or 1.0).cpu()
    return torch.cat([found[row] for row in range(len(rollouts))])


def _of(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-probs [n] of ``ids`` [n] from logits [n, V], a few rows at a time in float64."""
    parts = [
        (block.double() / temperature).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        for block, chosen in zip(torch.split(logits, _ROWS), torch.split(ids, _ROWS), strict=True)
    ]
    return torch.cat(parts)


def _gaps(taken: Tensor, replayed: Tensor) -> Gaps:
    gap = _finite(taken - replayed)
    size = gap.abs()
    return Gaps(*(float(value) for value in (size.max(), size.mean(), gap.mean(), ((-gap).exp() + gap - 1.0).mean())))


def _worst(rollouts: Sequence[Rollout], taken: Tensor, replayed: Tensor) -> Worst:
    place = int(_finite(taken - replayed).abs().argmax())
    tokens = [(number, token) for number, r in enumerate(rollouts) for token in r.sampled.nonzero()[:, 0].tolist()]
    return Worst(*tokens[place], float(taken[place]), float(replayed[place]))


def _finite(gap: Tensor) -> Tensor:
    """A log-prob that is no number explains nothing."""
    return torch.where(gap.isnan(), math.inf, gap)
