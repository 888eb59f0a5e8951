"""The contract of a quantising policy: nothing leaves, entries past the residual window are stored in fewer bits.

Which entries are quantised when is the policy's ``keys_until`` and ``values_until``; how, its ``fit``, ``encode`` and
``numbers``. The cache stores codes and parameters, the shadow pass calls the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from audit.errors import SpecError
from audit.policies.base import Policy, View
from audit.policies.none import Dense


@dataclass(frozen=True)
class Quantiser(Policy):
    """Entries are exact while among the last ``residual`` of their row and quantised for every later query."""

    evicts: ClassVar[bool] = False
    quantises: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...] | None] = ("residual", "chunk")

    residual: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("residual", 0)

    @property
    def evictor(self) -> Policy:
        return Dense(chunk=self.chunk)

    @property
    def quantiser(self) -> Quantiser | None:
        return self

    @property
    def bits(self) -> int:
        """Bits per code: 2, 4 or 8."""
        return 8

    @property
    def key_group(self) -> int:
        """Consecutive keys that share parameters per channel; 0: keys are quantised per token, like values."""
        return 0

    def channels(self, size: int) -> int:
        """Channels of one token's head of ``size`` that share parameters."""
        return size

    def keys_until(self, before: int, seen: int) -> int:
        """Keys at positions below this are quantised after a row has seen ``seen`` tokens; ``before`` already were."""
        return max(before, seen - self.residual)

    def values_until(self, before: int, seen: int) -> int:
        """The same for values."""
        return max(before, seen - self.residual)

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        """Parameters [..., P] of groups with these extremes [...]."""
        raise NotImplementedError

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        """Codes (uint8, one per element) of ``x`` [...] with its parameters [..., P]."""
        raise NotImplementedError

    def numbers(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The codes as plain numbers; an entry is number * scale, plus zero where there is one."""
        raise NotImplementedError

    def decode(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """What the codes stand for, in the dtype of the parameters [..., P]: scale, or scale and zero."""
        numbers = self.numbers(codes, parameters.dtype)
        if parameters.shape[-1] == 1:
            return numbers * parameters[..., 0]
        return torch.addcmul(parameters[..., 1], numbers, parameters[..., 0])

    def importance(self, view: View) -> Tensor:
        raise AssertionError(f"a quantiser never evicts (layer {view.layer})")


@dataclass(frozen=True)
class Absmax(Quantiser):
    """Symmetric scaling per token and head: the largest magnitude is the largest code."""

    @property
    def largest(self) -> float:
        """The value of the largest code."""
        raise NotImplementedError

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        return (torch.maximum(low.abs(), high.abs()) / self.largest)[..., None]

    def _scaled(self, x: Tensor, parameters: Tensor) -> Tensor:
        """``x`` in units of its scale, 0 where all of its group is 0."""
        scale = parameters[..., 0]
        return (x / torch.where(scale > 0, scale, 1)).clamp(-self.largest, self.largest)


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that codes are computed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def require_one_of(policy: str, field: str, got: object, known: tuple[object, ...]) -> None:
    """Raise SpecError when a field does not hold one of the known values."""
    if got not in known:
        raise SpecError(f"policy {policy}: {field}={got}, wanted one of {', '.join(map(str, known))}")
