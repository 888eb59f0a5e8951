"""Eight-bit floats, one scale per token and head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from audit.policies.quantiser import Absmax, require_one_of

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Float8(Absmax):
    """FP8 codes (Micikevicius 2022, arXiv:2209.05433), scale = largest magnitude / largest code, per token and head.

    ``format`` e4m3 or e5m2. An entry is exact for the query of its own token and quantised for later ones; given tokens
    attend to their own chunk exactly.
    """

    name: ClassVar[str] = "fp8"
    paper: ClassVar[str] = "2209.05433"
    keeps: ClassVar[str] = "every entry, in 8-bit floats"
    uses: ClassVar[tuple[str, ...] | None] = ("format", "residual", "chunk")

    format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of(self.name, "format", self.format, tuple(_FORMATS))

    @property
    def largest(self) -> float:
        return torch.finfo(_FORMATS[self.format]).max

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        return self._scaled(x, parameters).to(_FORMATS[self.format]).view(torch.uint8)

    def decode(self, codes: Tensor, parameters: Tensor) -> Tensor:
        scale = parameters[..., 0]
        return codes.view(_FORMATS[self.format]).to(scale.dtype) * scale
