"""What a ledger must look like under the policy it names, as far as counting can tell: nothing is ranked again.

When an eviction comes and how many entries it leaves follows from token counts alone, so both are worked out here and
compared to the last query. Which entries leave is the policy's ranking, which
``kvaudit.audit.replay.ranking_check`` repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.layers import LayerPlan
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.policies import Evictor, Policy, Quantiser, quantiser_of, selector_of


class ForwardStep(NamedTuple):
    """One forward of a row: the tokens seen after it, and whether it fed a drawn token by itself."""

    seen: int
    decoding: bool


class DueEviction(NamedTuple):
    """An eviction that token counts ask for: from query ``query`` on, ``held`` entries have become ``budget``."""

    query: int
    held: int
    budget: int


def breach(rollout: Rollout, plans: Sequence[LayerPlan]) -> str | None:
    """The first rule of its layer's policy that a ledger breaks, in fault, or None; one plan per layer of the ledger.

    Rules: sink and window stay; entries leave when the policy's schedule says and at no other time; exactly ``budget``
    are left then in every head; and a layer with a sliding window of its own keeps that, oldest out first.
    """
    assert len(plans) == len(rollout.evicted_at), (len(plans), rollout.evicted_at.shape)
    for layer, (plan, evicted_at) in enumerate(zip(plans, rollout.evicted_at.long(), strict=True)):
        policy = plan.evictor
        due = due_evictions(policy, forward_steps(rollout, plan.policy.chunk))
        if plan.sliding_window is None:
            fault = _protected(evicted_at, policy) or _schedule(evicted_at, policy, due)
        else:
            fault = _sliding(evicted_at, policy.budget, due)
        if fault is not None:
            return f"layer {layer}: {fault}"
    return None


def forward_steps(rollout: Rollout, chunk: int) -> list[ForwardStep]:
    """How a row was fed: given tokens a chunk at a time, drawn ones singly, the last one not at all.

    The last token drawn before something is given enters with what is given.
    """
    sampled = rollout.sampled.tolist()
    end = len(sampled) - sampled[-1]  # a token drawn last was never fed
    found, start = [], 0
    while start < end:
        # the prompt enters by itself, also where more is given before anything is drawn
        most = min(end, start + chunk, rollout.prompt_length if start < rollout.prompt_length else end)
        # a forward ends before the next drawn token, which begins another
        stop = next((index for index in range(start + 1, most) if sampled[index]), most)
        drawn_next = start + 1 < len(sampled) and sampled[start + 1]
        found.append(ForwardStep(stop, sampled[start] and drawn_next))
        start = stop
    return found


def due_evictions(policy: Evictor, fed: Sequence[ForwardStep]) -> list[DueEviction]:
    """When a policy evicts from a row that was fed so, as ``interval``, ``phase`` and ``budget`` say."""
    if not policy.evicts:
        return []
    found, held, decoded, before = [], 0, 0, 0  # decoded: steps since the last eviction
    budgets = policy.budget_at(torch.tensor([seen for seen, _ in fed], dtype=torch.int64)).tolist()
    for (seen, decoding), budget in zip(fed, budgets, strict=True):
        held, decoded, before = held + seen - before, decoded + decoding, seen
        # what is given is evicted from after every chunk, whatever the interval
        ready = decoded >= policy.interval if decoding else True
        if held > budget and ready and policy.phase != ("prefill" if decoding else "decode"):
            found.append(DueEviction(seen, held, budget))
            held, decoded = budget, 0
    return found


def quantisation_breach(rollout: Rollout, policy: Policy) -> str | None:
    """Whether codec and times are those of the policy's quantiser; its schedule depends on token counts alone."""
    codec = quantiser_of(policy)
    if rollout.codec != codec:
        used, named = ("nothing" if one is None else one.canonical for one in (rollout.codec, codec))
        return f"the ledger was quantised by {used}, the policy names {named}"
    if codec is None:
        return None
    for name, until in (("keys", codec.keys_until), ("values", codec.values_until)):
        recorded = rollout.keys_quantised_at if name == "keys" else rollout.values_quantised_at
        assert recorded is not None
        expected = _times_quantised(rollout, codec, until, policy.chunk)
        if len(wrong := (recorded != expected).nonzero()):
            entry = int(wrong[0])
            return f"the {name} of entry {entry} are quantised at {int(recorded[entry])}, due at {int(expected[entry])}"
    return None


def selection_breach(rollout: Rollout, policy: Policy, plans: Sequence[LayerPlan]) -> str | None:
    """Whether the queries, layers and numbers of units chosen are those of the policy; not which units."""
    selector, made = selector_of(policy), rollout.selection
    if selector is None:
        return None if made is None else "queries chose what they attend to, the policy has them see everything"
    layers = [n for n, plan in enumerate(plans) if plan.is_governed and plan.selector is not None]
    steps = [seen - 1 for seen, decoding in forward_steps(rollout, policy.chunk) if decoding] if layers else []
    if made is None or not len(made.queries):
        return f"query {steps[0]} attends to everything, it was drawn and chooses" if steps else None
    if (made.unit, list(made.layers)) != (selector.unit, layers):
        return (
            f"layers {list(made.layers)} choose {made.unit} entries at once, those of the policy are {layers}, "
            f"{selector.unit} at once"
        )
    if odd := sorted({*steps} ^ {*made.queries.tolist()}):
        return f"query {odd[0]} {'attends to everything' if odd[0] in steps else 'chooses'}, other than the policy's"
    due = torch.tensor([selector.units_at(query + 1) for query in steps])
    wrong = ((made.chosen >= 0).sum(-1) != due).nonzero()
    if not len(wrong):
        return None
    slot, head, place = wrong[0].tolist()
    count = int((made.chosen[slot, head, place] >= 0).sum())
    return f"layer {layers[slot]}, head {head}: query {steps[place]} chooses {count} units, due are {int(due[place])}"


