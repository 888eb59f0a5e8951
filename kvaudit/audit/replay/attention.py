"""Attention of a pass over what was sampled: every query sees exactly the keys, and codes, that it saw then."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall, causal_attention, grouped_attention, query_blocks, require_single_call
from kvaudit.audit.cache.layers import LayerPlan
from kvaudit.audit.cache.layers import LayerRun, States, run_state_layer
from kvaudit.audit.cache.hints import KEYS, VALUES, CodePlace
from kvaudit.audit.cache.routing import ReplayedRoutes
from kvaudit.audit.cache.selection import Choices
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.replay.attention import CodedSince, QuantisedView, coded_keys, coded_values, two_precisions
from kvaudit.core.errors import RunError

BLOCK = 512  # queries of a prompt that are masked at once, so that few keys of their future are read


class Replay:
    """Attention of one learner pass; pass it to a model's forward as ``kv=``.

    ``queries`` and ``keys`` are row positions [B, Q] and [B, K] (-1 = padding), the last Q keys being the queries' own,
    and all of them without a ``prefix``;
    ``evicted_at`` is int32 [B, L, H, K] or None for the dense view. With ``prefix`` the keys and values of an earlier
    pass stand before the new ones, each of its rows repeated ``group`` times. ``codes`` says since when keys and values
    were seen quantised, ``experts`` [B, Q, M, k] where the model's M mixture-of-experts blocks sent each query's token,
    ``choices`` which keys a query attended to where it chose. Positions and ledger may be on the host, from where they
    are handed over to ``device``: what follows from them is then known without waiting for it.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        queries: Tensor,
        keys: Tensor,
        evicted_at: Tensor | None,
        *,
        codes: CodedSince | None = None,
        experts: Tensor | None = None,
        choices: Choices | None = None,
        prefix: Replay | None = None,
        group: int = 1,
        last: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self._codes, self._choices = codes, choices
        self.routes = None if experts is None else ReplayedRoutes(experts)
        self._plans = plans
        assert prefix is not None or queries.shape == keys.shape, (queries.shape, keys.shape)
        # a prompt until its first cut: no mask is made that hides the future alone
        self._causal = 0 if prefix is not None else _causal_columns(queries, evicted_at)
        device = queries.device if device is None else device
        self._queries, self._keys = upload(queries, device), upload(keys, device)
        self._evicted_at = None if evicted_at is None else upload(evicted_at, device)
        # asked here, outside of the model: inside a re-entrant checkpoint gradients are off
        self._prefix, self._group, self._learns = prefix, group, torch.is_grad_enabled()
        # own keys and values [B, H, Q, D], and states, of every layer: a pass behind this one begins with them
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, States] = {}
        self._real, self._last = (queries >= 0).cpu(), last  # [B, Q], tokens that are no padding
        self._settled = False

    def settle(self) -> None:
        """After a forward: raise RunError where some layer did not attend through this replay."""
        attending, carrying = sum(p.has_entries for p in self._plans), sum(p.has_state for p in self._plans)
        if len(self.held) != attending or len(self.states) != carrying:
            done = len(self.held.keys() | self.states.keys())
            raise RunError(
                f"{done} of the model's {len(self._plans)} layers attended under the ledger, the others saw "
                "what the sampler did not; set the model's attention to kvaudit"
            )
        self._settled = True
        if self.routes:
            self.routes.settle()

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention output [B, G*H, Q, D] over the prefix and the new keys."""
        layer = call.layer
        if not self._settled:  # a checkpointed layer runs again, but only once the forward is over
            require_single_call(layer, self.held, len(self._plans))
        self.held[layer] = (call.key, call.value)
        call = self._behind_prefix(call)
        window = self._plans[layer].sliding_window
        chosen = self._choices is not None and layer in self._choices.slots
        # a layer with a window of its own is never quantised
        if self._codes and window is None and layer not in self._codes.codec.skipped:
            return self._in_two_precisions(call, self._codes)
        query, key = call.query, call.key
        # within the first window columns a window of the layer's own hides nothing
        causal = 0 if chosen else min(self._causal, window or self._causal)
        parts = []
        if causal:
            early = slice(causal)
            own = query[:, :, early], key[:, :, early], call.value[:, :, early]
            parts.append(causal_attention(*own, call.scaling, call.sink_logits))
        # the heads of the mask: it is what decides how many queries are looked at together
        heads = query.shape[1] if chosen else 1 if self._evicted_at is None else key.shape[1]
        most = None if self._prefix else BLOCK
        for part in query_blocks(query.shape[2], len(query) * heads * key.shape[2], start=causal, most=most):
            until = key.shape[2] if self._prefix else part.stop  # a query's own key is in its own column
            seen = (key[:, :, :until], call.value[:, :, :until], self._visible(layer, part, until))
            parts.append(grouped_attention(query[:, :, part], *seen, call.scaling, call.sink_logits))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _behind_prefix(self, call: AttentionCall) -> AttentionCall:
        """The call with the prefix's keys and values before its own."""
        if self._prefix is None:
            return call
        if self._learns and not torch.is_grad_enabled():
            raise RunError(
                "gradient checkpointing with use_reentrant=True loses the gradient of the prompt that a group "
                "shares; use gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        # each [B, H, P, D], P columns of the prompt
        before = [part.repeat_interleave(self._group, 0) for part in self._prefix.held[call.layer]]
        return call._replace(key=torch.cat([before[0], call.key], 2), value=torch.cat([before[1], call.value], 2))

    def carry(self, layer: int, hidden: Tensor, run: LayerRun) -> Tensor:
        """See ``EvictingCache.carry``; a group takes its prompt's states over, with their gradient."""
        states = States() if self._prefix is None else self._prefix.states[layer].repeated(self._group)
        out = run_state_layer(run, hidden, self._real, states, last=self._last)
        self.states[layer] = states
        return out

    def _in_two_precisions(self, call: AttentionCall, codes: CodedSince) -> Tensor:
        stored, parts = self._stored(call, codes), []
        query = call.query
        for part in query_blocks(query.shape[2], len(query) * query.shape[1] * call.key.shape[2]):
            at = self._queries[:, part, None]  # [B, q, 1]
            # which query sees which entry as a code: [B, q, K]
            late = QuantisedView(*stored, at >= codes.keys_at[:, None], at >= codes.values_at[:, None])
            some = call._replace(query=query[:, :, part])
            parts.append(two_precisions(some, self._visible(call.layer, part, call.key.shape[2]), late))
        return torch.cat(parts, 2)

    def _stored(self, call: AttentionCall, codes: CodedSince) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, K, D] as the cache's codes give them back."""
        evicted_at = None if self._evicted_at is None else self._evicted_at[:, call.layer]  # [B, H, K]
        width = max(call.key.shape[3], call.value.shape[3])
        keys, values = (CodePlace(call.layer, part, width) for part in (KEYS, VALUES))
        return coded_keys(call.key, self._keys, evicted_at, codes, keys), coded_values(call.value, codes, values)

    def _visible(self, layer: int, part: slice, until: int) -> Tensor:
        """Bool [B, 1, H or G*H, part, until]: j <= i < evicted_at[j] and chosen by i; padding sees everything."""
        # [B, 1, q, 1] and [B, 1, 1, until]
        q, k = self._queries[:, None, part, None], self._keys[:, None, None, :until]
        visible = (k >= 0) & (k <= q)
        window = self._plans[layer].sliding_window
        if window is not None:
            visible = visible & (q - k < window)
        if self._evicted_at is not None:
            visible = visible & (q < self._evicted_at[:, layer, :, None, :until])
        if self._choices is not None and layer in self._choices.slots:
            chosen = self._choices.visible(layer, self._queries[:, part], self._keys[:, :until])  # [B, A, Q, K]
            # choices may be by query head, where the ledger is by KV head
            apart = max(1, chosen.shape[1] // visible.shape[1]) if visible.shape[1] > 1 else 1
            visible = visible.repeat_interleave(apart, 1) & chosen
        # a row of padding that sees nothing would be NaN, and so would its gradient
        return visible | (q < 0)


def _causal_columns(queries: Tensor, evicted_at: Tensor | None) -> int:
    """How many first columns of queries [B, Q] miss nothing but the future; none where padding stands before them."""
    if bool(((queries[:, 1:] >= 0) & (queries[:, :-1] < 0)).any()):
        return 0
    columns = queries.shape[1]
    # until the first eviction anywhere a query misses nothing of its past
    return columns if evicted_at is None else min(columns, int(evicted_at.min()))
