"""Q4_0: entries stored as four-bit integers per token, in the blocks of llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvaudit.audit.policies.quantiser import Quantiser, working_dtype
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MIDDLE = 8  # the code of 0
_VALUE_CHANNELS = 64  # of a value, mixed by one rotation at most


@dataclass(frozen=True)
class Q4(Quantiser):
    """Store 4-bit codes, each token with one scale per ``group`` channels of a head, as in llama.cpp's Q4_0.

    scale = x / -8, where x is the group's number of largest magnitude, with its sign. So x has code 0 and is exact, and
    zero has code 8. Numbers of the sign opposite to x are clipped at 7 / 8 of its magnitude. A smaller head is one
    group. ``rotate``: a Hadamard matrix first mixes the channels of a head (of values: 64 channels at a time), which
    spreads one large channel over all. llama.cpp of 2026-11 is ``write=true,rotate=true``.

    Departures: the scale is kept in the model's own precision, not in float16. Heads whose size is no multiple of 64
    are rotated too, in blocks whose size is the largest power of two that divides the head size.
    """

    name = "q4_0"
    keeps = "every entry, in 4-bit integers"
    codes_singly = True
    uses = ("group", "residual", "write", "rotate", "skip_layers", "chunk")

    group: int = 32
    write: bool = False
    rotate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("group", 1)

    @property
    def bits(self) -> int:
        return 4

    @property
    def code_kind(self) -> str | None:
        return None if self.rotate else "q4"

    @property
    def on_write(self) -> bool:
        return self.write

    def channels(self, size: int) -> int:
        group = min(self.group, size)
        if size % group or size % 2:
            raise SpecError(f"policy q4_0: heads of {size} channels do not split into groups of {group}; change group")
        return group

    def turned(self, x: Tensor, part: int) -> Tensor:
        if not self.rotate:
            return x
        size = x.shape[-1]
        width = size & -size  # the largest power of two that divides it
        matrix = hadamard(width if part == 0 else min(width, _VALUE_CHANNELS), working_dtype(x.dtype), x.device)
        mixed = x.to(matrix.dtype).reshape(*x.shape[:-1], -1, len(matrix)) @ matrix
        return mixed.reshape(x.shape).to(x.dtype)

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        import torch

        return (torch.where(high > -low, high, low) / -_MIDDLE)[..., None]  # [..., 1]: a scale alone

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        import torch

        scale = parameters[..., 0]
        steps = x / scale.masked_fill(scale == 0, 1)
        # halves round up: llama.cpp adds .5 and truncates
        return (steps + (_MIDDLE + 0.5)).floor().clamp(0, 2 * _MIDDLE - 1).to(torch.uint8)

    def numbers(self, codes: Tensor, out: Tensor) -> Tensor:
        return out.copy_(codes).sub_(_MIDDLE)


@cache
def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Sylvester's matrix [size, size] of +-1 / sqrt(size), size a power of two; it is its own inverse."""
    import torch

    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix / size**0.5
    return scaled
