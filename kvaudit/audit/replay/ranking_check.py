"""Would the named policy have evicted what a ledger says left? Every choice of a row is made again.

One parallel pass under the ledger gives queries, keys and values as the sampler had them, to rounding. What the policy
saw at an eviction is cut out of them, evictions of a layer side by side as rows of one batch. The recorded history goes
on whatever the policy would have chosen, so one disagreement brings no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall
from kvaudit.audit.cache.evict import attention_mass, keep_mask
from kvaudit.audit.cache.layer_state import QueryCentres, QueryMoments
from kvaudit.audit.cache.layers import LayerPlan, layer_plans
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.rotary import Rotary, find_rotary
from kvaudit.audit.cache.selection import batch_choices
from kvaudit.audit.policies import (
    Centres,
    Evictor,
    Moments,
    Policy,
    Selector,
    View,
    evictor_of,
    quantiser_of,
    selector_of,
)
from kvaudit.audit.replay.attention import Replay
from kvaudit.audit.replay.attention import CodedSince, codes_of
from kvaudit.audit.replay.rollout_checks import ForwardStep, due_evictions, forward_steps

# Of what left a rollout, the share that its policy has to choose again: rounding changes few of its own choices, and
# another ranking agrees on a quarter to a half of them (docs/results/verify.md).
REQUIRED_AGREEMENT: Mapping[torch.dtype, float] = {
    torch.float64: 0.98,
    torch.float32: 0.98,
    torch.float16: 0.97,
    torch.bfloat16: 0.97,
}
ROUGH_CHOICE = 0.85  # with codes in two bytes, where rounding is of the size of a code
ELEMENTS = 1 << 24  # of keys, or of a matrix over slots, that evictions side by side may take
FLIPS = 2  # choices of a rollout that rounding may change in two bytes, however few there are


class ChoiceCount(NamedTuple):
    """Entries that left the layers a policy governs, and how many of them it chooses again."""

    evicted: int
    again: int


class RankingAgreement(NamedTuple):
    """Of the entries that left, the share that the named policy chooses again; ``least`` is that of the worst rollout.

    ``wanted`` is what a rollout of the policy's own has; ``least`` is 1 where no rollout has more than ``FLIPS`` others
    in two bytes. Where queries choose (``selects``), ``evicted`` are the units that they chose among more, their own
    left out.
    """

    evicted: int
    share: float
    least: float
    rollout: int
    wanted: float
    selects: bool = False


def ranked(model: Any, rollouts: Sequence[Rollout], policy: Policy) -> RankingAgreement | str:
    """Every choice of rollouts that keep the policy's schedule made again, or in words why none was."""
    evictor, selects = evictor_of(policy), selector_of(policy) is not None
    if not (evictor.evicts or selects):
        return "the policy keeps every entry"
    if evictor.shares_heads and evictor.pinned_roles and any(rollout.pinned is None for rollout in rollouts):
        return f"pins move what heads share under {evictor.name}, and the record does not hold them"
    if evictor.seeded and any(rollout.row_keys is None for rollout in rollouts):
        return f"{evictor.name} draws by the keys of rows, which the record does not hold"
    rotary = find_rotary(model, policy)
    made = [repeat_choices(model, rollout, policy, rotary) for rollout in rollouts]
    narrow = model.dtype.itemsize < torch.float32.itemsize
    forgiven = FLIPS if narrow and not evictor.blind else 0  # a blind ranking reads no states, so nothing rounds
    shares = {
        number: 1.0 if one.evicted - one.again <= forgiven else one.again / one.evicted
        for number, one in enumerate(made)
        if one.evicted
    }
    if not shares:
        return "no query had more to choose from than it takes" if selects else "nothing left the cache"
    worst, evicted = min(shares, key=shares.__getitem__), sum(one.evicted for one in made)
    rough = quantiser_of(policy) is not None and narrow
    wanted = 1.0 if evictor.blind else ROUGH_CHOICE if rough else REQUIRED_AGREEMENT[model.dtype]
    return RankingAgreement(evicted, sum(one.again for one in made) / evicted, shares[worst], worst, wanted, selects)


