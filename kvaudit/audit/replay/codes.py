"""The quantised shadow: keys and values as the cache's codes would give them back, with the gradient of exact ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.cache.attention import AttentionCall
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.codes import (
    decode_keys,
    decode_tokens,
    encode_as,
    encode_tokens,
    fit_groups,
    parameters_of,
)
from kvaudit.audit.cache.hints import HINTED_DTYPES, CodePlace, HintTable, Strays
from kvaudit.audit.policies import Quantiser, softmax


class CodedSince(NamedTuple):
    """Since which query position each key and value is seen quantised: int32 [B, K] twice, NEVER = stays exact."""

    codec: Quantiser
    keys_at: Tensor
    values_at: Tensor
    hints: HintTable | None = None

    def seen_by(self, queries: Tensor) -> bool:
        """Whether some query at row positions [B, Q] comes when a key or value of its row is seen quantised."""
        return bool((torch.minimum(self.keys_at, self.values_at) <= queries.amax(1)[:, None]).any())

    def recorded(self, place: CodePlace, exact: Tensor, own: Tensor, parameters: Tensor) -> Tensor:
        """The replay's ``own`` codes [B, H, K, D] of ``exact``, with the sampler's at the borders it recorded."""
        if self.hints is None or exact.dtype not in HINTED_DTYPES:
            return own
        return self.hints.take_over(place, exact, own, parameters, self.codec)


def codes_of(rollouts: Sequence[Rollout], positions: Tensor, strays: Strays | None = None) -> CodedSince | None:
    """What the cache had quantised, along columns at row positions [B, K]; None where nothing was."""
    codec = rollouts[0].codec
    if codec is None:
        return None
    keys, values = (
        _times([getattr(rollout, name) for rollout in rollouts], positions)
        for name in ("keys_quantised_at", "values_quantised_at")
    )
    nothing = torch.zeros(0, dtype=torch.uint16)
    words = [nothing if rollout.hints is None else rollout.hints for rollout in rollouts]
    hints = HintTable(words, positions, rollouts[0].evicted_at.shape[0], strays)
    return CodedSince(codec, keys, values, hints)


def _times(rows: Sequence[Tensor], positions: Tensor) -> Tensor:
    """Times [T] of each row along columns at row positions [B, K]."""
    times = pad_sequence(list(rows), batch_first=True, padding_value=NEVER).to(positions.device)  # [B, T]
    return torch.where(positions >= 0, times.gather(1, positions.clamp(min=0).long()), NEVER)


def coded_values(values: Tensor, codes: CodedSince, place: CodePlace) -> Tensor:
    """Values [B, H, K, D] after a round trip through codes; the gradient passes straight through."""
    return _straight(values, _by_token(values.detach(), codes, place))


def coded_keys(
    keys: Tensor, positions: Tensor, evicted_at: Tensor | None, codes: CodedSince, place: CodePlace
) -> Tensor:
    """Keys [B, H, K, D] after a round trip through codes; positions [B, K], evicted_at [B, H, K] or None.

    Keys that left before their group was quantised are in no group and stay exact: nobody sees them quantised.
    """
    codec, exact = codes.codec, keys.detach()
    if not codec.key_group:
        return _straight(keys, _by_token(exact, codes, place))
    member = ((codes.keys_at < NEVER) & (positions >= 0))[:, None].expand(keys.shape[:3])  # [B, H, K]
    if evicted_at is not None:
        member = member & (evicted_at > codes.keys_at[:, None])  # at the same query an entry leaves first
    group = key_groups(member, codes.keys_at, codec.key_group)  # [B, H, K], -1 for none
    groups = int(group.max()) + 1
    if groups == 0:
        return keys
    parameters = parameters_of(group, fit_groups(exact, group, groups, codec))  # [B, H, K, D, P]
    own = codes.recorded(place, exact, encode_as(exact, parameters, codec), parameters)
    return _straight(keys, torch.where(member[..., None], decode_keys(own, parameters, codec), exact))


def _by_token(exact: Tensor, codes: CodedSince, place: CodePlace) -> Tensor:
    codec, turned = codes.codec, codes.codec.turned(exact, place.part)
    own, parameters = encode_tokens(turned, codec, codec.fixed_scales(place.layer, place.part, exact.shape[1]))
    return codec.turned(decode_tokens(codes.recorded(place, turned, own, parameters), parameters, codec), place.part)


def key_groups(member: Tensor, times: Tensor, size: int) -> Tensor:
    """Group numbers [B, H, K], -1 for none: runs of ``size`` members that were quantised at the same time.

    ``member`` bool [B, H, K]; ``times`` [B, K] do not decrease along members.
    """
    batch, heads, slots = member.shape
    known = member.any(1)  # [B, K], a member in some head
    # columns between members take the time before them, so that a change of time is where the next flush begins
    steady = torch.where(known, times, 0).cummax(1).values
    flush = torch.nn.functional.pad((steady[:, 1:] != steady[:, :-1]).int(), (1, 0)).cumsum(1)  # [B, K]
    flush = flush[:, None].expand(batch, heads, slots).long()
    # how many members each flush has: [B, H, flushes]
    counts = torch.zeros(batch, heads, int(flush.max()) + 1, dtype=torch.int64, device=member.device)
    counts = counts.scatter_add(2, flush, member.long())
    before = counts.cumsum(2) - counts  # those of earlier flushes
    per_flush = (counts + size - 1) // size  # groups end with their flush, whole or not
    first = per_flush.cumsum(2) - per_flush  # number of each flush's first group
    rank = member.long().cumsum(2) - 1 - before.gather(2, flush)  # among the members of its flush
    return torch.where(member, first.gather(2, flush) + rank // size, -1)


class QuantisedView(NamedTuple):
    """What later queries see instead: stored keys and values [B, H, K, D], and which query sees which [B, Q, K]."""

    keys: Tensor
    values: Tensor
    key_seen: Tensor
    value_seen: Tensor


def two_precisions(call: AttentionCall, visible: Tensor, late: QuantisedView) -> Tensor:
    """Attention [B, G*H, Q, D] that sees an entry's codes from its time on.

    ``visible`` bool [B, 1 or H, Q, K]; the call's keys and values are [B, H, K, D]. Logits and softmax are float32 at
    least.
    """
    batch, heads, length, size = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    packed = call.query.reshape(batch, call.key.shape[1], -1, length, size).to(dtype)  # [B, H, G, Q, D]
    # each [B, H, G, Q, K]
    exact, stored = (torch.einsum("bhgqd,bhkd->bhgqk", packed, k.to(dtype)) for k in (call.key, late.keys))
    logits = torch.where(late.key_seen[:, None, None], stored, exact) * call.scaling
    shares = softmax(logits.masked_fill(~visible[:, :, None], float("-inf")), call.sink_logits)
    coded = late.value_seen[:, None, None]  # [B, 1, 1, Q, K]
    # every share goes either to an exact value or to what its codes give back
    out = torch.einsum("bhgqk,bhkd->bhgqd", shares.masked_fill(coded, 0.0), call.value.to(dtype))
    out = out + torch.einsum("bhgqk,bhkd->bhgqd", shares.masked_fill(~coded, 0.0), late.values.to(dtype))
    return out.reshape(batch, heads, length, -1).to(call.query.dtype)


def _straight(exact: Tensor, stored: Tensor) -> Tensor:
    """``stored``, to the last bit, with the gradient of ``exact``."""
    return stored + (exact - exact.detach())
