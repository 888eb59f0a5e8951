"""Would the named policy have evicted what a ledger says left? Every choice of a row is made again.

One parallel pass under the ledger gives queries, keys and values as the sampler had them, to rounding. What the policy
saw at an eviction is cut out of them, evictions of a layer side by side as rows of one batch. The recorded history goes
on whatever the policy would have chosen, so one disagreement brings no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall
from kvaudit.audit.cache.beside import QueryCentres, QueryMoments
from kvaudit.audit.cache.evict import retained
from kvaudit.audit.cache.layers import LayerPlan, layer_plans
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.rotary import Rotary, rotary_for
from kvaudit.audit.policies import Evictor, Policy, evictor_of, quantiser_of
from kvaudit.audit.replay.attention import Replay
from kvaudit.audit.replay.codes import codes_of
from kvaudit.audit.replay.ranking_views import PassedLayer, Running, along
from kvaudit.audit.replay.schedule_check import Fed, evictions, forwards

# Of what left a rollout, the share that its policy has to choose again: rounding changes few of its own choices, and
# another ranking agrees on a quarter to a half of them (docs/replaying.md).
OWN_CHOICE: Mapping[torch.dtype, float] = {
    torch.float64: 0.98,
    torch.float32: 0.98,
    torch.float16: 0.97,
    torch.bfloat16: 0.97,
}
ROUGH_CHOICE = 0.85  # with codes in two bytes, where rounding is of the size of a code
FLIPS = 2  # choices of a rollout that rounding may change in two bytes, however few there are


class Rechosen(NamedTuple):
    """Entries that left the layers a policy governs, and how many of them it chooses again."""

    evicted: int
    again: int


class Ranked(NamedTuple):
    """Of the entries that left, the share that the named policy chooses again; ``least`` is that of the worst rollout.

    ``wanted`` is what a rollout of the policy's own has; ``least`` is 1 where no rollout has more than ``FLIPS`` others
    in two bytes.
    """

    evicted: int
    share: float
    least: float
    rollout: int
    wanted: float


def ranked(model: Any, rollouts: Sequence[Rollout], policy: Policy) -> Ranked | str:
    """Every choice of rollouts that keep the policy's schedule made again, or in words why none was."""
    evictor = evictor_of(policy)
    if evictor.selects:
        return "which keys queries chose is held by number and place only"
    if not evictor.evicts:
        return "the policy keeps every entry"
    if evictor.shares_heads and evictor.pinned_roles:
        return f"roles are not recorded, and pins move what heads share under {evictor.name}"
    if evictor.seeded and any(rollout.row_keys is None for rollout in rollouts):
        return f"{evictor.name} draws by the keys of rows, which the record does not hold"
    rotary = rotary_for(model, policy)
    made = [rechosen(model, rollout, policy, rotary) for rollout in rollouts]
    narrow = model.dtype.itemsize < torch.float32.itemsize
    forgiven = FLIPS if narrow and not evictor.blind else 0  # a blind ranking reads no states, so nothing rounds
    shares = {
        number: 1.0 if one.evicted - one.again <= forgiven else one.again / one.evicted
        for number, one in enumerate(made)
        if one.evicted
    }
    if not shares:
        return "nothing left the cache"
    worst, evicted = min(shares, key=shares.__getitem__), sum(one.evicted for one in made)
    rough = quantiser_of(policy) is not None and narrow
    wanted = 1.0 if evictor.blind else ROUGH_CHOICE if rough else OWN_CHOICE[model.dtype]
    return Ranked(evicted, sum(one.again for one in made) / evicted, shares[worst], worst, wanted)


@torch.no_grad()
def rechosen(model: Any, rollout: Rollout, policy: Policy, rotary: Rotary | None) -> Rechosen:
    """Rank again at every eviction of a rollout that keeps the policy's schedule (``breach`` is None)."""
    plans, fed = layer_plans(model.config, policy), forwards(rollout, policy.chunk)
    device, tokens = next(model.parameters()).device, fed[-1].seen
    ids, at = rollout.ids[None, :tokens].to(device), torch.arange(tokens, device=device)[None]
    context = Reranking(plans, at, rollout, fed, rotary)
    model(input_ids=ids, position_ids=at, use_cache=False, kv=context, logits_to_keep=1)
    context.settle()
    return Rechosen(context.evicted, context.again)