def _times_quantised(rollout: Rollout, codec: Quantiser, until: Callable[[int, int], int], chunk: int) -> Tensor:
    """The query [T] that first saw each entry as a code: after every forward, the codec says how far it has come."""
    times: list[int] = []
    for seen, _ in forward_steps(rollout, chunk):
        times += codec.first_queries(len(times), until(len(times), seen), seen)
    padded = [*times, *([NEVER] * (len(rollout.ids) - len(times)))]
    return torch.tensor(padded, dtype=torch.int32)


def _protected(evicted_at: Tensor, policy: Evictor) -> str | None:
    """Of one layer [H, T]: whether an entry left that the policy protects."""
    if not policy.evicts:
        return None
    age = evicted_at - torch.arange(evicted_at.shape[1])  # queries that saw the entry
    if bool((evicted_at[:, : policy.sink] < NEVER).any()):
        return f"one of the first {policy.sink} entries left, the policy keeps them"
    early = ((evicted_at < NEVER) & (age <= policy.window)).nonzero()  # an eviction protects positions >= seen - window
    if len(early):
        head, entry = early[0].tolist()
        return f"entry {entry} left at query {int(evicted_at[head, entry])}, inside the last {policy.window} that stay"
    return None


def _schedule(evicted_at: Tensor, policy: Evictor, due: Sequence[DueEviction]) -> str | None:
    """Of one layer [H, T]: the first query at which other than the due number of entries left."""
    due_at, left = {one.query: one for one in due}, _leaving(evicted_at)  # by query; [H, T + 1]
    for query in sorted({*due_at, *left.any(0).nonzero()[:, 0].tolist()}):
        if query not in due_at:
            entry = int((evicted_at == query).any(0).nonzero()[0])
            return f"entry {entry} left the cache after query {query - 1}, {_idle(policy, query, due)}"
        if fault := _wrong_count(left[:, query], due_at[query], policy):
            return f"{fault[0]} {fault[1]} entries after query {query - 1}, budget {fault[2]}"
    return None


def _wrong_count(left: Tensor, due: DueEviction, policy: Evictor) -> tuple[str, int, int] | None:
    """Who keeps how many where another number is due; ``left`` [H] entries at once, together if heads share."""
    if policy.shares_heads:
        kept, budget = int(len(left) * due.held - left.sum()), len(left) * due.budget
        return None if kept == budget else ("all heads keep", kept, budget)
    wrong = (due.held - left != due.budget).nonzero()[:, 0].tolist()
    return (f"head {wrong[0]} keeps", int(due.held - left[wrong[0]]), due.budget) if wrong else None


def _idle(policy: Evictor, query: int, due: Sequence[DueEviction]) -> str:
    """What the policy does where nothing is due."""
    if not policy.evicts:
        return f"{policy.name} keeps every entry"
    later = next((f"before query {one.query - 1}" for one in due if one.query > query), "from there on")
    return f"{policy.name} evicts nothing {later}"


def _leaving(evicted_at: Tensor) -> Tensor:
    """How many entries of each head left at each query: int64 [H, T + 1]."""
    most = evicted_at.shape[1] + 1
    counts = torch.zeros(len(evicted_at), most + 1, dtype=torch.int64)
    # NEVER falls into the last column, which is cut off
    return counts.scatter_add_(1, evicted_at.clamp(max=most), torch.ones_like(evicted_at))[:, :most]


def _sliding(evicted_at: Tensor, window: int, due: Sequence[DueEviction]) -> str | None:
    """Of one layer [H, T] that only has its own window: the first entry that left at another time than it must."""
    edges = torch.tensor([one.query for one in due], dtype=torch.int64)
    # an entry goes with the first eviction that it is more than a window before: edge - window > entry
    place = torch.searchsorted(edges - window, torch.arange(evicted_at.shape[1]), right=True)
    expected = torch.cat([edges, torch.tensor([NEVER])])[place]  # [T]
    wrong = (evicted_at != expected).any(0).nonzero()[:, 0].tolist()
    if not wrong:
        return None
    head = int((evicted_at[:, wrong[0]] != expected[wrong[0]]).nonzero()[0])
    when, must = (_when(int(time)) for time in (evicted_at[head, wrong[0]], expected[wrong[0]]))
    return f"entry {wrong[0]} of head {head} leaves {when}, out of the layer's own window of {window} it falls {must}"


def _when(time: int) -> str:
    return "never" if time == NEVER else f"at query {time}"
