"""One prefill for the caches of several policies.

Until the first chunk of a prompt has attended, nothing has been compressed: the model brings the same queries, keys and
values to every cache, whatever its policy. So one cache computes them, and the others take them over, layer by layer,
and evict or quantise as they would have done. They end up bit for bit as if each had prefilled by itself. Policies
differ before that in two ways only, and then prefill apart: their first chunks have other lengths, or entries become
codes before their own queries attend (``quantiser_on_write``). Chunks after the first are every policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import KVHandler, AttentionCall
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.layers import LayerRun, States
from kvaudit.audit.cache.routing import RecordedRoutes
from kvaudit.audit.policies import Mixture, Policy, evictor_of, quantiser_on_write

FirstForward = Callable[[KVHandler], Tensor]  # a forward of the first chunk with this behind ``kv=``; its logits


class Prompts(NamedTuple):
    """The whole prompts of a batch, right-padded: ids and row positions [B, T] on the CPU, -1 where padding is."""

    ids: Tensor
    positions: Tensor

    def same(self, other: Prompts) -> bool:
        """Whether these are the same tokens at the same places."""
        return torch.equal(self.ids, other.ids) and torch.equal(self.positions, other.positions)


class _Carried(NamedTuple):
    """The states that a layer of linear attention was left with."""

    layer: int
    states: States


@dataclass
class _Recorder:
    """Stands before a cache at ``kv=`` and keeps what every layer brings; ``queries``: somebody will look at those."""

    cache: EvictingCache
    queries: bool
    steps: list[AttentionCall | _Carried] = field(default_factory=list)

    @property
    def routes(self) -> RecordedRoutes | None:
        return self.cache.routes

    def attend(self, call: AttentionCall) -> Tensor:
        out = self.cache.attend(call)
        batch, heads, _, size = call.query.shape
        # queries of length 0 where nobody looks: they would be most of what is kept
        self.steps.append(call if self.queries else call._replace(query=call.query.new_empty(batch, heads, 0, size)))
        return out

    def carry(self, layer: int, hidden: Tensor, run: LayerRun) -> Tensor:
        out = self.cache.carry(layer, hidden, run)
        states = self.cache.layers[layer].states
        assert states is not None
        self.steps.append(_Carried(layer, states.repeated(1)))  # a copy: the cache goes on with its own
        return out

    def settle(self) -> None:
        self.cache.settle()


@dataclass(eq=False)
class _Prefill:
    """A first chunk that is computed: of which prompts, under whose policy, and for how many others."""

    prompts: Prompts
    policy: Policy
    steps: list[AttentionCall | _Carried]
    experts: Tensor | None  # what ``RecordedRoutes`` noted
    logits: Tensor
    waiting: int


class SharedPrefill:
    """The prefills of one batch of prompts under several policies, which are played one after the other.

    What is kept for those to come is a batch's keys and values of the first chunk, and its queries where one of them
    looks at those: beside the one cache that is being played, as much as one dense cache, or with G query heads per KV
    head 1 + G / 2 of them, however many policies there are. It goes with the last policy that takes it.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        # in the order in which they are played; rows of a mixture are of several policies and prefill by themselves
        self._policies = [policy for policy in policies if not isinstance(policy, Mixture)]
        self.kept: list[_Prefill] = []

    def logits(self, cache: EvictingCache, prompts: Prompts, forward: FirstForward) -> Tensor:
        """Feed the first chunk of ``prompts``, which is announced to ``cache``; what ``forward`` returns."""
        # a chunk of the same prompts that a policy alike has paid for
        found = [one for one in self.kept if one.prompts.same(prompts) and _alike(one.policy, cache.policy, prompts)]
        if found:
            return self._taken(found[0], cache)
        others = self._still_alike(cache.policy, prompts)
        if not others:
            return forward(cache)
        recorder = _Recorder(cache, queries=any(evictor_of(other).needs_queries for other in others))
        logits = forward(recorder)
        experts = cache.routes.noted if cache.routes else None
        self.kept.append(_Prefill(prompts, cache.policy, recorder.steps, experts, logits, len(others)))
        return logits

    @torch.no_grad()
    def _taken(self, prefill: _Prefill, cache: EvictingCache) -> Tensor:
        """Let ``cache`` have what the layers brought to another one."""
        for step in prefill.steps:
            if isinstance(step, _Carried):
                cache.take_states(step.layer, step.states)
            else:
                cache.take(step)
        if cache.routes and prefill.experts is not None:
            cache.routes.take(prefill.experts)
        cache.settle()
        prefill.waiting -= 1
        if not prefill.waiting:
            self.kept.remove(prefill)  # the last that waits frees it
        return prefill.logits

    def _still_alike(self, policy: Policy, prompts: Prompts) -> list[Policy]:
        """The policies to come that see the same first chunk."""
        coming = self._policies[self._policies.index(policy) + 1 :]
        return [other for other in coming if _alike(other, policy, prompts)]


def _alike(one: Policy, other: Policy, prompts: Prompts) -> bool:
    """Whether the first chunks of both hold the same columns, and these see each other in the same precision.

    A chunk of one column is left out: there a cache of codes attends by another formula.
    """
    first, second = (min(policy.chunk, prompts.ids.shape[1]) for policy in (one, other))
    return first == second > 1 and quantiser_on_write(one) == quantiser_on_write(other)  # tokens of the first chunk
