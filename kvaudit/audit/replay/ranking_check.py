"""Check whether the named policy would have evicted the recorded entries, by ranking them again at every eviction.

One parallel pass computes the queries, keys and values. In this pass each query attends only to the entries that were
in the cache according to the ledger (the record of evictions), so the results equal the sampler's up to rounding. From
them follows what the policy looked at in each eviction; the evictions of a layer are ranked in batches, one row each.
The pass follows the recorded evictions even where the policy would have chosen others, so one disagreement causes no
other.
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
from kvaudit.audit.policies import Evictor, Policy, Selector, View, evictor_of, quantiser_of, selector_of
from kvaudit.audit.replay.attention import QuantisationTimes, Replay, quantisation_times, run_forward
from kvaudit.audit.replay.rollout_checks import ForwardStep, due_evictions, forward_steps

# The share of a rollout's evictions that its policy has to choose again: rounding changes few of a policy's own
# choices, while another ranking agrees on a quarter to a half of them (docs/results/verify.md).
REQUIRED_AGREEMENT: Mapping[torch.dtype, float] = {
    torch.float64: 0.98,
    torch.float32: 0.98,
    torch.float16: 0.97,
    torch.bfloat16: 0.97,
}
_CODED_AGREEMENT = 0.85  # quantised in a two-byte dtype, whose rounding is of the size of a code
_ALLOWED_FLIPS = 2  # choices per rollout that rounding of a two-byte dtype may always change
_MAX_ELEMENTS = 1 << 24  # of the keys, or of a slots x slots matrix, of one batch of evictions


class ChoiceCount(NamedTuple):
    """The number of recorded choices, and how many of them the policy makes again.

    A choice is one evicted cache entry. If the policy instead selects entries for each query, a choice is one selected
    block of consecutive positions.
    """

    evicted: int
    repeated: int


class RankingAgreement(NamedTuple):
    """The ``share`` of the recorded evictions that the policy repeats when it ranks again, over all rollouts.

    ``evicted`` is the number of recorded evictions, one per entry. ``lowest`` is the smallest share in one rollout,
    number ``rollout``; the check passes if ``lowest`` is at least ``required``. In a two-byte dtype, a rollout in which
    at most ``_ALLOWED_FLIPS`` evictions are not repeated has a share of 1, unless the policy ranks without looking at
    the entries. If the policy selects instead of evicting (``selects``), all numbers count selected units (runs of
    positions). A query's own unit is not counted, nor is a query that had no unit to leave out.
    """

    evicted: int
    share: float
    lowest: float
    rollout: int
    required: float
    selects: bool = False


def check_ranking(model: Any, rollouts: Sequence[Rollout], policy: Policy) -> RankingAgreement | str:
    """Return how often the policy, ranking again, repeats the recorded evictions or selections, over all rollouts.

    If that cannot be checked, return the reason as text. The rollouts must follow the policy's schedule, which says
    when to evict (``eviction_breach`` tests this).
    """
    evictor, selects = evictor_of(policy), selector_of(policy) is not None
    if not (evictor.evicts or selects):
        return "the policy keeps every entry"
    if evictor.shares_heads and evictor.pinned_roles and any(rollout.pinned is None for rollout in rollouts):
        return f"pins change how {evictor.name} shares a budget among heads, and the record has no pins"
    if evictor.seeded and any(rollout.row_keys is None for rollout in rollouts):
        return f"{evictor.name} draws by the keys of rows, which the record does not hold"
    rotary = find_rotary(model, policy)
    counts = [repeat_choices(model, rollout, policy, rotary) for rollout in rollouts]
    is_narrow = model.dtype.itemsize < torch.float32.itemsize
    allowed = _ALLOWED_FLIPS if is_narrow and not evictor.blind else 0  # a blind ranking reads no states to round
    shares = {
        number: 1.0 if count.evicted - count.repeated <= allowed else count.repeated / count.evicted
        for number, count in enumerate(counts)
        if count.evicted
    }
    if not shares:
        return "no query had more to choose from than it takes" if selects else "nothing left the cache"
    worst, evicted = min(shares, key=shares.__getitem__), sum(count.evicted for count in counts)
    is_coded = quantiser_of(policy) is not None and is_narrow
    required = 1.0 if evictor.blind else _CODED_AGREEMENT if is_coded else REQUIRED_AGREEMENT[model.dtype]
    repeated = sum(count.repeated for count in counts)
    return RankingAgreement(evicted, repeated / evicted, shares[worst], worst, required, selects)


@torch.no_grad()
def repeat_choices(model: Any, rollout: Rollout, policy: Policy, rotary: Rotary | None) -> ChoiceCount:
    """Return how many choices (evictions or selections) a rollout records, and how many of them the policy repeats.

    The rollout must follow the policy's schedule, which says when to evict (``eviction_breach`` tests this).
    """
    plans, steps = layer_plans(model.config, policy), forward_steps(rollout, policy.chunk)
    device, tokens = next(model.parameters()).device, steps[-1].seen
    context = Reranking(plans, torch.arange(tokens, device=device)[None], rollout, steps, rotary)
    run_forward(model, rollout.ids[None, :tokens], context, 1)
    return ChoiceCount(context.evicted, context.repeated)


class Reranking(Replay):
    """A replay of one row that ranks the entries again at every recorded eviction or selection, and counts agreements.

    Pass it to a model's forward as ``kv=``.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        positions: Tensor,
        rollout: Rollout,
        steps: Sequence[ForwardStep],
        rotary: Rotary | None,
    ) -> None:
        tokens, device = positions.shape[1], positions.device  # positions [1, T]
        evicted_at = rollout.evicted_at[None, :, :, :tokens].to(device)  # [1, L, H, T]
        experts = None if rollout.experts is None else rollout.experts[None, :tokens].to(device)
        # one token more than was fed: the last one drawn
        choices = batch_choices([rollout.selection], tokens + 1, device)
        codes = quantisation_times([rollout], positions)
        super().__init__(plans, positions, positions, evicted_at, codes=codes, experts=experts, choices=choices)
        self._rollout, self._steps, self._rotary = rollout, steps, rotary
        self._pending: list[list[_Ranking]] = []  # of layers that wait for the others to agree
        self._last_governed = max(layer for layer, plan in enumerate(plans) if plan.is_governed)
        self.evicted = self.repeated = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """Rank the layer's entries again, as at each recorded eviction or selection, then attend as ``Replay``."""
        plan, codes = self._plans[call.layer], self._codes
        if plan.is_governed and plan.evictor.evicts:
            assert self._evicted_at is not None
            decoded = None if codes is None else self._decode(call, codes)
            recorded = RecordedLayer(call, self._keys, self._evicted_at[:, call.layer], decoded, codes)
            self._count_evictions(call.layer, list(self._rank(recorded, plan.evictor)), plan.evictor)
        if plan.is_governed and plan.selector is not None and self._choices is not None:
            self._count_selections(call, plan.selector)
        return super().attend(call)

    def _count_selections(self, call: AttentionCall, selector: Selector) -> None:
        """Count the units (runs of positions) that queries selected, and how many of them the policy selects again.

        A query's own unit is not counted, nor is a query that had no unit to leave out.
        """
        selection = self._rollout.selection
        assert selection is not None
        queries = selection.queries.to(call.key.device)
        recorded = selection.chosen[selection.layers.index(call.layer)].to(queries.device)  # [A, N, k]
        layer = RecordedLayer(call, self._keys, call.key.new_zeros(0), None, None)
        # every query has its own copy of the keys
        most = max(1, _MAX_ELEMENTS // (call.key[0, :, : int(queries.max()) + 1].numel()))
        for index in torch.split(torch.arange(len(queries), device=queries.device), most):
            batch = queries[index].long()
            repeated = selector.choose(layer.selection_view(batch, self._rollout))  # [n, A, k]
            # [n, A, k] and [n, 1, 1]
            units, query_unit = recorded[:, index].transpose(0, 1), (batch // selector.unit)[:, None, None]
            has_choice = (units >= 0).sum(-1, keepdim=True) <= query_unit  # chose fewer units than exist
            counted = (units >= 0) & (units != query_unit) & has_choice
            is_repeated = (units[..., None] == repeated[..., None, :]).any(-1)  # [n, A, k]
            self.evicted += int(counted.sum())
            self.repeated += int((counted & is_repeated).sum())

    def _rank(self, layer: RecordedLayer, policy: Evictor) -> Iterator[_Ranking]:
        due = due_evictions(policy, self._steps)
        queries, rotary = [eviction.query for eviction in due], self._rotary
        statistics: dict[str, Iterator[Any]] = {}  # by field of View, one per eviction
        if policy.accumulates:
            statistics["mass"] = layer.masses(self._steps, set(queries))
        if rotary and policy.moments:
            statistics["moments"] = layer.query_statistics(QueryMoments(rotary, policy.sink), queries)
        if rotary and policy.centres:
            statistics["centres"] = layer.query_statistics(QueryCentres(rotary), queries)
        for size, evictions in groupby(due, lambda eviction: eviction.size):  # rows of a batch have equally many slots
            times = torch.tensor([eviction.query for eviction in evictions], device=layer.evicted_at.device)
            for batch in torch.split(times, layer.batch_size(size)):
                view = layer.view(batch, policy, statistics, self._rollout)
                # [E, H, K], the entries that the record evicts at this query
                evicted = (_at_positions(layer.evicted_at, view.positions) == batch[:, None, None]) & (
                    view.positions >= 0
                )
                yield _Ranking(policy.importance(view).float(), view.positions, batch, evicted)

    def _count_evictions(self, layer: int, rankings: list[_Ranking], policy: Evictor) -> None:
        """Count the evicted entries of a layer, and how many of them the policy evicts again.

        Layers that are ranked together are counted after the last of them.
        """
        self._pending.append(rankings)
        if policy.across_layers and layer != self._last_governed:
            return
        # the n-th ranking of every pending layer is of the same evictions
        for same_evictions in zip(*self._pending, strict=True):
            agreed = policy.agreed([ranking.importance for ranking in same_evictions])
            for ranking, importance in zip(same_evictions, agreed, strict=True):
                pinned = self._find_pinned(ranking.positions, policy)
                kept = keep_mask(importance, ranking.positions, ranking.seen, policy, pinned)  # [E, H, K]
                self.evicted += int(ranking.evicted.sum())
                self.repeated += int((ranking.evicted & ~kept).sum())
        self._pending = []

    def _find_pinned(self, positions: Tensor, policy: Evictor) -> Tensor | None:
        """Return which entries are pinned (never evicted), or None if the policy pins nothing.

        If pins are not recorded, the entries that no layer under the policy has evicted count as pinned.
        """
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


class _Ranking(NamedTuple):
    """E evictions of one layer, ranked again: each entry's importance and position, and whether the record evicts it.

    These are [E, H, K]; ``seen`` [E] is the number of tokens at each eviction.
    """

    importance: Tensor
    positions: Tensor
    seen: Tensor
    evicted: Tensor


@dataclass(frozen=True)
class RecordedLayer:
    """The queries, keys and values of one layer in a replayed row of T tokens, and when each entry was evicted.

    ``decoded`` are the keys and values [1, H, T, D] as they are once quantised; None without a quantiser.
    """

    call: AttentionCall
    positions: Tensor  # [1, T]
    evicted_at: Tensor  # [1, H, T]
    decoded: tuple[Tensor, Tensor] | None
    codes: QuantisationTimes | None

    def batch_size(self, size: int) -> int:
        """Return how many evictions, each from ``size`` entries, to rank in one batch, so that memory stays bounded."""
        # a batch holds D numbers per entry; a ranking by similarity holds one per pair of entries
        return max(1, _MAX_ELEMENTS // (self.call.key.shape[1] * size * max(size, self.call.key.shape[3])))

    def view(self, times: Tensor, policy: Evictor, statistics: Mapping[str, Iterator[Any]], rollout: Rollout) -> View:
        """Return what the policy saw at E evictions, as a ``View`` with one row for each.

        Eviction i took place just before the query at position ``times[i]``. ``statistics`` gives for some fields of
        the view (such as "mass", the attention mass) an iterator with the next value for each eviction.
        """
        positions = self.slots(times)
        window = times[:, None] + torch.arange(-policy.observed_queries, 0, device=times.device)  # [E, W]
        queries = self.call.query[0][:, window.clamp(min=0)].transpose(0, 1)  # [E, G*H, W, D]
        view = self._view(rollout, times, positions, self.entries(positions, times), queries, window.clamp(min=-1))
        for name, rows in statistics.items():
            if name == "mass":
                view = view._replace(mass=torch.cat([_at_positions(next(rows), row[None]) for row in positions]))
            else:
                view = view._replace(**{name: _batch([next(rows) for _ in times])})
        return view

    def selection_view(self, queries: Tensor, rollout: Rollout) -> View:
        """Return what the policy saw, as a ``View``, when E queries selected among all earlier entries.

        ``queries`` [E] are their positions.
        """
        heads, longest = self.call.key.shape[1], int(queries.max()) + 1
        columns = torch.arange(longest, device=queries.device)
        positions = torch.where(columns <= queries[:, None], columns, -1)[:, None].expand(-1, heads, -1)  # [E, H, K]
        keys, values = (x[:, :, :longest].expand(len(queries), -1, -1, -1) for x in (self.call.key, self.call.value))
        newest = self.call.query[0, :, queries].transpose(0, 1)[:, :, None]  # [E, G*H, 1, D]
        view = self._view(rollout, queries + 1, positions, (keys, values), newest, queries[:, None])
        return view._replace(longest=longest)

    def _view(
        self,
        rollout: Rollout,
        seen: Tensor,
        positions: Tensor,
        entries: tuple[Tensor, Tensor],
        queries: Tensor,
        query_positions: Tensor,
    ) -> View:
        prompt_key, suffix_key = rollout.row_keys or (0, 0)  # only for policies that draw
        return View(
            layer=self.call.layer,
            keys=entries[0],
            values=entries[1],
            positions=positions,
            seen=seen,
            queries=queries,
            query_positions=query_positions,
            mass=entries[0].new_zeros(entries[0].shape[:3]),
            scaling=self.call.scaling,
            entry_keys=torch.where(positions < rollout.prompt_length, prompt_key, suffix_key),
            sink_logits=self.call.sink_logits,
        )

    def slots(self, times: Tensor) -> Tensor:
        """Return the positions [E, H, K] of the entries among which the policy chose at each of E evictions.

        Eviction e took place before query ``times[e]``; -1 fills up heads with fewer entries.
        """
        seen = times[:, None, None]
        # entries that leave at this very query are still held: the policy chose among them
        is_held = (self.positions[:, None] < seen) & (self.evicted_at >= seen)  # [E, H, T]
        counts = is_held.sum(2, keepdim=True)  # [E, H, 1]
        # stable: held entries come first, in order of position
        order = is_held.int().sort(dim=2, descending=True, stable=True).indices[:, :, : int(counts.max())]
        return torch.where(self.positions[:, None, : order.shape[2]] < counts, order, -1)

    def entries(self, positions: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values at ``positions`` [E, H, K], as they were before E evictions: [E, H, K, D] each.

        An entry is decoded if it was quantised before ``times[e]``, the query before which eviction e took place.
        """
        exact = [_at_positions(x, positions) for x in (self.call.key, self.call.value)]
        if self.decoded is None or self.codes is None:
            return exact[0], exact[1]
        # each [E, H, K]
        quantised_at = [_at_positions(x[:, None], positions) for x in (self.codes.keys_at, self.codes.values_at)]
        keys, values = (
            # not at the time itself: codes are made after the eviction
            torch.where((at < times[:, None, None])[..., None], _at_positions(decoded, positions), plain)
            for plain, decoded, at in zip(exact, self.decoded, quantised_at, strict=True)
        )
        return keys, values

    def masses(self, steps: Sequence[ForwardStep], due: set[int]) -> Iterator[Tensor]:
        """Yield, for each eviction, the attention that every entry has got so far: float32 [1, H, T].

        ``due`` are the numbers of tokens at the evictions; the attention is accumulated over the forwards ``steps``.
        """
        total, start = torch.zeros(self.evicted_at.shape, device=self.evicted_at.device), 0
        for seen, _ in steps:
            time, fed = torch.tensor([seen], device=self.evicted_at.device), slice(start, seen)
            slots = self.slots(time)
            keys, _ = self.entries(slots, time)
            mass = attention_mass(
                self.call.query[:, :, fed],
                self.positions[:, fed],
                keys,
                slots,
                self.call.scaling,
                self.call.sink_logits,
            )
            total.scatter_add_(2, slots.clamp(min=0), mass)
            start = seen
            if seen in due:
                yield total.clone()

    def query_statistics(self, sums: QueryMoments | QueryCentres, due: Sequence[int]) -> Iterator[Any]:
        """Yield, for each eviction, the statistics (``Moments`` or ``Centres``) of all queries before it.

        ``due`` are the numbers of tokens at the evictions; ``sums`` adds the queries up.
        """
        start = 0
        for seen in due:
            sums.add(self.call.query[:, :, start:seen], self.positions[:, start:seen])
            start = seen
            yield sums.of(slice(None))


def _at_positions(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return the entries of ``tensor`` [1, H, T, ...] at the positions [E, H, K] of E evictions: [E, H, K, ...].

    They are arbitrary where the position is -1.
    """
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    return tensor[0].expand(positions.shape[1], *tensor.shape[2:])[heads, positions]


def _batch(rows: Sequence[Any]) -> Any:
    """Combine the query statistics (``Moments`` or ``Centres``) of several rows into one batch, and return it."""
    tensors = [torch.cat(parts) for parts in zip(*(row[:2] for row in rows), strict=True)]
    return type(rows[0])(*tensors, *rows[0][2:])
