"""The base class of quantising policies, which evict nothing and store all but the latest entries in fewer bits.

``keys_until`` and ``values_until`` say when entries are quantised; ``fit``, ``encode`` and ``numbers`` say how. The
cache stores codes and parameters (scale and zero); the shadow pass, by which a learner sees the cache, calls the same
functions.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvaudit.audit.policies.base import Policy
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LAYER_DIGITS = 7  # a layer's number has fewer
_HASH_DIGITS = 12  # of a scale file's sha256 in the policy's canonical string


@dataclass(frozen=True)
class Quantiser(Policy):
    """Keep the last ``residual`` entries of each row exact, and quantise earlier ones for every later query.

    ``skip_layers``: numbers of the model's layers, from 0, whose entries stay exact, such as 0/1/23.
    """

    quantises: ClassVar[bool] = True
    # whether a decode step quantises at most one entry per row (keys in groups: whole groups, counted from position 0),
    # so that steps can be captured as a CUDA graph
    codes_singly: ClassVar[bool] = False

    residual: int = 0
    chunk: int = 1024
    skip_layers: str = ""

    def __post_init__(self) -> None:
        self._at_least("chunk", 1)
        self._at_least("residual", 0)
        if self.on_write and self.residual:
            raise SpecError(f"policy {self.name}: write=true quantises every entry at once; leave residual at 0")
        layers = [layer.strip() for layer in self.skip_layers.split("/")] if self.skip_layers else []
        if not all(layer.isascii() and layer.isdigit() and len(layer) < _LAYER_DIGITS for layer in layers):
            raise SpecError(
                f"policy {self.name}: skip_layers={self.skip_layers}, wanted numbers of layers, from 0, such as 0/1/23"
            )
        # one spelling, so that equal policies have one hash
        object.__setattr__(self, "skip_layers", "/".join(map(str, sorted({int(layer) for layer in layers}))))

    @property
    def skipped(self) -> frozenset[int]:
        """The numbers of the layers whose entries stay exact (option ``skip_layers``)."""
        return frozenset(map(int, self.skip_layers.split("/"))) if self.skip_layers else frozenset()

    @property
    def bits(self) -> int:
        """Bits per code: 2, 4 or 8."""
        return 8

    @property
    def key_group(self) -> int:
        """The number of consecutive keys that share a scale per channel; 0 if keys are quantised per token."""
        return 0

    @property
    def code_kind(self) -> str | None:
        """The name by which GPU kernels know the codes (``CodedPart.kind``); None if only ``numbers`` decodes them."""
        return None

    def channels(self, size: int) -> int:
        """Return how many channels of a head of ``size`` channels share a scale, per token."""
        return size

    @property
    def on_write(self) -> bool:
        """Whether entries are quantised before their own query attends."""
        return False

    def fixed_scales(self, layer: int, part: int, heads: int) -> Tensor | None:  # noqa: ARG002
        """Return the fixed scales [H] float64 of a layer's keys (part 0) or values (1); None if fitted to the data."""
        return None

    def first_queries(self, before: int, until: int, seen: int) -> list[int]:
        """Return, for each entry at position ``before`` to ``until`` - 1, the first query that reads it as a code.

        ``seen`` is the number of tokens when these entries are quantised.
        """
        # on write it is the entry's own query, otherwise the next one to come, at position ``seen``
        return list(range(before, until)) if self.on_write else [seen] * (until - before)

    def keys_until(self, before: int, seen: int) -> int:
        """Return the position below which keys are quantised after ``seen`` tokens.

        ``before`` is the position that the previous call returned.
        """
        return max(before, seen - self.residual)

    def values_until(self, before: int, seen: int) -> int:
        """Return the position below which values are quantised after ``seen`` tokens.

        ``before`` is the position that the previous call returned.
        """
        return max(before, seen - self.residual)

    def turned(self, x: Tensor, part: int) -> Tensor:  # noqa: ARG002
        """Return keys (part 0) or values (1) [..., D] as they are quantised: transformed (rotated), or unchanged.

        The transform is its own inverse and keeps inner products, so that it can be applied to queries instead of keys.
        """
        return x

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the parameters [..., P] of groups whose minimum and maximum are ``low`` and ``high`` [...].

        They are a scale, or scale and zero.
        """
        raise NotImplementedError

    def encode(self, x: Tensor, parameters: Tensor) -> Tensor:
        """Return the codes of ``x`` (uint8, one per element of x) under the parameters [..., P] of its group."""
        raise NotImplementedError

    def numbers(self, codes: Tensor, out: Tensor) -> Tensor:
        """Write into ``out`` the number that each code stands for; an entry is number * scale (+ zero, if any)."""
        raise NotImplementedError

    def decode(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """Return decoded entries, in the dtype of ``parameters`` [..., P] (scale, or scale and zero)."""
        import torch

        numbers = self.numbers(codes, torch.empty_like(codes, dtype=parameters.dtype))
        if parameters.shape[-1] == 1:
            return numbers * parameters[..., 0]
        # zero + number * scale
        return torch.addcmul(parameters[..., 1], numbers, parameters[..., 0])


@dataclass(frozen=True)
class Absmax(Quantiser):
    """Scale symmetrically: ``scale=token`` maps the largest magnitude of each token and head to the largest code.

    ``scale=tensor`` uses one fixed scale per layer and ``scale=head`` one per layer and KV head, separately for keys
    and values. ``scales`` gives them: one number for all, two as keys/values, or a JSON file {"keys": [...], "values":
    [...]} with, per layer, one number or a list of one per KV head. Numbers beyond the largest code are clipped.
    ``write``: entries are quantised before their token attends, so that its own query and the rest of its chunk read
    codes too.
    """

    scale: str = "token"
    scales: str = ""
    write: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("scale", ("token", "head", "tensor"))
        if self.scales and self.scale == "token":
            raise SpecError(f"policy {self.name}: scales={self.scales} needs scale=head or scale=tensor")
        if self.scale != "token" and not (self.scales or self.default_scale):
            raise SpecError(f"policy {self.name}: scale={self.scale} needs scales=, a number or a file of numbers")
        if self.scales:
            object.__setattr__(self, "scales", _pin_scales(self.name, self.scales))

    @property
    def default_scale(self) -> str:
        """The value of the option ``scales`` for a policy that does not set it; empty if the option must be set."""
        return ""

    @property
    def on_write(self) -> bool:
        return self.write

    def fixed_scales(self, layer: int, part: int, heads: int) -> Tensor | None:
        import torch

        if self.scale == "token":
            return None
        table = _read_scales(self.name, self.scales or self.default_scale)[part]
        if isinstance(table, float):
            scales = [table] * heads
        elif layer < len(table) and len(table[layer]) in (1, heads):
            scales = table[layer] * (heads // len(table[layer]))
        else:
            raise SpecError(
                f"scales: the file has {len(table)} layers, wanted one number or {heads} (KV heads) for layer {layer}"
            )
        if self.scale == "tensor" and len(set(scales)) > 1:
            raise SpecError(f"policy {self.name}: scales={self.scales} differ by KV head; that is scale=head")
        return torch.tensor(scales, dtype=torch.float64)  # [H]; the cache converts it to the dtype of its keys

    @property
    def largest(self) -> float:
        """The number that the largest code stands for, such as 127."""
        raise NotImplementedError

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        import torch

        # low <= high, so this is the larger magnitude; [..., 1]: a scale, no zero
        return (torch.maximum(-low, high) / self.largest)[..., None]

    def _scaled(self, x: Tensor, parameters: Tensor) -> Tensor:
        """Return ``x`` divided by its scale, 0 where the scale is 0."""
        scale = parameters[..., 0]
        # with a fixed scale, values may exceed the largest code
        return (x / scale.masked_fill(scale == 0, 1)).clamp(-self.largest, self.largest)


@cache
def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which codes are computed: float32 or wider."""
    import torch

    # bfloat16 has 8 significant bits, too few to place a value between two of 255 codes
    return torch.promote_types(dtype, torch.float32)


