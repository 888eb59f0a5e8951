"""Replayed attention: every query sees exactly the entries, exact or quantised, that it saw while sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.cache.attention import (
    AttentionCall,
    causal_attention,
    grouped_attention,
    query_blocks,
    require_single_call,
)
from kvaudit.audit.cache.codes import (
    decode_keys,
    decode_tokens,
    encode_as,
    encode_tokens,
    fit_groups,
    parameters_of,
)
from kvaudit.audit.cache.hints import HINTED_DTYPES, KEYS, VALUES, HintTable, LayerPart, Strays
from kvaudit.audit.cache.layers import LayerPlan, LayerRun, States, run_state_layer
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.routing import ReplayedRoutes
from kvaudit.audit.cache.selection import Choices
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Quantiser, softmax
from kvaudit.core.errors import RunError

BLOCK = 512  # prompt queries per mask: small blocks skip most of the keys in their future


class Replay:
    """The attention of one learner forward, in which queries see what they saw while sampling; pass it as ``kv=``.

    ``queries`` and ``keys`` are row positions [B, Q] and [B, K] (-1 = padding). The last Q keys belong to the queries;
    the keys before them come from an earlier pass, ``prefix``, of which every row is repeated ``group`` times.
    ``evicted_at`` int32 [B, L, H, K] is the ledger, None for a pass in which every query sees all earlier keys.
    ``codes`` are the times at which entries were quantised, ``experts`` [B, Q, M, k] the experts of each token in the
    model's M mixture-of-experts blocks, ``choices`` the keys that queries selected. ``last``: no later pass continues
    from the recurrent states of this one. Positions and ledger may be on the host, where some of the work is then done
    without waiting for ``device``.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        queries: Tensor,
        keys: Tensor,
        evicted_at: Tensor | None,
        *,
        codes: QuantisationTimes | None = None,
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
        # before the first eviction a prompt needs no mask but the causal one
        self._causal = 0 if prefix is not None else _causal_columns(queries, evicted_at)
        device = queries.device if device is None else device
        self.queries, self._keys = upload(queries, device), upload(keys, device)
        self._evicted_at = None if evicted_at is None else upload(evicted_at, device)
        # read here, outside of the model: inside a re-entrant checkpoint gradients are off
        self._prefix, self._group, self._has_gradients = prefix, group, torch.is_grad_enabled()
        # new keys and values [B, H, Q, D] and states of every layer; a later pass continues from them
        self.keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, States] = {}
        self._real, self._last = (queries >= 0).cpu(), last  # [B, Q], tokens that are not padding
        self._settled = False

    def settle(self) -> None:
        """Check a finished forward: raise RunError if a layer did not use this object for its attention or state."""
        attending, carrying = sum(p.has_entries for p in self._plans), sum(p.has_state for p in self._plans)
        if len(self.keys_values) != attending or len(self.states) != carrying:
            done = len(self.keys_values.keys() | self.states.keys())
            raise RunError(
                f"{done} of the model's {len(self._plans)} layers attended under the ledger; the others saw entries "
                "that the sampler did not; set the model's attention to kvaudit"
            )
        self._settled = True
        if self.routes:
            self.routes.settle()

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [B, G*H, Q, D] over the prefix and the new keys."""
        layer = call.layer
        if not self._settled:  # a checkpointed layer runs again, but only after the forward has ended
            require_single_call(layer, self.keys_values, len(self._plans))
        self.keys_values[layer] = (call.key, call.value)
        call = self._with_prefix(call)
        window = self._plans[layer].sliding_window
        has_choices = self._choices is not None and layer in self._choices.slots
        # a sliding-window layer is never quantised
        if self._codes and window is None and layer not in self._codes.codec.skipped:
            return self._attend_quantised(call, self._codes)
        query, key = call.query, call.key
        # among the first ``window`` columns a sliding window hides nothing
        causal = 0 if has_choices else min(self._causal, window or self._causal)
        outputs = []
        if causal:
            early = slice(causal)
            inputs = query[:, :, early], key[:, :, early], call.value[:, :, early]
            outputs.append(causal_attention(*inputs, call.scaling, call.sink_logits))
        # the mask's size sets how many queries fit into a block
        mask_heads = query.shape[1] if has_choices else 1 if self._evicted_at is None else key.shape[1]
        most = None if self._prefix else BLOCK
        for block in query_blocks(query.shape[2], len(query) * mask_heads * key.shape[2], start=causal, most=most):
            end = key.shape[2] if self._prefix else block.stop  # without a prefix, a query's own key has its column
            visible = (key[:, :, :end], call.value[:, :, :end], self._visible(layer, block, end))
            outputs.append(grouped_attention(query[:, :, block], *visible, call.scaling, call.sink_logits))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _with_prefix(self, call: AttentionCall) -> AttentionCall:
        """Return the call with the keys and values of ``prefix`` (the prompt's pass) put before the new ones."""
        if self._prefix is None:
            return call
        if self._has_gradients and not torch.is_grad_enabled():
            raise RunError(
                "gradient checkpointing with use_reentrant=True loses the gradient of the prompt that a group "
                "shares; use gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        # each [B, H, P, D], P columns of the prompt
        keys, values = (x.repeat_interleave(self._group, 0) for x in self._prefix.keys_values[call.layer])
        return call._replace(key=torch.cat([keys, call.key], 2), value=torch.cat([values, call.value], 2))

    def carry(self, layer: int, hidden: Tensor, run: LayerRun) -> Tensor:
        """Run a layer of linear attention on hidden states [B, Q, E] by calling ``run``; return its output.

        The state starts at zero, or where the prompt's pass (``prefix``) has left it.
        """
        states = States() if self._prefix is None else self._prefix.states[layer].repeat(self._group)
        out = run_state_layer(run, hidden, self._real, states, last=self._last)
        self.states[layer] = states
        return out

    def _attend_quantised(self, call: AttentionCall, codes: QuantisationTimes) -> Tensor:
        decoded, query, outputs = self._decode(call, codes), call.query, []
        for block in query_blocks(query.shape[2], len(query) * query.shape[1] * call.key.shape[2]):
            at = self.queries[:, block, None]  # [B, q, 1]
            is_coded = at >= codes.keys_at[:, None], at >= codes.values_at[:, None]
            visible = self._visible(call.layer, block, call.key.shape[2])
            part = call._replace(query=query[:, :, block])
            outputs.append(mixed_precision_attention(part, visible, decoded, is_coded))
        return torch.cat(outputs, 2)

    def _decode(self, call: AttentionCall, codes: QuantisationTimes) -> tuple[Tensor, Tensor]:
        """Return all keys and values [B, H, K, D] of the call after quantising: encoded, then decoded."""
        evicted_at = None if self._evicted_at is None else self._evicted_at[:, call.layer]  # [B, H, K]
        width = max(call.key.shape[3], call.value.shape[3])
        keys, values = (LayerPart(call.layer, part, width) for part in (KEYS, VALUES))
        return (
            decoded_keys(call.key, self._keys, evicted_at, codes, keys),
            _straight_through(call.value, _decode_by_token(call.value.detach(), codes, values)),
        )

    def _visible(self, layer: int, block: slice, end: int) -> Tensor:
        """Return which of the first ``end`` keys each query of ``block`` sees: bool [B, heads, queries, end].

        ``heads`` is 1, H (KV heads) or G*H (query heads). Query i sees key j if j <= i and the key was not evicted
        before query i, is in the layer's sliding window (if it has one) and was selected (if queries select). Padding
        sees all keys.
        """
        # [B, 1, q, 1] and [B, 1, 1, end]
        q, k = self.queries[:, None, block, None], self._keys[:, None, None, :end]
        visible = (k >= 0) & (k <= q)
        window = self._plans[layer].sliding_window
        if window is not None:
            visible = visible & (q - k < window)
        if self._evicted_at is not None:
            visible = visible & (q < self._evicted_at[:, layer, :, None, :end])
        if self._choices is not None and layer in self._choices.slots:
            chosen = self._choices.visible(layer, self.queries[:, block], self._keys[:, :end])  # [B, A, Q, K]
            # choices may be by query head, the ledger is by KV head
            repeats = max(1, chosen.shape[1] // visible.shape[1]) if visible.shape[1] > 1 else 1
            visible = visible.repeat_interleave(repeats, 1) & chosen
        # a row that sees nothing would be NaN, and so would its gradient
        return visible | (q < 0)


def run_forward(model: Any, ids: Tensor, replay: Any, logits_to_keep: int = 0) -> Tensor:
    """Run a model on ``ids`` [B, Q] under a replay (passed as ``kv=``); return the logits [B, columns, V].

    They are those of the last ``logits_to_keep`` columns, 0 = all.
    """
    options = {"logits_to_keep": logits_to_keep} if logits_to_keep else {}
    ids, positions = upload(ids, replay.queries.device), replay.queries.clamp(min=0)
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, kv=replay, **options).logits
    replay.settle()
    return logits


def position_columns(counts: Tensor, starts: Tensor) -> Tensor:
    """Return row positions [B, longest]: in each row ``counts`` consecutive numbers from ``starts`` on, then -1.

    ``counts`` and ``starts`` are [B]; longest is the largest count.
    """
    columns = torch.arange(int(counts.max()))
    return torch.where(columns < counts[:, None], columns + starts[:, None], -1)


def _causal_columns(queries: Tensor, evicted_at: Tensor | None) -> int:
    """Return how many leading columns of the queries [B, Q] see all earlier keys, so that a causal mask is enough.

    If a row has left padding, the number is 0.
    """
    if bool(((queries[:, 1:] >= 0) & (queries[:, :-1] < 0)).any()):
        return 0
    columns = queries.shape[1]
    return columns if evicted_at is None else min(columns, int(evicted_at.min()))


class QuantisationTimes(NamedTuple):
    """The position of the first query that reads each key, and each value, quantised: int32 [B, K] each.

    NEVER stands for an entry that is always exact.
    """

    codec: Quantiser
    keys_at: Tensor
    values_at: Tensor
    hints: HintTable | None = None

    def affects(self, queries: Tensor) -> bool:
        """Return whether any query at row positions [B, Q] reads a quantised key or value."""
        return bool((torch.minimum(self.keys_at, self.values_at) <= queries.amax(1)[:, None]).any())

    def apply_hints(self, layer_part: LayerPart, exact: Tensor, codes: Tensor, parameters: Tensor) -> Tensor:
        """Return ``codes`` [B, H, K, D], replaced by the sampler's codes where it recorded a rounding hint.

        A hint is the recorded code of a value near the border of two codes. ``exact`` are the values before quantising.
        """
        if self.hints is None or exact.dtype not in HINTED_DTYPES:
            return codes
        return self.hints.apply(layer_part, exact, codes, parameters, self.codec)


def quantisation_times(
    rollouts: Sequence[Rollout], positions: Tensor, strays: Strays | None = None
) -> QuantisationTimes | None:
    """Return when the entries at row positions [B, K] were quantised; None for rollouts without a quantiser.

    ``strays`` gets (row, layer) of every recorded rounding hint that cannot be right (see ``HintTable``).
    """
    codec = rollouts[0].codec
    if codec is None:
        return None
    keys, values = (
        _times_at([getattr(rollout, name) for rollout in rollouts], positions)
        for name in ("keys_quantised_at", "values_quantised_at")
    )
    no_hints = torch.zeros(0, dtype=torch.uint16)
    hints = [no_hints if rollout.hints is None else rollout.hints for rollout in rollouts]
    return QuantisationTimes(codec, keys, values, HintTable(hints, positions, rollouts[0].evicted_at.shape[0], strays))


def _times_at(rows: Sequence[Tensor], positions: Tensor) -> Tensor:
    """Return the times [B, K] at which the entries at row positions [B, K] were quantised; NEVER at padding.

    ``rows`` has the times [T] of each row.
    """
    times = pad_sequence(list(rows), batch_first=True, padding_value=NEVER).to(positions.device)  # [B, T]
    return torch.where(positions >= 0, times.gather(1, positions.clamp(min=0).long()), NEVER)


def decoded_keys(
    keys: Tensor, positions: Tensor, evicted_at: Tensor | None, codes: QuantisationTimes, layer_part: LayerPart
) -> Tensor:
    """Return keys [B, H, K, D] as they are once quantised (encoded, then decoded), with the gradient of the exact keys.

    ``positions`` [B, K] are the row positions of the keys. ``evicted_at`` [B, H, K] says when their entries were
    evicted, None if every query sees all. Keys that were evicted before their group was quantised are in no group and
    are returned exact: no query reads them quantised.
    """
    codec, exact = codes.codec, keys.detach()
    if not codec.key_group:
        return _straight_through(keys, _decode_by_token(exact, codes, layer_part))
    member = ((codes.keys_at < NEVER) & (positions >= 0))[:, None].expand(keys.shape[:3])  # [B, H, K]
    if evicted_at is not None:
        member = member & (evicted_at > codes.keys_at[:, None])  # at the same query, eviction comes first
    group = _key_groups(member, codes.keys_at, codec.key_group)  # [B, H, K], -1 for none
    groups = int(group.max()) + 1
    if groups == 0:
        return keys
    parameters = parameters_of(group, fit_groups(exact, group, groups, codec))  # [B, H, K, D, P]
    key_codes = codes.apply_hints(layer_part, exact, encode_as(exact, parameters, codec), parameters)
    return _straight_through(keys, torch.where(member[..., None], decode_keys(key_codes, parameters, codec), exact))


def _decode_by_token(exact: Tensor, times: QuantisationTimes, layer_part: LayerPart) -> Tensor:
    codec, turned = times.codec, times.codec.turned(exact, layer_part.part)
    codes, parameters = encode_tokens(
        turned, codec, codec.fixed_scales(layer_part.layer, layer_part.part, exact.shape[1])
    )
    codes = times.apply_hints(layer_part, turned, codes, parameters)
    return codec.turned(decode_tokens(codes, parameters, codec), layer_part.part)


def _key_groups(member: Tensor, times: Tensor, size: int) -> Tensor:
    """Return the number of the quantisation group of each key [B, H, K], -1 for none.

    ``member`` bool [B, H, K] marks the keys that are in groups; ``times`` [B, K] say when each was quantised and do not
    decrease along members. A group is up to ``size`` successive members quantised at the same time.
    """
    batch, heads, slots = member.shape
    has_member = member.any(1)  # [B, K], in some head
    # other columns take the time before them, so that a change of time marks the next flush
    steady = torch.where(has_member, times, 0).cummax(1).values
    flush = torch.nn.functional.pad((steady[:, 1:] != steady[:, :-1]).int(), (1, 0)).cumsum(1)  # [B, K]
    flush = flush[:, None].expand(batch, heads, slots).long()
    counts = torch.zeros(batch, heads, int(flush.max()) + 1, dtype=torch.int64, device=member.device)
    counts = counts.scatter_add(2, flush, member.long())  # [B, H, flushes], members of each flush
    before = counts.cumsum(2) - counts  # members of earlier flushes
    per_flush = (counts + size - 1) // size  # the last group of a flush may be short
    first = per_flush.cumsum(2) - per_flush  # number of each flush's first group
    rank = member.long().cumsum(2) - 1 - before.gather(2, flush)  # among the members of its flush
    return torch.where(member, first.gather(2, flush) + rank // size, -1)


def mixed_precision_attention(
    call: AttentionCall, visible: Tensor, decoded: tuple[Tensor, Tensor], is_coded: tuple[Tensor, Tensor]
) -> Tensor:
    """Return attention [B, G*H, Q, D] in which each query reads some entries exact and others decoded.

    ``decoded`` are the keys and the values [B, H, K, D] after decoding. A query reads them, instead of those of
    ``call``, where ``is_coded`` [B, Q, K] is True (a mask for keys, another for values). ``visible`` is bool [B, 1 or
    H, Q, K]. Logits and softmax are float32 at least.
    """
    batch, heads, length, size = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    packed = call.query.reshape(batch, call.key.shape[1], -1, length, size).to(dtype)  # [B, H, G, Q, D]
    # each [B, H, G, Q, K]
    exact, coded = (torch.einsum("bhgqd,bhkd->bhgqk", packed, keys.to(dtype)) for keys in (call.key, decoded[0]))
    key_coded, value_coded = (mask[:, None, None] for mask in is_coded)  # [B, 1, 1, Q, K]
    logits = torch.where(key_coded, coded, exact) * call.scaling
    shares = softmax(logits.masked_fill(~visible[:, :, None], float("-inf")), call.sink_logits)
    out = torch.einsum("bhgqk,bhkd->bhgqd", shares.masked_fill(value_coded, 0.0), call.value.to(dtype))
    out = out + torch.einsum("bhgqk,bhkd->bhgqd", shares.masked_fill(~value_coded, 0.0), decoded[1].to(dtype))
    return out.reshape(batch, heads, length, -1).to(call.query.dtype)


def _straight_through(exact: Tensor, decoded: Tensor) -> Tensor:
    """Return exactly ``decoded``, with the gradient of ``exact`` (straight-through estimator)."""
    return decoded + (exact - exact.detach())
