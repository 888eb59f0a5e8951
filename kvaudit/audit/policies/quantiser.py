"""The contract of a quantising policy: nothing leaves, entries past the residual window are stored in fewer bits.

Which entries are quantised when is the policy's ``keys_until`` and ``values_until``; how, its ``fit``, ``encode`` and
``numbers``. The cache stores codes and parameters, the shadow pass calls the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvaudit.audit.policies.base import Policy
from kvaudit.audit.policies.quantiser import pinned_scales, read_scales
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DIGITS = 7  # fewer than these name a layer


@dataclass(frozen=True)
class Quantiser(Policy):
    """Entries are exact while among the last ``residual`` of their row and quantised for every later query.

    ``skip_layers``: numbers of the model's layers, from 0, that keep all of theirs exact, such as 0/1/23.
    """

    quantises: ClassVar[bool] = True

    residual: int = 0
    chunk: int = 1024
    skip_layers: str = ""

    def __post_init__(self) -> None:
        self._at_least("chunk", 1)
        self._at_least("residual", 0)
        if self.on_write and self.residual:
            raise SpecError(f"policy {self.name}: write=true quantises every entry at once; leave residual at 0")
        words = [word.strip() for word in self.skip_layers.split("/")] if self.skip_layers else []
        if not all(word.isascii() and word.isdigit() and len(word) < _DIGITS for word in words):
            raise SpecError(
                f"policy {self.name}: skip_layers={self.skip_layers}, wanted numbers of layers, from 0, such as 0/1/23"
            )
        # one spelling, so that equal policies have one hash
        object.__setattr__(self, "skip_layers", "/".join(map(str, sorted({int(word) for word in words}))))

    @property
    def skipped(self) -> frozenset[int]:
        """The layers whose entries stay exact."""
        return frozenset(map(int, self.skip_layers.split("/"))) if self.skip_layers else frozenset()

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

    @property
    def on_write(self) -> bool:
        """Whether entries are quantised before their own query attends."""
        return False

    def fixed_scales(self, layer: int, part: int, heads: int) -> Tensor | None:  # noqa: ARG002
        """The scales [H] float64 of a layer's keys (part 0) or values (1) where they are not fitted to each group."""
        return None

    def first_queries(self, before: int, until: int, seen: int) -> list[int]:
        """The query that is the first to read each of these entries as codes, after a row has seen ``seen`` tokens."""
        # on write an entry's own query is the first, else the next one to come, at position seen
        return list(range(before, until)) if self.on_write else [seen] * (until - before)

    def keys_until(self, before: int, seen: int) -> int:
        """Keys at positions below this are quantised after a row has seen ``seen`` tokens; ``before`` already were."""
        return max(before, seen - self.residual)

    def values_until(self, before: int, seen: int) -> int:
        """The same for values."""
        return max(before, seen - self.residual)

    def turned(self, x: Tensor, part: int) -> Tensor:  # noqa: ARG002
        """Keys (part 0) or values (1) [..., D] as they are coded, of those coded by token; twice turned they are back.

        It keeps products of two vectors, so that a turned query meets turned keys.
        """
        return x

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        """Parameters [..., P] of groups with these extremes [...]."""
        raise NotImplementedError

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        """Codes (uint8, one per element) of ``x`` [...] with its parameters [..., P]."""
        raise NotImplementedError

    def numbers(self, codes: Tensor, out: Tensor) -> Tensor:
        """The codes as plain numbers, put into ``out``; an entry is number * scale, plus zero where there is one."""
        raise NotImplementedError

    def decode(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """What the codes stand for, in the dtype of the parameters [..., P]: scale, or scale and zero."""
        import torch

        numbers = self.numbers(codes, torch.empty_like(codes, dtype=parameters.dtype))
        if parameters.shape[-1] == 1:
            return numbers * parameters[..., 0]
        # zero + number * scale
        return torch.addcmul(parameters[..., 1], numbers, parameters[..., 0])


SCALES = ("token", "head", "tensor")


@dataclass(frozen=True)
class Absmax(Quantiser):
    """Symmetric scaling: ``scale=token`` sets the largest magnitude of every token and head on the largest code.

    ``scale=tensor`` has one fixed scale per layer and ``scale=head`` one per layer and KV head, keys and values apart:
    ``scales`` is a number for all of them, two for keys/values, or a JSON file {"keys": [...], "values": [...]} that
    holds by layer one number, or a list of one per KV head. What lies beyond the largest code is cut off. ``write``:
    codes are taken before a token attends, so that its own query and the rest of its chunk read them too.
    """

    scale: str = "token"
    scales: str = ""
    write: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("scale", SCALES)
        if self.scales and self.scale == "token":
            raise SpecError(f"policy {self.name}: scales={self.scales} needs scale=head or scale=tensor")
        if self.scale != "token" and not (self.scales or self.default_scale):
            raise SpecError(f"policy {self.name}: scale={self.scale} needs scales=, a number or a file of numbers")
        if self.scales:
            object.__setattr__(self, "scales", pinned_scales(self.name, self.scales))

    @property
    def default_scale(self) -> str:
        """What fixed scales are where none are given; empty: they have to be."""
        return ""

    @property
    def on_write(self) -> bool:
        return self.write

    def fixed_scales(self, layer: int, part: int, heads: int) -> Tensor | None:
        import torch

        if self.scale == "token":
            return None
        found = read_scales(self.name, self.scales or self.default_scale).of(layer, part, heads)
        if self.scale == "tensor" and len(set(found)) > 1:
            raise SpecError(f"policy {self.name}: scales={self.scales} differ by KV head; that is scale=head")
        return torch.tensor(found, dtype=torch.float64)  # [H]; the cache turns it into the dtype of its keys

    @property
    def largest(self) -> float:
        """The value of the largest code."""
        raise NotImplementedError

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        import torch

        # the larger magnitude, since low is at most high; [..., 1]: a scale alone, zero is 0
        return (torch.maximum(-low, high) / self.largest)[..., None]

    def _scaled(self, x: Tensor, parameters: Tensor) -> Tensor:
        """``x`` in units of its scale, 0 where all of its group is 0."""
        scale = parameters[..., 0]
        # a fixed scale may leave values beyond the largest code
        return (x / scale.masked_fill(scale == 0, 1)).clamp(-self.largest, self.largest)


@cache
def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that codes are computed in: float32 at least."""
    import torch

    # bfloat16 has 8 significant bits, too few to place a value between two of 255 codes
    return torch.promote_types(dtype, torch.float32)