# of keys and of values: one number for the model, or per layer a list of one number or one per KV head
ScaleTables = tuple[float | list[list[float]], float | list[list[float]]]


def _pin_scales(policy: str, text: str) -> str:
    """Return a policy's option ``scales``; if it names a file, the start of the file's sha256 is added to the name.

    An example is "scales.json#1f2e3d4c5b6a". Numbers, such as "0.5" or "0.5/0.25", are returned as they are.

    Raises SpecError if the file cannot be used, or if the name already states another hash.
    """
    if _positive_number(text.partition("/")[0]) is not None:  # otherwise a file name, which may contain slashes too
        _parse_scales(policy, text)
        return text
    name, _, expected = text.partition("#")
    try:
        if not Path(name).is_file():  # a policy may come from another's file, and a device never ends
            code = errno.EISDIR if Path(name).is_dir() else errno.ENOENT
            raise OSError(code, os.strerror(code))
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()[:_HASH_DIGITS]
    except OSError as error:
        raise SpecError(
            f"policy {policy}: scales={text!r} is no number above 0, no two (keys/values) and no file to read "
            f"({error.strerror})"
        ) from None
    if expected and expected != digest:
        raise SpecError(f"policy {policy}: scales={name!r} has sha256 {digest}, the policy names {expected}")
    # fail here on an invalid file, not in the middle of a run
    _read_scales(policy, f"{name}#{digest}")
    return f"{name}#{digest}"


@cache  # the text contains the file's sha256, so a changed file is another key
def _read_scales(policy: str, text: str) -> ScaleTables:
    if "#" not in text:
        return _parse_scales(policy, text)
    name = text.partition("#")[0]
    try:
        table = json.loads(Path(name).read_text(encoding="utf-8"))
        keys, values = ([_layer_scales(entry) for entry in table[part]] for part in ("keys", "values"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpecError(
            f"policy {policy}: scales={name!r} is not JSON of the form "
            f'{{"keys": [...], "values": [...]}}, by layer a number above 0 or a list of one per KV head ({error!r})'
        ) from None
    return keys, values


def _layer_scales(entry: object) -> list[float]:
    items = [entry] if isinstance(entry, int | float) else entry
    if not isinstance(items, list) or not items:
        raise TypeError(f"{entry!r} is no number and no list of numbers")
    numbers = [number for item in items if (number := _positive_number(str(item))) is not None]
    if len(numbers) < len(items):
        raise ValueError(f"{entry!r} has an item that is no number above 0")
    return numbers


def _parse_scales(policy: str, text: str) -> ScaleTables:
    numbers = [_positive_number(part) for part in text.split("/")]
    keys, values = numbers[0], numbers[-1]
    if len(numbers) > 2 or keys is None or values is None:
        raise SpecError(f"policy {policy}: scales={text!r}, wanted a number above 0, or two as keys/values")
    return keys, values


def _positive_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
