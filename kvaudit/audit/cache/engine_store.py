"""How serving engines store keys and values: the exact numbers that a later query reads back.

An engine quantises an entry when it writes it, and every query, including the entry's own, reads the code. ``Cast`` and
``ByToken`` quantise each entry alone. ``ByChannel`` quantises a block of consecutive keys channel by channel. When a
key is added to the block, all its keys are decoded and quantised again, so queries in the block read other numbers than
later queries.

Sources: OpenVINO 2026.4 for ``ByToken`` and ``ByChannel`` (paged attention of its CPU plugin); vLLM 0.32 for ``Cast``,
which casts on write with scale 1.0, and on a CPU rounds toward zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # tokens of a block of OpenVINO's paged cache
_CONSTANT_SCALE = 1e-4  # scale of a group of equal numbers


@dataclass(frozen=True)
class Cast:
    """Storage in the torch type named ``dtype``; larger numbers are clipped to the largest one of the type.

    Numbers are rounded to the nearest one of the type. With ``toward_zero`` (one-byte types only) their lower bits are
    dropped instead.
    """

    dtype: str
    toward_zero: bool = False

    def read_back(self, x: Tensor) -> Tensor:
        """Return the numbers that queries read for entries [..., D]."""
        dtype = getattr(torch, self.dtype)
        largest = torch.finfo(dtype).max
        exact = x.float()
        cast = exact.clamp(-largest, largest).to(dtype)
        if self.toward_zero:  # sign and magnitude: the code one lower is the next number toward 0
            codes = cast.view(torch.uint8)
            cast = torch.where(cast.float().abs() > exact.abs(), codes - 1, codes).view(dtype)
        return cast.to(x.dtype)


@dataclass(frozen=True)
class ByToken:
    """Unsigned codes of ``bits`` bits, with a float scale and zero per ``group`` channels of a token (0: all)."""

    bits: int
    group: int = 0

    def read_back(self, x: Tensor) -> Tensor:
        """Return the numbers that queries read for entries [..., D]."""
        groups = x.float().reshape(*x.shape[:-1], -1, self.group or x.shape[-1])  # [..., D / group, group]
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)  # [..., D / group, 1]
        scale = (high - low) / (2**self.bits - 1)
        return _round_trip(groups, low, scale, self.bits).flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class ByChannel:
    """Unsigned codes of ``bits`` bits, with a float scale and zero per channel of a block of BLOCK tokens."""

    bits: int

    def read_back(self, blocks: Tensor, is_written: Tensor) -> Tensor:
        """Return the numbers that queries read back from blocks [..., BLOCK, D].

        ``is_written`` [..., BLOCK] marks the slots that hold an entry.
        """
        x, mask = blocks.float(), is_written[..., None]  # mask [..., BLOCK, 1]
        low = x.masked_fill(~mask, torch.inf).amin(-2, keepdim=True)  # [..., 1, D]
        high = x.masked_fill(~mask, -torch.inf).amax(-2, keepdim=True)
        has_entries = mask.any(-2, keepdim=True)  # nothing is read from an empty block
        # multiplied by the inverse where ``ByToken`` divides: the two round differently
        scale = torch.where(has_entries, high - low, 0.0) * (1.0 / (2**self.bits - 1))
        numbers = _round_trip(x, torch.where(has_entries, low, 0.0), scale, self.bits)
        return torch.where(mask, numbers, 0.0).to(blocks.dtype)

    def read_in_order(self, blocks: Tensor, prompt: Tensor, until: Tensor) -> BlockReads:
        """Return what queries read of keys [B, H, n, BLOCK, D] if the prompt is written at once, later keys one by one.

        ``prompt`` bool [B, n, BLOCK] marks the entries of the prompt; ``until`` marks these and all entries written
        later.
        """
        stored = self.read_back(blocks, prompt[:, None])  # the prompt's entries are written together
        steps = []
        # decoding then writes one token at a time
        for slot in range(BLOCK):
            joins = (until & ~prompt)[:, None, :, slot, None, None]  # [B, 1, n, 1, 1]
            # the new key as it was computed, the earlier ones as they were last read
            block = torch.cat([stored[..., :slot, :], blocks[..., slot : slot + 1, :], stored[..., slot + 1 :, :]], -2)
            is_written = torch.arange(BLOCK, device=blocks.device) <= slot
            stored = torch.where(joins, self.read_back(block, is_written.expand(block.shape[:-1])), stored)
            steps.append(stored)
        return BlockReads(torch.stack(steps, 3), stored)  # [B, H, n, BLOCK, BLOCK, D]


class BlockReads(NamedTuple):
    """The keys of blocks as queries read them.

    ``same_block`` [B, H, n, BLOCK, BLOCK, D] holds, for each slot of a block, the block's keys as the query at that
    slot reads them. ``later`` [B, H, n, BLOCK, D] holds the keys as queries of later blocks read them.
    """

    same_block: Tensor
    later: Tensor


@dataclass(frozen=True)
class EngineStore:
    """The formats in which an engine stores keys and values; None for either means stored unchanged.

    ``shown`` says what the engine exports as keys and values: what its queries read if True, what it was given to store
    if False.
    """

    keys: Cast | ByToken | ByChannel | None
    values: Cast | ByToken | None
    shown: bool = False


def _round_trip(x: Tensor, low: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Quantise ``x`` (float32) in steps of ``scale`` from ``low`` on, and decode it."""
    # equal numbers are given back under any scale but 0
    scale = torch.where(scale == 0, _CONSTANT_SCALE, scale)
    zero = -low / scale
    # multiplied and added in one rounding, as the processor does; halves go to even
    codes = (x.double() * (1.0 / scale).double() + zero.double()).float().round().clamp(0, 2**bits - 1)
    return (codes - zero) * scale
