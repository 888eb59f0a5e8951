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
        gone = rollout.evicted_at[layer].long()
        for rule in (_never, _protected, _exact, _phase, _prompt, _decoding):
            if (words := rule(gone, rollout, plan.policy)) is not None:
                return f"layer {layer}: {words}"
            if not plan.policy.evicts:
                break
    return None


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
    held = _held(gone)
    for time in _times(gone):
        wrong = (held[:, time] != policy.budget).nonzero()
        if len(wrong):
            head = int(wrong[0])
            return f"head {head} keeps {int(held[head, time])} entries after query {time - 1}, budget {policy.budget}"
    return None


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
