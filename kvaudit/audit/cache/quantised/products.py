"""Attention straight on codes: a token's scales go to its logits and shares, and numbers are made a block at a time.

A step reads the numbers of a code once, in the product that follows. All those of a long cache would leave the
processor's own memory and be read back; a block of them stays there. A small cache is one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.codes import Scratch, split_last, unpack
from kvaudit.audit.policies import Quantiser

HOST_BLOCK, DEVICE_BLOCK = 1 << 21, 1 << 28  # bytes of numbers at once; on a processor, of each of its threads


class Block(NamedTuple):
    """What is numbers at once: all tokens of some heads, which may be of several rows, or some tokens of one head."""

    heads: int
    tokens: int


class CodeProducts:
    """Products with the numbers that codes uint8 [B, H, C, W] stand for."""

    def __init__(self, codec: Quantiser, scratch: Scratch) -> None:
        self._codec, self._scratch = codec, scratch

    def logits(self, query: Tensor, codes: Tensor, table: Tensor | None = None) -> Tensor:
        """q k [N, X, C] of ``query`` [N, X, D], N = B * H.

        ``table`` [B, H, G, P * D] has the parameters of keys coded per channel in runs of C / G; without it keys are
        the plain numbers.
        """
        block = self._block(codes, query.element_size())
        asked, by_tokens = _cut(query, block.heads, 0), _cut(codes.flatten(0, 1), block.tokens, 1)
        by_runs: Iterable[Tensor | None] = repeat(None)
        if table is not None:
            of_runs = table.view(len(query), table.shape[2], -1, 1, query.shape[2])  # [N, G, P, 1, D]
            by_runs = _cut(of_runs, block.tokens // self._run, 1)
        parts = []
        for some, own in zip(by_tokens, by_runs, strict=False):
            each = zip(asked, self._numbers(some, query.dtype, block.heads, own), strict=True)
            parts.append(_joined([torch.bmm(q, keys.transpose(1, 2)) for q, keys in each], 0))
        return _joined(parts, 2)

    def mixed(self, shares: Tensor, codes: Tensor) -> Tensor:
        """Values weighted by ``shares`` [N, X, C]: [N, X, D]."""
        block = self._block(codes, shares.element_size())
        weights, by_tokens = _cut(shares, block.tokens, 2), _cut(codes.flatten(0, 1), block.tokens, 1)
        parts = []
        for weight, some in zip(weights, by_tokens, strict=True):
            each = zip(_cut(weight, block.heads, 0), self._numbers(some, shares.dtype, block.heads), strict=True)
            parts.append(_joined([torch.bmm(share, values) for share, values in each], 0))
        return sum(parts[1:], parts[0])

    @property
    def _run(self) -> int:
        """Keys that share scales by channel."""
        return self._codec.key_group or 1

    def _block(self, codes: Tensor, element_size: int) -> Block:
        token = codes.shape[3] * 8 // self._codec.bits * element_size
        most = HOST_BLOCK * torch.get_num_threads() if codes.device.type == "cpu" else DEVICE_BLOCK
        tokens = max(1, most // token // self._run) * self._run  # never part of a run
        return Block(max(1, most // (token * max(1, codes.shape[2]))), tokens)

    def _numbers(self, codes: Tensor, dtype: torch.dtype, heads: int, runs: Tensor | None = None) -> Iterator[Tensor]:
        """Those of ``codes`` [N, C, W] as [n, C, D], some heads at a time; to be read before the next are asked for.

        With the parameters of ``runs`` [N, G, P, 1, D] they are the keys.
        """
        by_head: Iterable[Tensor | None] = repeat(None) if runs is None else _cut(runs, heads, 0)
        for some, own in zip(_cut(codes, heads, 0), by_head, strict=False):
            apart = unpack(some, self._codec.bits, self._scratch)
            numbers = self._codec.numbers(apart, self._scratch.like(apart, dtype))
            if own is not None:
                scale, *zeros = own.unbind(2)  # [n, G, 1, D]
                by_run = numbers.view(*scale.shape[:2], self._run, -1)
                if zeros:
                    torch.addcmul(zeros[0], by_run, scale, out=by_run)
                else:
                    by_run.mul_(scale)
            yield numbers


def token_logits(query: Tensor, codes: Tensor, parameters: Tensor, products: CodeProducts) -> Tensor:
    """q k [N, X, C] of ``query`` [N, X, D] for keys coded per token in n groups of channels: [B, H, C, n, P]."""
    scale, *zeros = _by_group(parameters)
    groups, size = parameters.shape[3], query.shape[2] // parameters.shape[3]
    if groups == 1:  # a scale belongs to a key, so it goes to its column
        logits = products.logits(query, codes) * scale
    else:
        # every group has queries of its own, 0 in the channels of others
        own = torch.eye(groups, dtype=query.dtype, device=query.device).repeat_interleave(size, 1)[:, None]
        by_group = products.logits((query[:, None] * own).flatten(1, 2), codes)  # [N, n * X, C]
        logits = (by_group.view(len(query), groups, -1, codes.shape[2]) * scale[:, :, None]).sum(1)
    for zero in zeros:  # the zero of a key is added in every channel
        logits += torch.bmm(split_last(query, size).sum(-1), zero)
    return logits


def token_mix(shares: Tensor, codes: Tensor, parameters: Tensor, products: CodeProducts) -> Tensor:
    """Values coded per token in n groups of channels, weighted by ``shares`` [N, X, C]: [N, X, D]."""
    scale, *zeros = _by_group(parameters)
    groups = parameters.shape[3]
    if groups == 1:
        mixed = products.mixed(shares * scale, codes)
    else:
        # every group has shares of its own, multiplied with all channels: numbers that were taken apart would be copied
        by_group = products.mixed((shares[:, None] * scale[:, :, None]).flatten(1, 2), codes)
        size = by_group.shape[2] // groups
        apart = by_group.view(len(shares), groups, -1, groups, size)  # [N, n, X, n, D / n]
        mixed = apart.diagonal(dim1=1, dim2=3).transpose(2, 3).flatten(2)
    for zero in zeros:
        mixed.view(*mixed.shape[:2], groups, -1).add_(torch.bmm(shares, zero.transpose(1, 2))[..., None])
    return mixed


def _by_group(parameters: Tensor) -> tuple[Tensor, ...]:
    """Parameters [B, H, C, n, P] as P times [N, n, C]; several are laid together, being read often.

    A scale that all tokens share is [N, 1, 1].
    """
    if parameters.shape[3:].numel() == 1:
        own = parameters[:, :, :1] if parameters.stride(2) == 0 else parameters
        return (own.reshape(own.shape[0] * own.shape[1], 1, -1),)
    return parameters.permute(4, 0, 1, 3, 2).flatten(1, 2).contiguous().unbind(0)


def _cut(tensor: Tensor, size: int, dimension: int) -> tuple[Tensor, ...]:
    """In parts of this size; what is one part costs no operator."""
    return (tensor,) if tensor.shape[dimension] <= size else torch.split(tensor, size, dimension)


def _joined(parts: list[Tensor], dimension: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)
