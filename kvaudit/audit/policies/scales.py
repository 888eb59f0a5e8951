"""Scales that a user gives to a quantiser: numbers in its spec, or a file of numbers by layer and head."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvaudit.core.errors import SpecError

_HASH_DIGITS = 12  # of a file's sha256 that stand in the policy's canonical string


class Scales(NamedTuple):
    """Of keys and of values: one number for the whole model, or by layer one number or one per KV head."""

    keys: float | list[list[float]]
    values: float | list[list[float]]

    def of(self, layer: int, part: int, heads: int) -> list[float]:
        """The scale of each KV head; part 0 is keys. Raises SpecError where the file does not reach so far."""
        table = self[part]
        if isinstance(table, float):
            return [table] * heads
        if layer >= len(table) or len(table[layer]) not in (1, heads):
            raise SpecError(
                f"scales: the file has {len(table)} layers, wanted one number or {heads} (KV heads) for layer {layer}"
            )
        return table[layer] * (heads // len(table[layer]))  # one number for the layer stands for every KV head


def pinned_scales(policy: str, text: str) -> str:
    """The same text, a file's name with its content's sha256: ``scales.json#1f2e3d4c5b6a``; SpecError if it changed."""
    if _number(text.partition("/")[0]) is not None:  # else a file's name, which may hold slashes too
        _numbers(policy, text)
        return text
    name, _, wanted = text.partition("#")
    try:
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()[:_HASH_DIGITS]
    except OSError as error:
        raise SpecError(
            f"policy {policy}: scales={text!r} is no number above 0, no two (keys/values) and no file to read "
            f"({error.strerror})"
        ) from None
    if wanted and wanted != digest:
        raise SpecError(f"policy {policy}: scales={name!r} has sha256 {digest}, the policy names {wanted}")
    # a file that cannot be read as scales ends here and not in the middle of a run
    read_scales(policy, f"{name}#{digest}")
    return f"{name}#{digest}"


@cache  # a file's text holds its sha256, so another content is another key
def read_scales(policy: str, text: str) -> Scales:
    """The scales of a pinned text."""
    if "#" not in text:
        return _numbers(policy, text)
    name = text.partition("#")[0]
    try:
        table = json.loads(Path(name).read_text(encoding="utf-8"))
        return Scales(*([_layer(entry) for entry in table[part]] for part in ("keys", "values")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"policy {policy}: scales={name!r} is not JSON of the form "
            f'{{"keys": [...], "values": [...]}}, by layer a number above 0 or a list of one per KV head ({error!r})'
        ) from None


def _layer(entry: object) -> list[float]:
    numbers = [entry] if isinstance(entry, int | float) else entry
    if not isinstance(numbers, list) or not numbers:
        raise TypeError(f"{entry!r} is no number and no list of numbers")
    found = [_number(str(number)) for number in numbers]
    if None in found:
        raise ValueError(f"{entry!r} holds what is no number above 0")
    return [number for number in found if number is not None]


def _numbers(policy: str, text: str) -> Scales:
    found = [_number(part) for part in text.split("/")]
    keys, values = found[0], found[-1]
    if len(found) > 2 or keys is None or values is None:
        raise SpecError(f"policy {policy}: scales={text!r}, wanted a number above 0, or two as keys/values")
    return Scales(keys, values)


def _number(text: str) -> float | None:
    """A finite number above 0, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
