"""INT8: entries stored as eight-bit integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.quantiser import Absmax

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Int8(Absmax):
    """Store symmetric int8 codes; scale = largest magnitude / 127 per token and head, unless fixed (see ``Absmax``).

    Without ``write`` an entry is exact for the query of its own token, or those of its own chunk of the prompt, and
    quantised for later ones; with it, every query reads codes.
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
