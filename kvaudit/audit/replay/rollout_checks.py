"""Checks of recorded rollouts that need no forward pass: format, model, and the policy's schedule.

The times of evictions and the numbers of kept entries follow from token counts alone, so both are checked exactly.
Which entries are evicted depends on the policy's ranking, which ``kvaudit.audit.replay.ranking_check`` repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.layers import LayerPlan, kv_heads
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.selection import attends_to_nothing, selection_fault
from kvaudit.audit.policies import Evictor, Policy, Quantiser, quantiser_of, selector_of
from kvaudit.core.errors import DataError

LOGPROB_ROUNDING = 1e-5  # nats: a log-prob above 0 by no more than this counts as 0


@dataclass(frozen=True)
class RecordedRollouts:
    """The rollouts of one file, with the ``policy`` that compressed the cache they were sampled from.

    ``policy`` is None if the file names no policy, or one that kvaudit does not know. ``temperature`` is that of the
    log-probs, ``policy_hash`` the hash that the file gives for the policy, ``trained_policy`` the policy that the
    checkpoint's provenance says it was trained under; None if not recorded.
    """

    source: str
    rollouts: tuple[Rollout, ...]
    policy: Policy | None
    temperature: float | None = None
    policy_hash: str | None = None
    trained_policy: Policy | None = None


def check_replayable(recorded: RecordedRollouts, config: Any, max_positions: int) -> None:
    """Raise DataError if a rollout is malformed or the model of ``config`` cannot have sampled it."""
    text = config.get_text_config(decoder=True)
    expected = (text.num_hidden_layers, kv_heads(config))
    if not recorded.rollouts:
        raise DataError(f"rollouts {recorded.source!r} hold no rollout")
    for number, rollout in enumerate(recorded.rollouts):
        where, tokens = f"rollouts {recorded.source!r}: rollout {number}", len(rollout.ids)
        if fault := rollout_fault(rollout) or _choice_fault(rollout, text.num_attention_heads):
            raise DataError(f"{where} {fault}")
        if (got := tuple(rollout.evicted_at.shape[:2])) != expected:
            got_text, expected_text = (f"{layers} layers of {heads} KV heads" for layers, heads in (got, expected))
            raise DataError(f"{where} has {got_text}, the model {expected_text}: it is of another model")
        if fault := model_misfit(tokens, int(rollout.ids.min()), int(rollout.ids.max()), config, max_positions):
            raise DataError(f"{where} {fault}")


def model_misfit(tokens: int, lowest: int, highest: int, config: Any, max_positions: int) -> str | None:
    """Return why a model cannot have sampled ``tokens`` tokens with ids ``lowest`` to ``highest``; None if it can."""
    vocabulary = config.get_text_config(decoder=True).vocab_size
    if tokens > max_positions:
        return f"has {tokens} tokens, the model {max_positions} positions: it is of another model"
    if not 0 <= lowest <= highest < vocabulary:
        return f"has token ids outside the model's {vocabulary}: it is of another model"
    return None


def rollout_fault(rollout: Rollout) -> str | None:
    """Return what is wrong with a rollout under any model (types, lengths, an invalid log-prob); None if nothing is."""
    return _shape_fault(rollout) or _logprob_fault(rollout)


def _shape_fault(rollout: Rollout) -> str | None:
    tokens = len(rollout.ids)
    types = (rollout.ids.dtype, rollout.sampled.dtype, rollout.sampler_logprobs.dtype, type(rollout.prompt_length))
    if types != (torch.int64, torch.bool, torch.float32, int):
        return f"holds {', '.join(str(kind) for kind in types)}, wanted ids, flags, log-probs and a whole number"
    tables = [times for times in (rollout.keys_quantised_at, rollout.values_quantised_at) if times is not None]
    if any(times.dtype != torch.int32 or times.dim() != 1 for times in tables):
        return "holds quantisation times of another shape or type than one int32 per token"
    lengths = {*map(len, tables), len(rollout.sampled), len(rollout.sampler_logprobs), rollout.evicted_at.shape[-1]}
    if lengths != {tokens}:
        return f"has {tokens} tokens, but masks, log-probs or ledger of {sorted(lengths)}"
    if not 1 <= rollout.prompt_length < tokens:
        return f"has prompt_length {rollout.prompt_length}, wanted 1 to {tokens - 1}"
    if bool(rollout.sampled[: rollout.prompt_length].any()) or not bool(rollout.sampled.any()):
        return "has sampled tokens in its prompt, or none at all"
    return None


def _choice_fault(rollout: Rollout, heads: int) -> str | None:
    """Return what is wrong with the chosen experts and keys in a model of ``heads`` query heads; None if nothing is."""
    if rollout.experts is not None and (fault := _expert_fault(rollout.experts, len(rollout.ids))):
        return fault
    selection = rollout.selection
    if selection is None:
        return None
    if fault := selection_fault(selection, rollout.evicted_at):
        return fault
    # one list for all heads, one by KV head, or one by query head
    if (lists := selection.chosen.shape[1]) not in (1, rollout.evicted_at.shape[1], heads):
        return f"has choices of {lists} heads, wanted 1, {rollout.evicted_at.shape[1]} or {heads}"
    if rollout.codec:
        return "has queries that select among quantised keys, which cannot be replayed"
    return (
        "has a query that selected only evicted entries" if attends_to_nothing(selection, rollout.evicted_at) else None
    )


def _expert_fault(experts: Tensor, tokens: int) -> str | None:
    if experts.dtype != torch.int16 or experts.dim() != 3 or len(experts) != tokens or 0 in experts.shape:
        return f"has experts of shape {tuple(experts.shape)}, {experts.dtype}, for {tokens} tokens"
    ordered = experts[:-1].sort(-1).values  # the last token may never have been fed
    if bool((ordered < 0).any()) or bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        return "sends a token to no expert, or to one of them twice"
    return None


def _logprob_fault(rollout: Rollout) -> str | None:
    drawn = rollout.sampled.nonzero()[:, 0]
    values = rollout.sampler_logprobs[drawn]
    wrong = (~torch.isfinite(values) | (values > LOGPROB_ROUNDING)).nonzero()
    if not len(wrong):
        return None
    first = int(wrong[0])
    return f"has log-prob {float(values[first])} at token {int(drawn[first])}, wanted a finite number of at most 0"


class ForwardStep(NamedTuple):
    """One forward of a row: how many tokens the row had after it, and whether it decoded (fed one sampled token)."""

    seen: int
    decoding: bool


class DueEviction(NamedTuple):
    """An eviction that is due by token counts: just before query ``query``, ``size`` entries are cut to ``budget``."""

    query: int
    size: int
    budget: int


def eviction_breach(rollout: Rollout, plans: Sequence[LayerPlan]) -> str | None:
    """Return the first rule of the policy that a ledger breaks, as text, or None; ``plans`` has one plan per layer.

    Rules: sink and window are kept; entries are evicted when the policy's schedule says and at no other time; each
    eviction keeps exactly ``budget`` entries in every head, or on average over heads that share a budget; a
    sliding-window layer drops its oldest entries first.
    """
    assert len(plans) == len(rollout.evicted_at), (len(plans), rollout.evicted_at.shape)
    for layer, (plan, evicted_at) in enumerate(zip(plans, rollout.evicted_at.long(), strict=True)):
        policy = plan.evictor
        due = due_evictions(policy, forward_steps(rollout, plan.policy.chunk))
        if plan.sliding_window is None:
            fault = _protection_fault(evicted_at, policy) or _schedule_fault(evicted_at, policy, due)
        else:
            fault = _sliding_window_fault(evicted_at, policy.budget, due)
        if fault is not None:
            return f"layer {layer}: {fault}"
    return None


def forward_steps(rollout: Rollout, chunk: int) -> list[ForwardStep]:
    """Return the forwards that fed a row: prompt tokens in chunks, sampled tokens one by one.

    A sampled token that is followed by given tokens, such as a tool's reply, is fed with them. A sampled token at the
    end of the row was never fed.
    """
    sampled = rollout.sampled.tolist()
    end = len(sampled) - sampled[-1]  # a token drawn last was never fed
    steps, start = [], 0
    while start < end:
        # the prompt is fed separately, even if more is given before anything is drawn
        most = min(end, start + chunk, rollout.prompt_length if start < rollout.prompt_length else end)
        # a forward ends before the next drawn token, which begins another
        stop = next((index for index in range(start + 1, most) if sampled[index]), most)
        drawn_next = start + 1 < len(sampled) and sampled[start + 1]
        steps.append(ForwardStep(stop, sampled[start] and drawn_next))
        start = stop
    return steps


def due_evictions(policy: Evictor, steps: Sequence[ForwardStep]) -> list[DueEviction]:
    """Return the evictions that a policy makes in a row fed by ``steps``.

    They follow from the policy's ``interval``, ``phase`` and budget, and from the number of tokens.
    """
    if not policy.evicts:
        return []
    due, size, decoded, before = [], 0, 0, 0  # decoded: steps since the last eviction
    budgets = policy.budget_at(torch.tensor([seen for seen, _ in steps], dtype=torch.int64)).tolist()
    for (seen, decoding), budget in zip(steps, budgets, strict=True):
        size, decoded, before = size + seen - before, decoded + decoding, seen
        # an eviction follows every chunk of prompt tokens; ``interval`` applies to decoding only
        ready = decoded >= policy.interval if decoding else True
        if size > budget and ready and policy.phase != ("prefill" if decoding else "decode"):
            due.append(DueEviction(seen, size, budget))
            size, decoded = budget, 0
    return due


def quantisation_breach(rollout: Rollout, policy: Policy) -> str | None:
    """Return how the recorded quantiser, or the times of quantising, contradict the policy; None if they agree.

    The times follow from token counts alone.
    """
    codec = quantiser_of(policy)
    if rollout.codec != codec:
        used, named = ("nothing" if c is None else c.canonical for c in (rollout.codec, codec))
        return f"the ledger was quantised by {used}, the policy names {named}"
    if codec is None:
        return None
    for name, until in (("keys", codec.keys_until), ("values", codec.values_until)):
        recorded = rollout.keys_quantised_at if name == "keys" else rollout.values_quantised_at
        assert recorded is not None
        expected = _due_quantisation(rollout, codec, until, policy.chunk)
        if len(wrong := (recorded != expected).nonzero()):
            entry = int(wrong[0])
            return f"the {name} of entry {entry} are quantised at {int(recorded[entry])}, due at {int(expected[entry])}"
    return None


def _due_quantisation(rollout: Rollout, codec: Quantiser, until: Callable[[int, int], int], chunk: int) -> Tensor:
    """Return for each of T entries the first query that should read it quantised: int32 [T], NEVER if none should.

    This follows from the codec's schedule. ``until`` is the codec's ``keys_until`` or ``values_until``; ``chunk`` is
    how many prompt tokens enter at once.
    """
    times: list[int] = []
    for seen, _ in forward_steps(rollout, chunk):
        times += codec.first_queries(len(times), until(len(times), seen), seen)
    return torch.tensor([*times, *([NEVER] * (len(rollout.ids) - len(times)))], dtype=torch.int32)


def selection_breach(rollout: Rollout, policy: Policy, plans: Sequence[LayerPlan]) -> str | None:
    """Return how the recorded selections contradict the policy, or None if they agree.

    Checked are which queries selected, in which layers, and how many units (runs of positions) each query selected.
    """
    selector, selection = selector_of(policy), rollout.selection
    if selector is None:
        return (
            None
            if selection is None
            else "queries selected what they attend to, under the policy they attend to everything"
        )
    layers = [n for n, plan in enumerate(plans) if plan.is_governed and plan.selector is not None]
    due = [seen - 1 for seen, decoding in forward_steps(rollout, policy.chunk) if decoding] if layers else []
    if selection is None or not len(selection.queries):
        return f"query {due[0]} attends to everything, under the policy it selects" if due else None
    if (selection.unit, list(selection.layers)) != (selector.unit, layers):
        return (
            f"layers {list(selection.layers)} select units of {selection.unit} entries, under the policy layers "
            f"{layers} select units of {selector.unit}"
        )
    if differing := sorted({*due} ^ {*selection.queries.tolist()}):
        acts = ("attends to everything", "selects")
        is_act, due_act = acts if differing[0] in due else acts[::-1]
        return f"query {differing[0]} {is_act}, under the policy it {due_act}"
    counts = (selection.chosen >= 0).sum(-1)
    expected = torch.tensor([selector.units_at(query + 1) for query in due])
    wrong = (counts != expected).nonzero()
    if not len(wrong):
        return None
    slot, head, place = wrong[0].tolist()
    return (
        f"layer {layers[slot]}, head {head}: query {due[place]} selects {int(counts[slot, head, place])} units, "
        f"the policy {int(expected[place])}"
    )


def _protection_fault(evicted_at: Tensor, policy: Evictor) -> str | None:
    """Return a text about a protected entry (sink or recent one) that a layer evicted; None if there is none.

    ``evicted_at`` [H, T] says when each entry left.
    """
    if not policy.evicts:
        return None
    age = evicted_at - torch.arange(evicted_at.shape[1])  # queries that saw the entry
    if bool((evicted_at[:, : policy.sink] < NEVER).any()):
        return f"one of the first {policy.sink} entries was evicted, the policy protects them"
    # an eviction protects positions >= seen - window
    too_early = ((evicted_at < NEVER) & (age <= policy.window)).nonzero()
    if len(too_early):
        head, entry = too_early[0].tolist()
        return (
            f"entry {entry} was evicted at query {int(evicted_at[head, entry])}, the last {policy.window} are protected"
        )
    return None


def _schedule_fault(evicted_at: Tensor, policy: Evictor, due: Sequence[DueEviction]) -> str | None:
    """Return a text about the first query at which a layer evicted a wrong number of entries; None if there is none.

    ``evicted_at`` [H, T] are the layer's times, ``due`` the evictions that token counts demand.
    """
    due_at, evicted = {eviction.query: eviction for eviction in due}, _eviction_counts(evicted_at)  # left [H, T + 1]
    for query in sorted({*due_at, *evicted.any(0).nonzero()[:, 0].tolist()}):
        if query not in due_at:
            entry = int((evicted_at == query).any(0).nonzero()[0])
            return f"entry {entry} left the cache after query {query - 1}, {_no_eviction(policy, query, due)}"
        if fault := _count_fault(evicted[:, query], due_at[query], policy):
            return f"{fault[0]} {fault[1]} entries after query {query - 1}, budget {fault[2]}"
    return None


def _count_fault(evicted: Tensor, due: DueEviction, policy: Evictor) -> tuple[str, int, int] | None:
    """Return None if each head evicted as many entries as were due, else the three parts of a message.

    The parts are who keeps a wrong number of entries (as in "head 3 keeps"), that number, and the right one.
    ``evicted`` [H] is the number of entries that left each head.
    """
    if policy.shares_heads:
        kept, budget = int(len(evicted) * due.size - evicted.sum()), len(evicted) * due.budget
        return None if kept == budget else ("all heads keep", kept, budget)
    wrong = (due.size - evicted != due.budget).nonzero()[:, 0].tolist()
    return (f"head {wrong[0]} keeps", int(due.size - evicted[wrong[0]]), due.budget) if wrong else None


def _no_eviction(policy: Evictor, query: int, due: Sequence[DueEviction]) -> str:
    if not policy.evicts:
        return f"{policy.name} keeps every entry"
    later = next((f"before query {eviction.query - 1}" for eviction in due if eviction.query > query), "from there on")
    return f"{policy.name} evicts nothing {later}"


def _eviction_counts(evicted_at: Tensor) -> Tensor:
    """Return how many entries each head evicted just before each query, int64 [H, T + 1]."""
    width = evicted_at.shape[1] + 1
    counts = torch.zeros(len(evicted_at), width + 1, dtype=torch.int64)
    # NEVER falls into the last column, which is cut off
    return counts.scatter_add_(1, evicted_at.clamp(max=width), torch.ones_like(evicted_at))[:, :width]


def _sliding_window_fault(evicted_at: Tensor, window: int, due: Sequence[DueEviction]) -> str | None:
    """Return a text about the first entry that a sliding-window layer evicted at a wrong time; None if there is none.

    ``evicted_at`` [H, T] are the layer's times, ``due`` the evictions that token counts demand.
    """
    edges = torch.tensor([eviction.query for eviction in due], dtype=torch.int64)
    # an entry leaves with the first eviction that is more than a window later: edge - window > entry
    place = torch.searchsorted(edges - window, torch.arange(evicted_at.shape[1]), right=True)
    expected = torch.cat([edges, torch.tensor([NEVER])])[place]  # [T]
    wrong = (evicted_at != expected).any(0).nonzero()[:, 0].tolist()
    if not wrong:
        return None
    entry = wrong[0]
    head = int((evicted_at[:, entry] != expected[entry]).nonzero()[0])
    actual_time, due_time = (
        "never" if time == NEVER else f"at query {int(time)}" for time in (evicted_at[head, entry], expected[entry])
    )
    return (
        f"entry {entry} of head {head} leaves {actual_time}, due by the layer's sliding window of {window}: {due_time}"
    )
