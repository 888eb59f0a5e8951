"""The policies that store entries in eight bits: as integers (INT8) or as floats (FP8)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvaudit.audit.policies.quantiser import Absmax

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}  # as torch names them
_NOT_TOP_OF_EXPONENT = ~0x4000
_E4M3_EXPONENT = 2.0**8  # the exponent bias is 15 in a float16 and 7 in e4m3


@dataclass(frozen=True)
class Int8(Absmax):
    """Store symmetric int8 codes; scale = largest magnitude / 127 per token and head, unless fixed (see ``Absmax``).

    Without ``write``, an entry is exact for the query of its own token and for those of the same chunk of the prompt;
    later queries read its code. With ``write``, every query reads codes.
    """

    name = "int8"
    keeps = "every entry, in 8-bit integers"
    codes_singly = True
    uses = ("residual", "scale", "scales", "write", "skip_layers", "chunk")

    @property
    def largest(self) -> float:
        return 127.0

    @property
    def code_kind(self) -> str | None:
        return "int8"

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        import torch

        return self._scaled(x, parameters).round().to(torch.int8).view(torch.uint8)

    def numbers(self, codes: Tensor, out: Tensor) -> Tensor:
        import torch

        return out.copy_(codes.view(torch.int8))


@dataclass(frozen=True)
class Float8(Absmax):
    """Store FP8 codes (Micikevicius 2022, arXiv:2209.05433); scale = largest magnitude / largest code per token, head.

    ``format``: e4m3 or e5m2. Scales may be fixed instead, by default to 1 (see ``Absmax``). Without ``write``, an entry
    is exact for the query of its own token and for those of the same chunk of the prompt; later queries read its code.
    With ``write``, every query reads codes. Serving engines default to ``scale=tensor,write=true``.
    """

    name = "fp8"
    paper = "2209.05433"
    keeps = "every entry, in 8-bit floats"
    codes_singly = True
    uses = ("format", "residual", "scale", "scales", "write", "skip_layers", "chunk")

    format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("format", tuple(_FORMATS))

    @property
    def default_scale(self) -> str:
        return "1"

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, _FORMATS[self.format])
        return dtype

    @property
    def largest(self) -> float:
        import torch

        return torch.finfo(self._dtype).max

    @property
    def code_kind(self) -> str | None:
        return self.format

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        import torch

        # rounds to the nearest code, ties to even; the view reads its bits as a byte
        return self._scaled(x, parameters).to(self._dtype).view(torch.uint8)

    def numbers(self, codes: Tensor, out: Tensor) -> Tensor:
        import torch

        if codes.device.type != "cpu":
            return out.copy_(codes.view(self._dtype))
        # go through float16, which a CPU converts ten times faster than FP8; the product widens and shifts the bits
        if self.format == "e5m2":
            return out.copy_((codes.view(torch.int8) * _shift(8)).view(torch.float16))  # the upper half of a float16
        # widening extends the sign, so the shift leaves a copy of it in the exponent, which the mask clears
        half = (codes.view(torch.int8) * _shift(7)).bitwise_and_(_NOT_TOP_OF_EXPONENT)
        return out.copy_(half.view(torch.float16)).mul_(_E4M3_EXPONENT)


@cache
def _shift(bits: int) -> Tensor:
    """Return 2^``bits`` as an int16 tensor; multiplying by it shifts an integer left."""
    import torch

    return torch.tensor([1 << bits], dtype=torch.int16)
