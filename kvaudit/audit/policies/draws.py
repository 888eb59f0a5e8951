"""Random numbers that depend only on their purpose (seed, row, layer), so they are equal in every batch and order."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed derived from any printable parts, stable across processes and versions."""
    # shifted by one bit: torch's seeds and int64 tensors are signed
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


def mix(x: Tensor) -> Tensor:
    """Return a hash of each int64 number, different for different numbers (multiply, xor-shift; modulo 2**64)."""
    x = x * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    x = x ^ ((x >> 32) & 0xFFFFFFFF)  # masked: >> copies the sign
    x = x * -4417276706812531889  # 0xC2B2AE3D27D4EB4F; odd, so that no two numbers collide
    x = x ^ ((x >> 29) & 0x7FFFFFFFF)
    x = x * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def uniforms(seeds: Tensor, index: Tensor) -> Tensor:
    """Return number ``index`` [B] of the random sequence of each seed [B]: a float64 in [0, 1) with 53 random bits."""
    bits = mix(mix(seeds) + index) & ((1 << 53) - 1)  # two rounds, so that neighbouring seeds do not share draws
    return bits.double() / float(1 << 53)