@torch.no_grad()
def repeat_choices(model: Any, rollout: Rollout, policy: Policy, rotary: Rotary | None) -> ChoiceCount:
    """Rank again at every eviction of a rollout that keeps the policy's schedule (``breach`` is None)."""
    plans, fed = layer_plans(model.config, policy), forward_steps(rollout, policy.chunk)
    device, tokens = next(model.parameters()).device, fed[-1].seen
    ids, at = rollout.ids[None, :tokens].to(device), torch.arange(tokens, device=device)[None]
    context = Reranking(plans, at, rollout, fed, rotary)
    model(input_ids=ids, position_ids=at, use_cache=False, kv=context, logits_to_keep=1)
    context.settle()
    return ChoiceCount(context.evicted, context.again)


class Reranking(Replay):
    """A shadow pass of one row that ranks again at every eviction; pass it to a model's forward as ``kv=``."""

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        at: Tensor,
        rollout: Rollout,
        fed: Sequence[ForwardStep],
        rotary: Rotary | None,
    ) -> None:
        tokens = at.shape[1]
        evicted_at = rollout.evicted_at[None, :, :, :tokens].to(at.device)  # [1, L, H, T]
        experts = None if rollout.experts is None else rollout.experts[None, :tokens].to(at.device)
        # a token more than was fed: the last one drawn
        choices = batch_choices([rollout.selection], tokens + 1, at.device)
        super().__init__(plans, at, at, evicted_at, codes=codes_of([rollout], at), experts=experts, choices=choices)
        self._rollout, self._fed, self._rotary = rollout, fed, rotary
        self._waiting: list[list[_Ranks]] = []  # of layers whose choice is not made yet
        self._last_governed = max(layer for layer, plan in enumerate(plans) if plan.is_governed)
        self.evicted = self.again = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """See ``Replay.attend``."""
        plan, codes = self._plans[call.layer], self._codes
        if plan.is_governed and plan.evictor.evicts:
            assert self._evicted_at is not None
            stored = None if codes is None else self._stored(call, codes)
            passed = PassedLayer(call, self._keys, self._evicted_at[:, call.layer], stored, codes)
            self._choose(call.layer, list(self._ranks(passed, plan.evictor)), plan.evictor)
        if plan.is_governed and plan.selector is not None and self._choices is not None:
            self._select(call, plan.selector)
        return super().attend(call)

    def _select(self, call: AttentionCall, selector: Selector) -> None:
        """Count the units that queries chose among more, their own left out, and those that they choose again."""
        made = self._rollout.selection
        assert made is not None
        queries = made.queries.to(call.key.device)
        recorded = made.chosen[made.layers.index(call.layer)].to(queries.device)  # [A, N, k]
        passed = PassedLayer(call, self._keys, call.key.new_zeros(0), None, None)
        # keys are laid out anew for every query
        most = max(1, ELEMENTS // (call.key[0, :, : int(queries.max()) + 1].numel()))
        for some in torch.split(torch.arange(len(queries), device=queries.device), most):
            at = queries[some].long()
            again = selector.choose(passed.asked(at, self._rollout))  # [N, A, k]
            # [n, A, k] and [n, 1, 1]
            units, own = recorded[:, some].transpose(0, 1), (at // selector.unit)[:, None, None]
            among = (units >= 0).sum(-1, keepdim=True) <= own  # fewer than there are
            counted = (units >= 0) & (units != own) & among
            found = (units[..., None] == again[..., None, :]).any(-1)  # [n, A, k]
            self.evicted += int(counted.sum())
            self.again += int((counted & found).sum())

    def _ranks(self, passed: PassedLayer, policy: Evictor) -> Iterator[_Ranks]:
        due = due_evictions(policy, self._fed)
        queries, rotary = [one.query for one in due], self._rotary
        moments = QueryMoments(rotary, policy.sink) if rotary and policy.moments else None
        centres = QueryCentres(rotary) if rotary and policy.centres else None
        running = Running(
            masses=passed.masses(self._fed, set(queries)) if policy.accumulates else None,
            moments=None if moments is None else passed.statistics(moments, queries),
            centres=None if centres is None else passed.statistics(centres, queries),
        )
        for held, alike in groupby(due, lambda one: one.held):  # rows of one batch have one number of slots
            several = torch.tensor([one.query for one in alike], device=passed.evicted_at.device)
            for times in torch.split(several, passed.most(held)):
                view = passed.view(times, policy, running, self._rollout)
                # [E, H, K], what left at this very query by the record
                left = (along(passed.evicted_at, view.positions) == times[:, None, None]) & (view.positions >= 0)
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
                kept = keep_mask(agreed, one.positions, one.seen, policy, pinned)  # [E, H, K]
                self.evicted += int(one.left.sum())
                self.again += int((one.left & ~kept).sum())
        self._waiting = []

    def _pinned(self, positions: Tensor, policy: Evictor) -> Tensor | None:
        """Where pins are not recorded, what no governed layer let go counts as pinned."""
        if not policy.pinned_roles:
            return None
        if self._rollout.pinned is not None:
            table = torch.zeros(self._keys.shape[1], dtype=torch.bool)  # [T]
            for start, end in self._rollout.pinned:
                table[start:end] = True
            return table.to(positions.device)[positions]
        governed = [layer for layer, plan in enumerate(self._plans) if plan.is_governed]
        stays = (self._rollout.evicted_at[governed] == NEVER).all(0).all(0).to(positions.device)  # [T]
        return stays[positions]


class _Ranks(NamedTuple):
    """Evictions of one layer: importance, positions and what left [E, H, K], queries ``seen`` [E] that came next."""

    importance: Tensor
    positions: Tensor
    seen: Tensor
    left: Tensor


class Running(NamedTuple):
    """What a policy asks for of all queries so far, eviction by eviction; None where it does not ask."""

    masses: Iterator[Tensor] | None
    moments: Iterator[Moments] | None
    centres: Iterator[Centres] | None


@dataclass(frozen=True)
class PassedLayer:
    """What one layer computed for a row of T tokens, and what codes make of its keys and values [1, H, T, D]."""

    call: AttentionCall
    at: Tensor  # [1, T]
    evicted_at: Tensor  # [1, H, T]
    stored: tuple[Tensor, Tensor] | None
    codes: CodedSince | None

    def most(self, held: int) -> int:
        """How many evictions from ``held`` entries are ranked at once."""
        # keys take D numbers an entry, a ranking by likeness one for every other entry
        return max(1, ELEMENTS // (self.call.key.shape[1] * held * max(held, self.call.key.shape[3])))

    def view(self, times: Tensor, policy: Evictor, running: Running, rollout: Rollout) -> View:
        """What the policy saw when it evicted before queries ``times`` [E]."""
        positions = self.slots(times)
        keys, values = self.entries(positions, times)
        window = times[:, None] + torch.arange(-policy.observed_queries, 0, device=times.device)  # [E, W]
        asked = self.call.query[0][:, window.clamp(min=0)].transpose(0, 1)  # [E, G*H, W, D]
        return View(
            layer=self.call.layer,
            keys=keys,
            values=values,
            positions=positions,
            seen=times,
            queries=asked,
            query_positions=window.clamp(min=-1),
            mass=keys.new_zeros(keys.shape[:3]) if running.masses is None else _taken(running.masses, positions),
            scaling=self.call.scaling,
            entry_keys=_entry_keys(rollout, positions),
            moments=None if running.moments is None else _moments([next(running.moments) for _ in times]),
            centres=None if running.centres is None else _centres([next(running.centres) for _ in times]),
            sink_logits=self.call.sink_logits,
        )

    def asked(self, queries: Tensor, rollout: Rollout) -> View:
        """What the policy saw when the queries at these positions [E] chose among all before them."""
        heads, longest = self.call.key.shape[1], int(queries.max()) + 1
        columns = torch.arange(longest, device=queries.device)
        positions = torch.where(columns <= queries[:, None], columns, -1)[:, None].expand(-1, heads, -1)  # [E, H, K]
        keys, values = (
            part[:, :, :longest].expand(len(queries), -1, -1, -1) for part in (self.call.key, self.call.value)
        )
        return View(
            layer=self.call.layer,
            keys=keys,
            values=values,
            positions=positions,
            seen=queries + 1,
            queries=self.call.query[0, :, queries].transpose(0, 1)[:, :, None],  # [E, G*H, 1, D]
            query_positions=queries[:, None],
            mass=keys.new_zeros(keys.shape[:3]),
            scaling=self.call.scaling,
            entry_keys=_entry_keys(rollout, positions),
            sink_logits=self.call.sink_logits,
            longest=longest,
        )

    def slots(self, times: Tensor) -> Tensor:
        """Positions [E, H, K] of what the cache held before it evicted for queries ``times`` [E], then -1."""
        seen = times[:, None, None]
        # what leaves at this very query is there: the policy chose among it
        there = (self.at[:, None] < seen) & (self.evicted_at >= seen)  # [E, H, T]
        counts = there.sum(2, keepdim=True)  # [E, H, 1]
        # stable: what is there comes first, in order of position
        order = there.int().sort(dim=2, descending=True, stable=True).indices[:, :, : int(counts.max())]
        return torch.where(self.at[:, None, : order.shape[2]] < counts, order, -1)

    def entries(self, positions: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [E, H, K, D] at positions [E, H, K], as codes where they were before queries ``times``."""
        exact = [along(part, positions) for part in (self.call.key, self.call.value)]
        if self.stored is None or self.codes is None:
            return exact[0], exact[1]
        # each [E, H, K]
        since = [along(part[:, None], positions) for part in (self.codes.keys_at, self.codes.values_at)]
        keys, values = (
            # not at the time itself: codes are made after the eviction
            torch.where((at < times[:, None, None])[..., None], along(coded, positions), plain)
            for plain, coded, at in zip(exact, self.stored, since, strict=True)
        )
        return keys, values

    def masses(self, fed: Sequence[ForwardStep], due: set[int]) -> Iterator[Tensor]:
        """Attention that every entry has drawn by each eviction, [1, H, T] float32."""
        total, start = torch.zeros(self.evicted_at.shape, device=self.evicted_at.device), 0
        for seen, _ in fed:
            time, part = torch.tensor([seen], device=self.evicted_at.device), slice(start, seen)
            slots = self.slots(time)
            keys, _ = self.entries(slots, time)
            new = attention_mass(
                self.call.query[:, :, part], self.at[:, part], keys, slots, self.call.scaling, self.call.sink_logits
            )
            total.scatter_add_(2, slots.clamp(min=0), new)
            start = seen
            if seen in due:
                yield total.clone()

    def statistics(self, sums: QueryMoments | QueryCentres, due: Sequence[int]) -> Iterator[Any]:
        """What ``sums`` says of all queries before each eviction."""
        start = 0
        for seen in due:
            sums.add(self.call.query[:, :, start:seen], self.at[:, start:seen])
            start = seen
            yield sums.of(slice(None))


def _entry_keys(rollout: Rollout, positions: Tensor) -> Tensor:
    """The key of the row that each entry was made for; any, where the policy draws nothing."""
    prompt, own = rollout.row_keys or (0, 0)
    return torch.where(positions < rollout.prompt_length, prompt, own)


def along(tensor: Tensor, positions: Tensor) -> Tensor:
    """What ``tensor`` [1, H, T, ...] holds at positions [E, H, K], anything at -1: [E, H, K, ...]."""
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    return tensor[0].expand(positions.shape[1], *tensor.shape[2:])[heads, positions]


def _taken(masses: Iterator[Tensor], positions: Tensor) -> Tensor:
    return torch.cat([along(next(masses), places[None]) for places in positions])


def _moments(parts: Sequence[Moments]) -> Moments:
    """One batch of several rows."""
    mean, covariance = (torch.cat(same) for same in zip(*(part[:2] for part in parts), strict=True))
    return Moments(mean, covariance, parts[0].turn)


def _centres(parts: Sequence[Centres]) -> Centres:
    """One batch of several rows."""
    mean, length = (torch.cat(same) for same in zip(*(part[:2] for part in parts), strict=True))
    return Centres(mean, length, parts[0].turn, parts[0].lengths)
