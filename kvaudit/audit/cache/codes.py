"""Codes of quantised keys and values, and matrix products taken directly with codes.

The cache uses them while sampling, and the shadow pass (the learner's replay of the cache) while learning.

A decode step needs each decoded number once, in a product. All numbers of a long cache would not fit in the
processor's cache, so a product decodes one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.tensors import gather_entries
from kvaudit.audit.policies import Quantiser
from kvaudit.audit.policies.quantiser import working_dtype

HOST_BLOCK, DEVICE_BLOCK = 1 << 21, 1 << 28  # bytes of numbers decoded together; on a CPU, per thread
_INF = float("inf")
_MAX_VIEWS = 8  # shapes of scratch memory that are kept
_WORDS = {2: torch.int16, 4: torch.int32}
_SHIFTS = {4: ((0xF0, 4),), 2: ((0xF0, 12), (0x000C000C, 6))}  # bits of a word that move up, and by how many


def split_last(x: Tensor, size: int) -> Tensor:
    """Reshape [..., n * size] to [..., n, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [..., D] of 2, 4 or 8 bits into bytes [..., D * bits / 8], the first code in the lowest bits."""
    if bits == 8:
        return codes
    packed, *higher = split_last(codes, 8 // bits).unbind(-1)
    for n, code in enumerate(higher, 1):
        packed = torch.add(packed, code, alpha=1 << (bits * n))  # shifted to bits that are still 0
    return packed


class Scratch:
    """A memory buffer for decoded numbers, which are read once and then overwritten; all layers share it.

    Sharing is faster, since allocating costs more than filling. The buffer lives as long as the cache and takes at most
    two blocks of HOST_BLOCK bytes. It is not counted among the cache's bytes, since no policy compresses it.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, int], Tensor] = {}
        # views by shape: keys and values have one shape each in all layers
        self._views: dict[tuple[torch.dtype, int], dict[torch.Size, Tensor]] = {}
        self._bytes: dict[torch.Size, tuple[Tensor, Tensor]] = {}  # such a view, and its bytes

    def like(self, other: Tensor, dtype: torch.dtype, number: int = 0) -> Tensor:
        """Return an uninitialised tensor shaped like ``other``.

        Its memory is used again by the next call with the same ``dtype`` and ``number``.
        """
        views = self._views.setdefault((dtype, number), {})
        view = views.get(other.shape)
        if view is not None and view.device == other.device:
            return view
        memory = self._memory.get((dtype, number))
        if memory is None or memory.numel() < other.numel() or memory.device != other.device:
            views.clear()  # otherwise the old memory would not be freed
            self._bytes.clear()
            size = other.numel() + other.numel() // 8  # a context grows by a slot per step
            memory = self._memory[dtype, number] = torch.empty(size, dtype=dtype, device=other.device)
        elif len(views) >= _MAX_VIEWS:
            views.clear()
        views[other.shape] = memory[: other.numel()].view(other.shape)
        return views[other.shape]

    def bytes_of(self, words: Tensor) -> Tensor:
        """Return ``words`` [..., W], a tensor of n-byte words from ``like``, viewed as bytes [..., n * W]."""
        cached = self._bytes.get(words.shape)
        if cached is None or cached[0] is not words:
            if len(self._bytes) >= _MAX_VIEWS:
                self._bytes.clear()
            cached = self._bytes[words.shape] = words, words.view(torch.uint8)
        return cached[1]


def unpack(packed: Tensor, bits: int, scratch: Scratch | None = None) -> Tensor:
    """Unpack bytes into codes: the inverse of ``pack``.

    Each byte is first widened to a word that has one byte for each of its codes; ``scratch`` lends the memory.
    """
    if bits == 8:
        return packed
    memory = scratch or Scratch()
    words, upper = (memory.like(packed, _WORDS[8 // bits], number) for number in range(2))
    words.copy_(packed)
    for mask, shift in _SHIFTS[bits]:
        # shifted by adding (2^shift - 1) times the upper codes, since processors have faster operators for sums
        words.add_(torch.bitwise_and(words, mask, out=upper), alpha=(1 << shift) - 1)
    return memory.bytes_of(words)


# --- coding per token -------------------------------------------------------------------------------------------------


def encode_tokens(x: Tensor, codec: Quantiser, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [..., D] of ``x`` [..., D], coded token by token, and their parameters [..., D / channels, P].

    Each run of ``channels`` channels (``codec.channels``) has P parameters: a scale and perhaps a zero. If fixed
    ``scales`` [H] are given, they are the parameters, and ``x`` must be [B, H, K, D].
    """
    if scales is not None:
        parameters = spread_scales(scales.to(x), x)
        return encode_as(x, parameters, codec), parameters
    groups = split_last(x.to(working_dtype(x.dtype)), codec.channels(x.shape[-1]))
    # rounded to the stored type first: codes are made under the parameters that decode them
    parameters = codec.fit(*groups.aminmax(dim=-1)).to(x.dtype)
    return encode_as(x, parameters, codec), parameters


def spread_scales(scales: Tensor, x: Tensor) -> Tensor:
    """Expand one scale per head [H], without copying, to the parameters [B, H, K, 1, 1] of ``x`` [B, H, K, ...]."""
    return scales[:, None, None, None].expand(*x.shape[:3], 1, 1)


def encode_as(x: Tensor, parameters: Tensor, codec: Quantiser) -> Tensor:
    """Return codes uint8 [..., D] of ``x`` under given ``parameters`` [..., n, P] (scale, zero).

    Each of the n sets of parameters is for D / n consecutive channels.
    """
    groups = split_last(x.to(working_dtype(x.dtype)), x.shape[-1] // parameters.shape[-2])
    return codec.encode(groups, parameters.to(groups.dtype)[..., None, :]).flatten(-2)


def decode_tokens(codes: Tensor, parameters: Tensor, codec: Quantiser) -> Tensor:
    """Return the numbers [..., D] that codes made by ``encode_tokens`` stand for."""
    groups = split_last(codes, codes.shape[-1] // parameters.shape[-2])
    wide = parameters.to(working_dtype(parameters.dtype))[..., None, :]
    return codec.decode(groups, wide).flatten(-2).to(parameters.dtype)


# --- coding keys per channel, in groups of tokens ---------------------------------------------------------------------


def fit_groups(keys: Tensor, group: Tensor, groups: int, codec: Quantiser) -> Tensor:
    """Fit the parameters (scale, zero) of groups of keys [B, H, K, D], channel by channel: [B, H, groups, D, P].

    ``group`` [B, H, K] is the number of each key's group, -1 = none.
    """
    wide = keys.to(working_dtype(keys.dtype))
    # keys of no group go to an extra one, which is dropped
    index = torch.where(group >= 0, group, groups)[..., None].expand_as(wide).long()
    shape = (*keys.shape[:2], groups + 1, keys.shape[3])
    low = wide.new_full(shape, _INF).scatter_reduce(2, index, wide, "amin")[:, :, :groups]
    high = wide.new_full(shape, -_INF).scatter_reduce(2, index, wide, "amax")[:, :, :groups]
    is_empty = low > high  # a group without keys in this head: any finite parameters will do
    return codec.fit(low.masked_fill(is_empty, 0), high.masked_fill(is_empty, 0)).to(keys.dtype)


def decode_keys(codes: Tensor, parameters: Tensor, codec: Quantiser) -> Tensor:
    """Decode keys coded per channel: [B, H, K, D], in the dtype of ``parameters`` [B, H, K, D, P] (scale, zero)."""
    return codec.decode(codes, parameters.to(working_dtype(parameters.dtype))).to(parameters.dtype)


def parameters_of(group: Tensor, table: Tensor) -> Tensor:
    """Return the parameters (scale, zero) of each entry: rows of ``table`` [B, H, G, ...] at ``group`` [B, H, K]."""
    return gather_entries(table, group.clamp(min=0).long())


def encode_runs(keys: Tensor, codec: Quantiser) -> tuple[Tensor, Tensor, Tensor]:
    """Encode keys [B, H, K, D] channel by channel, in G groups of ``codec.key_group`` consecutive keys.

    Returns the codes, the group number of each key [K], and P parameters (scale, zero) per group and channel [B, H, G,
    D, P].
    """
    runs = keys.reshape(*keys.shape[:2], -1, codec.key_group, keys.shape[3]).to(
        working_dtype(keys.dtype)
    )  # [B, H, G, g, D]
    parameters = codec.fit(*runs.aminmax(dim=3)).to(keys.dtype)
    codes = codec.encode(runs, parameters.to(runs.dtype)[:, :, :, None]).flatten(2, 3)
    return codes, torch.arange(keys.shape[2], device=keys.device) // codec.key_group, parameters


def encode_groups(
    keys: Tensor, is_due: Tensor, codec: Quantiser, groups: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode the keys marked by ``is_due`` [B, H, K] channel by channel, in groups of ``codec.key_group`` due keys.

    Each head has its own groups. Returns the codes, the group number of each key [B, H, K] (-1 for keys that are not
    due), and P parameters per group and channel [B, H, G, D, P]. ``groups`` is G if known; otherwise G is read from the
    device.
    """
    rank = is_due.int().cumsum(2) - 1  # [B, H, K], number among the due keys
    group = torch.where(is_due, rank // codec.key_group, -1)
    parameters = fit_groups(keys, group, int(group.max()) + 1 if groups is None else groups, codec)
    return encode_as(keys, parameters_of(group, parameters), codec), group, parameters


def drop_empty_groups(group: Tensor, table: Tensor, max_groups: int | None = None) -> tuple[Tensor, Tensor]:
    """Drop the groups that have no key left, and number the others anew; return the new ``group`` and ``table``.

    ``group`` [B, H, K] is the number of each key's group, ``table`` [B, H, G, ...] has the groups' scales.
    ``max_groups`` is the largest number of groups left in any head, if known; otherwise it is read from the device.
    """
    batch, heads, groups = table.shape[:3]
    used = torch.zeros(batch, heads, groups + 1, dtype=torch.int64, device=group.device)
    used = used.scatter(2, torch.where(group >= 0, group, groups), 1)[:, :, :groups]
    renamed = (used.cumsum(2) - 1).gather(2, group.clamp(min=0))  # [B, H, K], numbers without gaps
    max_groups = int(used.sum(2).max()) if max_groups is None else max_groups
    order = torch.sort(used, dim=2, descending=True, stable=True).indices[:, :, :max_groups]
    return torch.where(group >= 0, renamed, -1), gather_entries(table, order)


# --- products with codes ----------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """The size of a block of codes that is decoded at once.

    The block has all ``tokens`` of some ``heads``, or some of the tokens of one head.
    """

    heads: int
    tokens: int


class CodeProducts:
    """The matrix products of queries and attention weights with packed codes, uint8 [B, H, C, W]: C slots of W bytes.

    ``codec`` says how to decode; ``scratch`` is the buffer for decoded numbers.
    """

    def __init__(self, codec: Quantiser, scratch: Scratch) -> None:
        self._codec, self._scratch = codec, scratch
        self._run = codec.key_group or 1  # keys that share scales per channel

    def logits(self, query: Tensor, codes: Tensor, table: Tensor | None = None) -> Tensor:
        """Return the products [N, X, C] of ``query`` [N, X, D] with coded keys: N = B * H, X queries per head, C keys.

        Without ``table`` the scales of the keys are not applied. ``table`` [B, H, G, P * D] has the P parameters
        (scale, zero) of keys that are coded per channel in G runs of C / G keys.
        """
        block = self._block(codes, query.element_size())
        queries, by_tokens = _cut(query, block.heads, 0), _cut(codes.flatten(0, 1), block.tokens, 1)
        by_runs: Iterable[Tensor | None] = repeat(None)
        if table is not None:
            runs = table.view(len(query), table.shape[2], -1, 1, query.shape[2])  # [N, G, P, 1, D]
            by_runs = _cut(runs, block.tokens // self._run, 1)
        logits = []
        for tokens, parameters in zip(by_tokens, by_runs, strict=False):
            pairs = zip(queries, self._numbers(tokens, query.dtype, block.heads, parameters), strict=True)
            logits.append(_concat([torch.bmm(q, keys.transpose(1, 2)) for q, keys in pairs], 0))
        return _concat(logits, 2)

    def weighted_sum(self, shares: Tensor, codes: Tensor) -> Tensor:
        """Return the sums [N, X, D] of coded values, without their scales, weighted by ``shares`` [N, X, C].

        N = B * H are the rows times KV heads, X the queries of each, C the slots.
        """
        block = self._block(codes, shares.element_size())
        weights, by_tokens = _cut(shares, block.tokens, 2), _cut(codes.flatten(0, 1), block.tokens, 1)
        sums = []
        for weight, tokens in zip(weights, by_tokens, strict=True):
            pairs = zip(_cut(weight, block.heads, 0), self._numbers(tokens, shares.dtype, block.heads), strict=True)
            sums.append(_concat([torch.bmm(share, values) for share, values in pairs], 0))
        return sum(sums[1:], sums[0])

    def _block(self, codes: Tensor, element_size: int) -> Block:
        token = codes.shape[3] * 8 // self._codec.bits * element_size
        max_bytes = HOST_BLOCK * torch.get_num_threads() if codes.device.type == "cpu" else DEVICE_BLOCK
        tokens = max(1, max_bytes // token // self._run) * self._run  # whole runs
        return Block(max(1, max_bytes // (token * max(1, codes.shape[2]))), tokens)

    def _numbers(self, codes: Tensor, dtype: torch.dtype, heads: int, runs: Tensor | None = None) -> Iterator[Tensor]:
        """Decode ``codes`` [N, C, W], n = ``heads`` heads at a time; yield the numbers [n, C, D] in one reused tensor.

        If ``runs`` [N, G, P, 1, D] gives the P parameters (scale, zero) of each of G groups of keys, they are applied.
        """
        by_heads: Iterable[Tensor | None] = repeat(None) if runs is None else _cut(runs, heads, 0)
        for packed, parameters in zip(_cut(codes, heads, 0), by_heads, strict=False):
            unpacked = unpack(packed, self._codec.bits, self._scratch)
            numbers = self._codec.numbers(unpacked, self._scratch.like(unpacked, dtype))
            if parameters is not None:
                scale, *zeros = parameters.unbind(2)  # [n, G, 1, D]
                by_run = numbers.view(*scale.shape[:2], self._run, -1)
                if zeros:
                    torch.addcmul(zeros[0], by_run, scale, out=by_run)
                else:
                    by_run.mul_(scale)
            yield numbers


def token_logits(query: Tensor, codes: Tensor, parameters: Tensor, products: CodeProducts) -> Tensor:
    """Return the logits [N, X, C] of ``query`` [N, X, D] with keys coded per token.

    N = B * H are the rows times KV heads, X the queries of each, C the slots. Each key has P parameters (scale, zero)
    for each of its n groups of channels: ``parameters`` [B, H, C, n, P].
    """
    scale, *zeros = _by_group(parameters)
    groups, size = parameters.shape[3], query.shape[2] // parameters.shape[3]
    if groups == 1:  # one scale per key: it multiplies the logit
        logits = products.logits(query, codes) * scale
    else:
        # a copy of the query per group, 0 in the channels of other groups
        channels = torch.eye(groups, dtype=query.dtype, device=query.device).repeat_interleave(size, 1)[:, None]
        by_group = products.logits((query[:, None] * channels).flatten(1, 2), codes)  # [N, n * X, C]
        logits = (by_group.view(len(query), groups, -1, codes.shape[2]) * scale[:, :, None]).sum(1)
    for zero in zeros:  # the zero of a key is added in every channel
        logits += torch.bmm(split_last(query, size).sum(-1), zero)
    return logits


def token_mix(shares: Tensor, codes: Tensor, parameters: Tensor, products: CodeProducts) -> Tensor:
    """Return the sums [N, X, D] of values coded per token, weighted by attention ``shares`` [N, X, C].

    N = B * H are the rows times KV heads, X the queries of each, C the slots. Each value has P parameters (scale, zero)
    for each of its n groups of channels: ``parameters`` [B, H, C, n, P].
    """
    scale, *zeros = _by_group(parameters)
    groups = parameters.shape[3]
    if groups == 1:
        mixed = products.weighted_sum(shares * scale, codes)
    else:
        # shares of every group are multiplied with all channels: splitting the numbers by group would copy them
        by_group = products.weighted_sum((shares[:, None] * scale[:, :, None]).flatten(1, 2), codes)
        size = by_group.shape[2] // groups
        split = by_group.view(len(shares), groups, -1, groups, size)  # [N, n, X, n, D / n]
        mixed = split.diagonal(dim1=1, dim2=3).transpose(2, 3).flatten(2)
    for zero in zeros:
        mixed.view(*mixed.shape[:2], groups, -1).add_(torch.bmm(shares, zero.transpose(1, 2))[..., None])
    return mixed


def _by_group(parameters: Tensor) -> tuple[Tensor, ...]:
    """Return the parameters (scales, zeros) [B, H, C, n, P] of codes as P contiguous tensors [B * H, n, C].

    If each head has one scale for all its entries, the result is a single tensor [B * H, 1, 1].
    """
    if parameters.shape[3:].numel() == 1:
        scale = parameters[:, :, :1] if parameters.stride(2) == 0 else parameters
        return (scale.reshape(scale.shape[0] * scale.shape[1], 1, -1),)
    return parameters.permute(4, 0, 1, 3, 2).flatten(1, 2).contiguous().unbind(0)


def _cut(tensor: Tensor, size: int, dimension: int) -> tuple[Tensor, ...]:
    """Return ``tensor`` split along ``dimension`` into parts of ``size``; a tensor that fits is returned as it is."""
    return (tensor,) if tensor.shape[dimension] <= size else torch.split(tensor, size, dimension)


def _concat(parts: list[Tensor], dimension: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)