class Reranking(Replay):
    """A shadow pass of one row that ranks again at every eviction; pass it to a model's forward as ``kv=``."""

    def __init__(
        self, plans: Sequence[LayerPlan], at: Tensor, rollout: Rollout, fed: Sequence[Fed], rotary: Rotary | None
    ) -> None:
        tokens = at.shape[1]
        gone = rollout.evicted_at[None, :, :, :tokens].to(at.device)
        experts = None if rollout.experts is None else rollout.experts[None, :tokens].to(at.device)
        super().__init__(plans, at, at, gone, codes=codes_of([rollout], at), experts=experts)
        self._rollout, self._fed, self._rotary = rollout, fed, rotary
        self._waiting: list[list[_Ranks]] = []  # of layers whose choice is not made yet
        self._last_governed = max(layer for layer, plan in enumerate(plans) if plan.governed)
        self.evicted = self.again = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """See ``Replay.attend``."""
        plan, codes = self._plans[call.layer], self._codes
        if plan.governed and plan.evictor.evicts:
            assert self._evicted_at is not None
            stored = None if codes is None else self._stored(call, codes)
            passed = PassedLayer(call, self._keys, self._evicted_at[:, call.layer], stored, codes)
            self._choose(call.layer, list(self._ranks(passed, plan.evictor)), plan.evictor)
        return super().attend(call)

    def _ranks(self, passed: PassedLayer, policy: Evictor) -> Iterator[_Ranks]:
        due = evictions(policy, self._fed)
        queries, rotary = [one.query for one in due], self._rotary
        moments = QueryMoments(rotary, policy.sink) if rotary and policy.moments else None
        centres = QueryCentres(rotary) if rotary and policy.centres else None
        running = Running(
            masses=passed.masses(self._fed, set(queries)) if policy.accumulates else None,
            moments=None if moments is None else passed.statistics(moments, queries),
            centres=None if centres is None else passed.statistics(centres, queries),
        )
        for held, alike in groupby(due, lambda one: one.held):  # rows of one batch have one number of slots
            several = torch.tensor([one.query for one in alike], device=passed.gone.device)
            for times in torch.split(several, passed.most(held)):
                view = passed.view(times, policy, running, self._rollout)
                left = (along(passed.gone, view.positions) == times[:, None, None]) & (view.positions >= 0)
                yield _Ranks(policy.importance(view).float(), view.positions, times, left)

    def _choose(self, layer: int, ranks: list[_Ranks], policy: Evictor) -> None:
        """Count what left and what the policy chooses; layers that agree choose after the last one ranked."""
        self._waiting.append(ranks)
        if policy.across_layers and layer != self._last_governed:
            return
        # of layers that agree, the n-th parts are the same evictions
        for alike in zip(*self._waiting, strict=True):
            for one, agreed in zip(alike, policy.agreed([one.importance for one in alike]), strict=True):
                pinned = self._pinned(one.positions, policy)
                kept = retained(agreed, one.positions, one.seen, policy, pinned)
                self.evicted += int(one.left.sum())
                self.again += int((one.left & ~kept).sum())
        self._waiting = []

    def _pinned(self, positions: Tensor, policy: Evictor) -> Tensor | None:
        """Roles are not recorded: under ``pin``, what no governed layer let go counts as pinned."""
        if not policy.pinned_roles:
            return None
        governed = [layer for layer, plan in enumerate(self._plans) if plan.governed]
        stays = (self._rollout.evicted_at[governed] == NEVER).all(0).all(0).to(positions.device)
        return stays[positions]


class _Ranks(NamedTuple):
    """Evictions of one layer: importance, positions and what left [E, H, K], queries ``seen`` [E] that came next."""

    importance: Tensor
    positions: Tensor
    seen: Tensor
    left: Tensor
