"""KIVI: keys quantised per channel, values per token, the most recent entries exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.quantiser import Quantiser
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Kivi(Quantiser):
    """Store asymmetric min-max codes of 2 or 4 bits (Liu 2024, arXiv:2402.02750).

    scale = (max - min) / (2^bits - 1), zero = min. Keys have one scale per channel for every ``group`` consecutive
    tokens. They stay exact until ``residual`` of them have accumulated, then all of these are quantised. Values have
    one scale per token for every ``group`` channels (a smaller head is one group); the last ``residual`` of them stay
    exact. Every token attends before it can be quantised.

    Departure: scale and zero are kept in the model's own precision, not always in float16.
    """

    name = "kivi"
    paper = "2402.02750"
    keeps = "every entry, all but the last `residual` in `bits` bits"
    codes_singly = True
    uses = ("bits", "group", "residual", "skip_layers", "chunk")

    residual: int = 32
    bits: int = 4
    group: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("bits", (2, 4))
        self._at_least("group", 1)
        if self.residual < 1 or self.residual % self.group:
            raise SpecError(
                f"policy kivi: residual={self.residual} is no multiple of group={self.group}; "
                "keys leave the residual in whole groups"
            )

    @property
    def code_kind(self) -> str | None:
        return "unsigned"

    @property
    def key_group(self) -> int:
        return self.group

    def channels(self, size: int) -> int:
        group = min(self.group, size)
        if size % group:
            raise SpecError(f"policy kivi: heads of {size} channels do not split into groups of {group}; change group")
        if size * self.bits % 8:
            raise SpecError(f"policy kivi: codes of {self.bits} bits of {size} channels fill no whole bytes; take int8")
        return group

    def keys_until(self, before: int, seen: int) -> int:
        # a full residual is quantised at once
        return before + (seen - before) // self.residual * self.residual

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        import torch

        return torch.stack([(high - low) / (2**self.bits - 1), low], -1)  # [..., 2]: scale and zero

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        import torch

        scale, zero = parameters.unbind(-1)
        # the scale is 0 if all numbers of a group are equal; zero alone restores them
        steps = ((x - zero) / scale).nan_to_num(0.0, 0.0, 0.0)
        return steps.round().clamp(0, 2**self.bits - 1).to(torch.uint8)

    def numbers(self, codes: Tensor, out: Tensor) -> Tensor:
        return out.copy_(codes)
