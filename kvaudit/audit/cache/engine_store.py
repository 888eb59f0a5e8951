"""How serving engines store keys and values: what a later query reads back of them, number for number.

An engine codes an entry when it writes it, and every query, the entry's own too, reads the code. ``Cast`` and
``ByToken`` code an entry by itself. ``ByChannel`` codes a block of consecutive keys channel by channel, and codes it
again whenever a key joins it, out of what it read back: so a query in the block sees other numbers than a later one.

Sources: OpenVINO 2026.4 for ``ByToken`` and ``ByChannel`` (paged attention of its CPU plugin), vLLM 0.32 for
``Cast`` (cast on write, scale 1.0, and on a CPU toward zero).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # tokens of a block of OpenVINO's paged cache
_FLAT = 1e-4  # scale of a group whose entries are all alike


@dataclass(frozen=True)
class Cast:
    """Every number cast to ``dtype``, a name of torch's, and back; beyond its largest number it is that.

    To the nearest, or ``toward_zero``, as one takes the upper bits of a number (of one byte only).
    """

    dtype: str
    toward_zero: bool = False

    def read_back(self, x: Tensor) -> Tensor:
        """What is read of entries [..., D]."""
        dtype = getattr(torch, self.dtype)
        most = torch.finfo(dtype).max
        exact = x.float()
        cast = exact.clamp(-most, most).to(dtype)
        if self.toward_zero:  # sign and magnitude: the code before is the next number toward 0
            codes = cast.view(torch.uint8)
            cast = torch.where(cast.float().abs() > exact.abs(), codes - 1, codes).view(dtype)
        return cast.to(x.dtype)


@dataclass(frozen=True)
class ByToken:
    """Unsigned codes of ``bits`` with a float scale and zero for every ``group`` channels of a token, 0 for all."""

    bits: int
    group: int = 0

    def read_back(self, x: Tensor) -> Tensor:
        """What is read of entries [..., D]."""
        parts = x.float().reshape(*x.shape[:-1], -1, self.group or x.shape[-1])  # [..., D / group, group]
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)  # [..., D / group, 1]
        scale = (high - low) / _largest(self.bits)
        return _coded(parts, low, scale, self.bits).flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class ByChannel:
    """Unsigned codes of ``bits`` with a float scale and zero for every channel of a block of BLOCK tokens."""

    bits: int

    def read_back(self, blocks: Tensor, there: Tensor) -> Tensor:
        """What is read of blocks [..., BLOCK, D] of which only the entries ``there`` [..., BLOCK] are written."""
        x, own = blocks.float(), there[..., None]  # own [..., BLOCK, 1]
        low = x.masked_fill(~own, torch.inf).amin(-2, keepdim=True)  # [..., 1, D]
        high = x.masked_fill(~own, -torch.inf).amax(-2, keepdim=True)
        some = own.any(-2, keepdim=True)  # of a block without an entry nothing is read
        # times the inverse, where a token's is divided: one is rounded otherwise than the other
        scale = torch.where(some, high - low, 0.0) * (1.0 / _largest(self.bits))
        read = _coded(x, torch.where(some, low, 0.0), scale, self.bits)
        return torch.where(own, read, 0.0).to(blocks.dtype)

    def read_in_order(self, blocks: Tensor, prompt: Tensor, until: Tensor) -> BlockReads:
        """What is read of keys [B, H, n, BLOCK, D] that entered their blocks in order, those of the ``prompt`` at once.

        ``prompt`` and ``until`` are bool [B, n, BLOCK]: the entries of the prompt, and those ever written.
        """
        held = self.read_back(blocks, prompt[:, None])  # the prompt's entries as they are read at once
        steps = []
        # then a token at a time, as decoding brings them
        for place in range(BLOCK):
            joins = (until & ~prompt)[:, None, :, place, None, None]  # [B, 1, n, 1, 1]
            # the new key as it was computed, those before it as they were last read
            grown = torch.cat([held[..., :place, :], blocks[..., place : place + 1, :], held[..., place + 1 :, :]], -2)
            there = torch.arange(BLOCK, device=blocks.device) <= place
            held = torch.where(joins, self.read_back(grown, there.expand(grown.shape[:-1])), held)
            steps.append(held)
        return BlockReads(torch.stack(steps, 3), held)  # [B, H, n, BLOCK, BLOCK, D]


class BlockReads(NamedTuple):
    """Keys of blocks as queries read them: ``own`` [B, H, n, BLOCK, BLOCK, D] by the query at each place of the block
    itself, ``later`` [B, H, n, BLOCK, D] by those of later blocks.
    """

    own: Tensor
    later: Tensor


@dataclass(frozen=True)
class EngineStore:
    """How an engine stores keys and values; None stores them as they are.

    ``shown``: the engine hands out what its queries read, codes and all, and not what it coded.
    """

    keys: Cast | ByToken | ByChannel | None
    values: Cast | ByToken | None
    shown: bool = False


def _largest(bits: int) -> float:
    return float(2**bits - 1)


def _coded(x: Tensor, low: Tensor, scale: Tensor, bits: int) -> Tensor:
    """``x`` float32 as codes that begin at ``low`` give it back."""
    # a group of equal numbers: any scale but 0 gives them back
    scale = torch.where(scale == 0, _FLAT, scale)
    zero = -low / scale
    # multiplied and added in one rounding, as the processor does it; rounded half to even
    codes = (x.double() * (1.0 / scale).double() + zero.double()).float().round().clamp(0, _largest(bits))
    return (codes - zero) * scale
