"""Quantised keys and values: codes packed into bytes, and the shared arithmetic of cache and shadow pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kvaudit.audit.cache.tensors import gather_entries
from kvaudit.audit.policies import Quantiser
from kvaudit.audit.policies.quantiser import working_dtype

_INF = float("inf")
_VIEWS = 8  # shapes of a scratch room that are kept
_WORDS = {2: torch.int16, 4: torch.int32}
_APART = {4: ((0xF0, 4),), 2: ((0xF0, 12), (0x000C000C, 6))}  # what of a word moves up, and by how many bits


def split(x: Tensor, size: int) -> Tensor:
    """[..., n * size] -> [..., n, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., D] of 2, 4 or 8 bits -> bytes [..., D * bits / 8]; neighbours share one, the first lowest."""
    if bits == 8:
        return codes
    first, *others = split(codes, 8 // bits).unbind(-1)
    for n, part in enumerate(others, 1):
        first = torch.add(first, part, alpha=1 << (bits * n))  # moved up, where nothing stands yet
    return first


class Scratch:
    """Room for what is read once, the same for all layers: from the system it would cost more than to fill.

    It stays as long as the cache, two blocks at most (``products.HOST_BLOCK``), and is not counted among the cache's
    bytes: no policy compresses it.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[torch.dtype, int], Tensor] = {}
        # what was asked for in it: layer after layer, keys and values each have one shape
        self._views: dict[tuple[torch.dtype, int], dict[torch.Size, Tensor]] = {}
        self._bytes: dict[torch.Size, tuple[Tensor, Tensor]] = {}  # such a view, and its bytes

    def like(self, other: Tensor, dtype: torch.dtype, place: int = 0) -> Tensor:
        """A tensor of the shape of ``other`` with anything in it, until this dtype and place are asked for again."""
        views = self._views.setdefault((dtype, place), {})
        known = views.get(other.shape)
        if known is not None and known.device == other.device:
            return known
        room = self._rooms.get((dtype, place))
        if room is None or room.numel() < other.numel() or room.device != other.device:
            views.clear()  # or the old room would stay
            self._bytes.clear()
            size = other.numel() + other.numel() // 8  # a context grows by a slot a step
            room = self._rooms[dtype, place] = torch.empty(size, dtype=dtype, device=other.device)
        elif len(views) >= _VIEWS:
            views.clear()
        views[other.shape] = room[: other.numel()].view(other.shape)
        return views[other.shape]

    def bytes_of(self, words: Tensor) -> Tensor:
        """The bytes [..., n * W] of what ``like`` returned, [..., W] words of n bytes."""
        known = self._bytes.get(words.shape)
        if known is None or known[0] is not words:
            if len(self._bytes) >= _VIEWS:
                self._bytes.clear()
            known = self._bytes[words.shape] = words, words.view(torch.uint8)
        return known[1]


