"""One prefill shared by the caches of several policies.

Nothing is compressed before the first chunk of a prompt has attended, so the model gives every cache the same queries,
keys and values under any policy. One cache computes them; the others copy them layer by layer, and evict or quantise as
usual. The results are bit for bit those of separate prefills. Two policies cannot share if their first chunks differ in
length, or if one quantises entries before their own queries attend. Later chunks are not shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall, KVHandler
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.layers import LayerRun, States
from kvaudit.audit.cache.routing import RecordedRoutes
from kvaudit.audit.policies import Mixture, Policy, evictor_of, quantiser_on_write

FirstForward = Callable[[KVHandler], Tensor]  # runs the first chunk with this object as ``kv=`` and returns its logits


class Prompts(NamedTuple):
    """The prompts of a batch, right-padded: ``ids`` and row ``positions`` [B, T] on the CPU, -1 at padding."""

    ids: Tensor
    positions: Tensor


_Recorded = AttentionCall | tuple[int, States]  # number and new states of a layer of linear attention


@dataclass
class _Recorder:
    """A ``KVHandler`` that passes attention calls on to a cache and records them, with queries only if ``queries``."""

    cache: EvictingCache
    queries: bool
    calls: list[_Recorded] = field(default_factory=list)

    @property
    def routes(self) -> RecordedRoutes | None:
        return self.cache.routes

    def attend(self, call: AttentionCall) -> Tensor:
        out = self.cache.attend(call)
        batch, heads, _, size = call.query.shape
        # keep no queries (length 0) unless needed, since they would take most of the memory
        self.calls.append(call if self.queries else call._replace(query=call.query.new_empty(batch, heads, 0, size)))
        return out

    def carry(self, layer: int, hidden: Tensor, run: LayerRun) -> Tensor:
        out = self.cache.carry(layer, hidden, run)
        states = self.cache.layers[layer].states
        assert states is not None
        self.calls.append((layer, states.repeat(1)))  # a copy: the cache changes its own
        return out

    def settle(self) -> None:
        self.cache.settle()


@dataclass(eq=False)
class _Prefill:
    """The computed first chunk of a batch of prompts.

    It is kept until ``waiting`` more policies have reused it.
    """

    prompts: Prompts
    policy: Policy
    calls: list[_Recorded]
    experts: Tensor | None  # of ``RecordedRoutes.copy_table``
    logits: Tensor
    waiting: int


class SharedPrefill:
    """The first chunk of a batch of prompts, computed once for several policies that are served one after the other.

    A chunk is the part of a prompt that one forward processes (the whole prompt if it is short). Until the first chunk
    has attended no policy changes anything, so its keys and values are kept for the later policies. Its queries are
    kept if one of those policies needs them. Keys and values take at most the memory of one more dense (uncompressed)
    cache. If queries are kept too, all take 1 + G / 2 times that memory, for G query heads per KV head. It is freed
    when the last policy has reused the chunk.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        # in the order in which they run; rows of a mixture have several policies and prefill separately
        self._policies = [policy for policy in policies if not isinstance(policy, Mixture)]
        self.prefills: list[_Prefill] = []

    def logits(self, cache: EvictingCache, prompts: Prompts, forward: FirstForward) -> Tensor:
        """Fill ``cache`` with the first chunk of ``prompts``, and return the chunk's logits.

        The chunk is copied from an earlier policy's prefill if possible, otherwise computed by ``forward``. The caller
        has called ``cache.begin``.
        """
        for prefill in self.prefills:
            same_prompts = all(map(torch.equal, prefill.prompts, prompts))
            if same_prompts and _can_share(prefill.policy, cache.policy, prompts):
                return self._reuse(prefill, cache)
        later = self._policies[self._policies.index(cache.policy) + 1 :]
        others = [policy for policy in later if _can_share(policy, cache.policy, prompts)]
        if not others:
            return forward(cache)
        recorder = _Recorder(cache, queries=any(evictor_of(policy).needs_queries for policy in others))
        logits = forward(recorder)
        experts = cache.routes.copy_table() if cache.routes else None
        self.prefills.append(_Prefill(prompts, cache.policy, recorder.calls, experts, logits, len(others)))
        return logits

    @torch.no_grad()
    def _reuse(self, prefill: _Prefill, cache: EvictingCache) -> Tensor:
        for call in prefill.calls:
            if isinstance(call, AttentionCall):
                cache.take(call)
            else:
                cache.take_states(*call)
        if cache.routes and prefill.experts is not None:
            cache.routes.set_first(prefill.experts)
        cache.settle()
        prefill.waiting -= 1
        if not prefill.waiting:
            self.prefills.remove(prefill)
        return prefill.logits


def _can_share(first: Policy, second: Policy, prompts: Prompts) -> bool:
    """Return whether two policies can share a first chunk: it has the same length and is read in the same precision.

    A chunk of one column is not shared, because a quantised cache computes its attention by another formula.
    """
    columns = [min(policy.chunk, prompts.ids.shape[1]) for policy in (first, second)]
    return columns[0] == columns[1] > 1 and quantiser_on_write(first) == quantiser_on_write(second)
