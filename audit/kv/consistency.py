"""What a ledger must look like under the policy it names, as far as counting can tell: nothing is ranked again.

The rankings behind an eviction cannot be checked without repeating it, and a repetition flips under rounding. What can
be checked exactly is how many entries stay, when they may leave, and which never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from audit.kv.layers import LayerPlan
from audit.kv.ledger import NEVER, Rollout
from audit.policies import Policy


def breach(rollout: Rollout, plans: Sequence[LayerPlan]) -> str | None:
    """The first rule of its layer's policy that a ledger breaks, in words, or None; one plan per layer of the ledger.

    Rules: nothing leaves a cache that never evicts; sink and window stay; an eviction leaves exactly ``budget`` entries
    in every head; it comes in the policy's ``phase``; and it comes when it is due.
    """
    assert len(plans) == len(rollout.evicted_at), (len(plans), rollout.evicted_at.shape)
    for layer, plan in enumerate(plans):
        gone, policy = rollout.evicted_at[layer].long(), plan.policy.evictor
        rules = (_protected, _exact, _phase, _prompt, _decoding) if policy.evicts else (_never,)
        words = next((found for rule in rules if (found := rule(gone, rollout, policy)) is not None), None)
        if words is not None:
            return f"layer {layer}: {words}"
    return None


def quantisation_breach(rollout: Rollout, policy: Policy) -> str | None:
    """Whether codec and times are those of the policy's quantiser; its schedule depends on token counts alone."""
    codec = policy.quantiser
    named = "" if codec is None else codec.canonical
    if rollout.codec != named:
        return f"the ledger was quantised by {rollout.codec or 'nothing'}, the policy names {named or 'nothing'}"
    if codec is None:
        return None
    for name, until in (("keys", codec.keys_until), ("values", codec.values_until)):
        recorded = rollout.keys_quantised_at if name == "keys" else rollout.values_quantised_at
        assert recorded is not None
        expected = _times_quantised(rollout, until, policy.chunk)
        if len(wrong := (recorded != expected).nonzero()):
            entry = int(wrong[0])
            return f"the {name} of entry {entry} are quantised at {int(recorded[entry])}, due at {int(expected[entry])}"
    return None


def _times_quantised(rollout: Rollout, until: Callable[[int, int], int], chunk: int) -> Tensor:
    """The query [T] that first saw each entry as a code: after every forward, the codec says how far it has come."""
    times: list[int] = []
    for seen in _forwards(rollout, chunk):
        times += [seen] * (until(len(times), seen) - len(times))
    padded = [*times, *([NEVER] * (len(rollout.ids) - len(times)))]
    return torch.tensor(padded, dtype=torch.int32)


def _forwards(rollout: Rollout, chunk: int) -> list[int]:
    """Tokens seen after each forward: given ones come a chunk at a time, drawn ones singly, the last not at all."""
    sampled = rollout.sampled.tolist()
    end = len(sampled) - sampled[-1]
    ends, start = [], 0
    while start < end:
        most = min(end, start + chunk)
        stop = next((index for index in range(start + 1, most) if sampled[index]), most)
        ends.append(stop)
        start = stop
    return ends


Rule = Callable[[Tensor, Rollout, Policy], str | None]  # [H, T] of one layer -> what is wrong with it


def _never(gone: Tensor, _: Rollout, policy: Policy) -> str | None:
    left = (gone < NEVER).nonzero()
    if policy.evicts or not len(left):
        return None
    return f"entry {int(left[0, 1])} left the cache, {policy.name} keeps every entry"


def _protected(gone: Tensor, _: Rollout, policy: Policy) -> str | None:
    age = gone - torch.arange(gone.shape[1])  # queries that saw the entry
    if bool((gone[:, : policy.sink] < NEVER).any()):
        return f"one of the first {policy.sink} entries left, the policy keeps them"
    early = ((gone < NEVER) & (age <= policy.window)).nonzero()
    if len(early):
        head, entry = early[0].tolist()
        return f"entry {entry} left at query {int(gone[head, entry])}, inside the last {policy.window} that stay"
    return None


def _exact(gone: Tensor, _: Rollout, policy: Policy) -> str | None:
    times = _times(gone)
    held = _held(gone)[:, times]
    wrong = (held != policy.budget).nonzero()
    if not len(wrong):
        return None
    head, place = wrong[wrong[:, 1].argmin()].tolist()  # the earliest
    count, query = int(held[head, place]), times[place] - 1
    return f"head {head} keeps {count} entries after query {query}, budget {policy.budget}"


def _phase(gone: Tensor, rollout: Rollout, policy: Policy) -> str | None:
    if policy.phase == "both":
        return None
    drawn = _drawn(rollout)
    for time in _times(gone):
        if bool(drawn[time - 1]) != (policy.phase == "decode"):
            what = "a decode step" if drawn[time - 1] else "given tokens"
            return f"an entry left after {what}, query {time - 1}; phase={policy.phase}"
    return None


def _prompt(gone: Tensor, rollout: Rollout, policy: Policy) -> str | None:
    most = int(_held(gone)[:, rollout.prompt_length].max())
    if policy.phase == "decode" or most <= policy.budget:
        return None
    return f"{most} entries stay after the prompt, budget {policy.budget}"


def _decoding(gone: Tensor, rollout: Rollout, policy: Policy) -> str | None:
    if policy.phase == "prefill":
        return None
    steps, run = torch.zeros(len(rollout.ids) + 1, dtype=torch.int64), 0
    for index, drawn in enumerate(_drawn(rollout).tolist()):
        run = run + 1 if drawn else 0
        steps[index + 1] = run  # decode steps in a row before the query
    held = _held(gone).amax(0)
    late = ((steps >= policy.interval) & (held >= policy.budget + policy.interval)).nonzero()[:, 0].tolist()
    if not late:
        return None
    return f"{int(held[late[0]])} entries at query {late[0]}, budget {policy.budget} and interval {policy.interval}"


def _held(gone: Tensor) -> Tensor:
    """Earlier entries that each query sees, [H, T + 1]: those before it less those that left by then."""
    tokens = gone.shape[1]
    left = torch.zeros(len(gone), tokens + 2, dtype=torch.int64)
    left.scatter_add_(1, gone.clamp(max=tokens + 1), torch.ones_like(gone))
    return torch.arange(tokens + 1) - left.cumsum(1)[:, : tokens + 1]


def _times(gone: Tensor) -> list[int]:
    return [time for time in torch.unique(gone).tolist() if time <= gone.shape[1]]


def _drawn(rollout: Rollout) -> Tensor:
    """Tokens [T] that entered the cache by a decode step: a turn's last one comes with what is given next."""
    drawn = rollout.sampled.clone()
    drawn[:-1] &= rollout.sampled[1:]
    drawn[-1] = False
    return drawn