def unpack(packed: Tensor, bits: int, scratch: Scratch | None = None) -> Tensor:
    """The inverse of ``pack``: a byte becomes a word of as many bytes as it holds codes, which then move apart."""
    if bits == 8:
        return packed
    room = scratch or Scratch()
    words, moved = (room.like(packed, _WORDS[8 // bits], place) for place in range(2))
    words.copy_(packed)
    for upper, shift in _APART[bits]:
        # moved by sums, for which a processor has faster operators: 2^shift times the upper codes, less themselves
        words.add_(torch.bitwise_and(words, upper, out=moved), alpha=(1 << shift) - 1)
    return room.bytes_of(words)


def encode_tokens(x: Tensor, codec: Quantiser, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Per token: codes uint8 [..., D] and parameters [..., D / channels, P] of ``x`` [..., D].

    With ``scales`` [H] for ``x`` [B, H, K, D] they are the parameters.
    """
    if scales is not None:
        parameters = spread_scales(scales.to(x), x)
        return encode_as(x, parameters, codec), parameters
    parts = split(x.to(working_dtype(x.dtype)), codec.channels(x.shape[-1]))
    # rounded to the type they are stored in first: codes are made under the parameters that decode them
    parameters = codec.fit(*parts.aminmax(dim=-1)).to(x.dtype)
    return encode_as(x, parameters, codec), parameters


def spread_scales(scales: Tensor, x: Tensor) -> Tensor:
    """Scales [H] as parameters [B, H, K, 1, 1] of ``x`` [B, H, K, ...], without memory of their own."""
    return scales[:, None, None, None].expand(*x.shape[:3], 1, 1)


def encode_as(x: Tensor, parameters: Tensor, codec: Quantiser) -> Tensor:
    """Codes uint8 [..., D] of ``x`` under given parameters [..., n, P], each for D / n channels in a row."""
    parts = split(x.to(working_dtype(x.dtype)), x.shape[-1] // parameters.shape[-2])
    return codec.encode(parts, parameters.to(parts.dtype)[..., None, :]).flatten(-2)


def decode_tokens(codes: Tensor, parameters: Tensor, codec: Quantiser) -> Tensor:
    """What ``encode_tokens`` stored: [..., D]."""
    parts = split(codes, codes.shape[-1] // parameters.shape[-2])
    wide = parameters.to(working_dtype(parameters.dtype))[..., None, :]
    return codec.decode(parts, wide).flatten(-2).to(parameters.dtype)


def fit_groups(keys: Tensor, group: Tensor, groups: int, codec: Quantiser) -> Tensor:
    """Parameters [B, H, groups, D, P] per channel of keys [B, H, K, D] in groups [B, H, K]; -1 belongs to none."""
    wide = keys.to(working_dtype(keys.dtype))
    # what is in no group goes to one more, which is dropped
    index = torch.where(group >= 0, group, groups)[..., None].expand_as(wide).long()
    shape = (*keys.shape[:2], groups + 1, keys.shape[3])
    low = wide.new_full(shape, _INF).scatter_reduce(2, index, wide, "amin")[:, :, :groups]
    high = wide.new_full(shape, -_INF).scatter_reduce(2, index, wide, "amax")[:, :, :groups]
    absent = low > high  # a group that this head has not: any finite parameters will do
    return codec.fit(low.masked_fill(absent, 0), high.masked_fill(absent, 0)).to(keys.dtype)


def decode_keys(codes: Tensor, parameters: Tensor, codec: Quantiser) -> Tensor:
    """Keys [B, H, K, D] of codes under per-channel parameters [B, H, K, D, P], in the dtype of the parameters."""
    return codec.decode(codes, parameters.to(working_dtype(parameters.dtype))).to(parameters.dtype)


def parameters_of(group: Tensor, table: Tensor) -> Tensor:
    """The rows of ``table`` [B, H, G, ...] that entries of groups [B, H, K] use: [B, H, K, ...]."""
    return gather_entries(table, group.clamp(min=0).long())


def code_runs(keys: Tensor, codec: Quantiser) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [B, H, K, D] in runs of ``key_group``: codes, group numbers [K] and parameters [B, H, G, D, P]."""
    runs = keys.reshape(*keys.shape[:2], -1, codec.key_group, keys.shape[3]).to(working_dtype(keys.dtype))  # [B, H, G, g, D]
    parameters = codec.fit(*runs.aminmax(dim=3)).to(keys.dtype)
    codes = codec.encode(runs, parameters.to(runs.dtype)[:, :, :, None]).flatten(2, 3)
    return codes, torch.arange(keys.shape[2], device=keys.device) // codec.key_group, parameters


def code_groups(
    keys: Tensor, leaving: Tensor, codec: Quantiser, groups: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for keys where ``leaving`` [B, H, K], per head; group numbers [B, H, K] are -1 for the others.

    ``groups`` is G, where it is known without asking.
    """
    rank = leaving.int().cumsum(2) - 1  # [B, H, K], number among those that leave
    group = torch.where(leaving, rank // codec.key_group, -1)
    parameters = fit_groups(keys, group, int(group.max()) + 1 if groups is None else groups, codec)
    return encode_as(keys, parameters_of(group, parameters), codec), group, parameters


def without_empty(group: Tensor, table: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Group numbers [B, H, K] and ``table`` [B, H, G, ...] without the groups whose keys have all left.

    ``most`` is how many a head still has at most, where that is known without asking.
    """
    batch, heads, groups = table.shape[:3]
    used = torch.zeros(batch, heads, groups + 1, dtype=torch.int64, device=group.device)
    used = used.scatter(2, torch.where(group >= 0, group, groups), 1)[:, :, :groups]
    renamed = (used.cumsum(2) - 1).gather(2, group.clamp(min=0))  # [B, H, K], numbers without gaps
    most = int(used.sum(2).max()) if most is None else most
    order = torch.sort(used, dim=2, descending=True, stable=True).indices[:, :, :most]
    return torch.where(group >= 0, renamed, -1), gather_entries(table, order)
