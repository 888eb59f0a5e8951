"""Eight-bit floats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvaudit.audit.policies.quantiser import Absmax

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}  # as torch names them
_NOT_TOP_OF_EXPONENT = ~0x4000
_E4M3_EXPONENT = 2.0**8  # exponent bias of a half, 15, over that of e4m3, 7


@dataclass(frozen=True)
class Float8(Absmax):
    """FP8 codes (Micikevicius 2022, arXiv:2209.05433); scale = largest magnitude / largest code per token and head.

    ``format`` e4m3 or e5m2. Scales may be fixed instead, 1 unless given (see ``Absmax``). An entry is exact for the
    query of its own token and quantised for later ones, and given tokens attend to their own chunk exactly, unless
    ``write``. ``scale=tensor,write=true`` is what serving engines do by default.
    """

    name: ClassVar[str] = "fp8"
    paper: ClassVar[str] = "2209.05433"
    keeps: ClassVar[str] = "every entry, in 8-bit floats"
    uses: ClassVar[tuple[str, ...] | None] = ("format", "residual", "scale", "scales", "write", "skip_layers", "chunk")

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

        found: torch.dtype = getattr(torch, _FORMATS[self.format])
        return found

    @property
    def largest(self) -> float:
        import torch

        return torch.finfo(self._dtype).max

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        import torch

        # rounds to the nearest code, ties to even; the bits stay as they are
        return self._scaled(x, parameters).to(self._dtype).view(torch.uint8)

    def numbers(self, codes: Tensor, out: Tensor) -> Tensor:
        import torch

        if codes.device.type != "cpu":
            return out.copy_(codes.view(self._dtype))
        # the bits moved into a half, which a processor converts ten times faster than an FP8 number; the product makes
        # them wider and moves them up in one
        if self.format == "e5m2":
            return out.copy_((codes.view(torch.int8) * _places(8)).view(torch.float16))  # the upper half of a float16
        # the sign was copied upwards: moved, it stands at its place and once more in the exponent, where it goes
        half = (codes.view(torch.int8) * _places(7)).bitwise_and_(_NOT_TOP_OF_EXPONENT)
        return out.copy_(half.view(torch.float16)).mul_(_E4M3_EXPONENT)


@cache
def _places(bits: int) -> Tensor:
    """What an integer is multiplied with to stand so many bits higher in an int16."""
    import torch

    return torch.tensor([1 << bits], dtype=torch.int16)
