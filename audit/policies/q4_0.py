"""Four-bit integers by token, in the blocks of llama.cpp's Q4_0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvaudit.audit.policies.quantiser import Quantiser
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

_MIDDLE = 8  # the code of 0


@dataclass(frozen=True)
class Q4(Quantiser):
    """Codes of 4 bits per token, ``group`` channels of a head to a scale, as the blocks of llama.cpp's Q4_0.

    scale = the number of largest magnitude, with its sign, / -8: that number is code 0 and exact, 0 is code 8, and what
    lies beyond seven scales on the other side is cut off. A smaller head is one group. llama.cpp codes under ``write``.

    Departures: the scale is kept in the model's own precision, not in float16, and no Hadamard matrix turns a head
    before it is coded, as llama.cpp's does by now.
    """

    name: ClassVar[str] = "q4_0"
    keeps: ClassVar[str] = "every entry, in 4-bit integers"
    uses: ClassVar[tuple[str, ...] | None] = ("group", "residual", "write", "skip_layers", "chunk")

    group: int = 32
    write: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("group", 1)
        self._written_whole()

    @property
    def bits(self) -> int:
        return 4

    @property
    def on_write(self) -> bool:
        return self.write

    def channels(self, size: int) -> int:
        group = min(self.group, size)
        if size % group or size % 2:
            raise SpecError(f"policy q4_0: heads of {size} channels do not split into groups of {group}; change group")
        return group

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        import torch

        return (torch.where(high > -low, high, low) / -_MIDDLE)[..., None]  # [..., 1]: a scale alone

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        import torch

        scale = parameters[..., 0]
        steps = x / scale.masked_fill(scale == 0, 1)
        # halves go up, as they do where a number is cut off behind .5 more
        return (steps + (_MIDDLE + 0.5)).floor().clamp(0, 2 * _MIDDLE - 1).to(torch.uint8)

    def numbers(self, codes: Tensor, out: Tensor) -> Tensor:
        return out.copy_(codes).sub_(_MIDDLE)
