"""How every quantising policy codes, and when, written naively; see ``conform/rules.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import hadamard

from conform.rules import Array, Fields, Layer, codes


def fitting(fields: dict[str, Any]) -> dict[str, Any]:
    """Scales stand beside fixed ones only, which int8 must be given; what is coded on write leaves nothing exact."""
    needed = "0.05" if fields["name"] == "int8" else ""
    scales = "" if fields["scale"] == "token" else fields["scales"] or needed
    return {**fields, "scales": scales, "residual": 0 if fields["write"] else fields["residual"]}


SCALES = {"scale": ("token", "token", "head", "tensor"), "scales": ("", "0.05", "0.02/0.1"), "write": (False, True)}


@codes("int8", fitting=fitting, residual=(0, 0, 3, 8), **SCALES)
def int8(layer: Layer, policy: Fields) -> None:
    recode(layer, policy, 127.0, np.round)


@codes("fp8", fitting=fitting, residual=(0, 0, 3, 8), format=("e4m3", "e5m2"), **SCALES)
def fp8(layer: Layer, policy: Fields) -> None:
    numbers = FLOATS[policy["format"]]
    recode(layer, policy, numbers[-1], lambda x: nearest_float(x, numbers))


@codes(
    "q4_0",
    fitting=lambda fields: {**fields, "residual": 0 if fields["write"] else fields["residual"]},
    residual=(0, 0, 3, 8),
    group=(2, 4, 32),
    write=(False, True),
    rotate=(False, True),
)
def q4_0(layer: Layer, policy: Fields) -> None:
    """Each group of each token and head by itself: its number of largest magnitude is code 0, and -8 scales."""
    until = max(layer.keys_coded, layer.seen - policy["residual"])
    for entries in (*layer.keys, *layer.values):
        for j in range(layer.keys_coded, until):
            size = len(entries[j])
            mixing = hadamard(size) / size**0.5 if policy["rotate"] else np.eye(size)
            parts = np.split(mixing @ entries[j], max(1, size // policy["group"]))
            entries[j] = mixing.T @ np.concatenate([sixteen_steps(part) for part in parts])
    layer.keys_coded = until


def sixteen_steps(x: Array) -> Array:
    scale = -float(x[np.argmax(abs(x))]) / 8
    return x if scale == 0 else np.clip(np.floor(x / scale + 0.5), -8, 7) * scale


@codes("kivi", residual=(4, 8), group=(2, 4), bits=(2, 4))
def kivi(layer: Layer, policy: Fields) -> None:
    """Keys leave in whole residuals, per channel in runs of ``group``; values one by one, ``group`` channels each."""
    residual, group, steps = policy["residual"], policy["group"], 2 ** policy["bits"] - 1
    until = layer.keys_coded + (layer.seen - layer.keys_coded) // residual * residual
    for head in layer.heads:
        leaving = [j for j in layer.held[head] if layer.keys_coded <= j < until]
        for start in range(0, len(leaving), group):
            run = leaving[start : start + group]
            channels = np.array([layer.keys[head][j] for j in run]).T
            coded = np.array([asymmetric(channel, steps) for channel in channels]).T
            for j, key in zip(run, coded, strict=True):
                layer.keys[head][j] = key
        for j in range(layer.values_coded, max(layer.values_coded, layer.seen - residual)):
            parts = np.split(layer.values[head][j], max(1, len(layer.values[head][j]) // group))
            layer.values[head][j] = np.concatenate([asymmetric(part, steps) for part in parts])
    layer.keys_coded, layer.values_coded = until, max(layer.values_coded, layer.seen - residual)


def recode(layer: Layer, policy: Fields, largest: float, rounded: Callable[[Array], Array]) -> None:
    """Keys and values alike, each token and head by itself, all but the last ``residual``."""
    until = max(layer.keys_coded, layer.seen - policy["residual"])
    for table, fixed in ((layer.keys, fixed_scale(policy, 0)), (layer.values, fixed_scale(policy, -1))):
        for entries in table:
            for j in range(layer.keys_coded, until):
                scale = float(abs(entries[j]).max()) / largest if fixed is None else fixed
                if scale > 0:
                    entries[j] = rounded(np.clip(entries[j] / scale, -largest, largest)) * scale
    layer.keys_coded = until


def fixed_scale(policy: Fields, part: int) -> float | None:
    """The scale of keys (0) or values (-1) that is the same for every token; None where each token has its own."""
    return None if policy["scale"] == "token" else float((policy["scales"] or "1").split("/")[part])


def asymmetric(x: Array, steps: int) -> Array:
    """Evenly spaced codes from the smallest to the largest."""
    low, scale = float(x.min()), float(x.max() - x.min()) / steps
    return np.full_like(x, low) if scale == 0 else low + np.round((x - low) / scale) * scale


def eight_bit_floats(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """Every number from 0 to ``largest`` of a format, in order of its bits."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    small = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    usual = [(1 + m / steps) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for m in range(steps)]
    return [number for number in small + usual if number <= largest]


FLOATS = {"e4m3": eight_bit_floats(4, 3, 448.0), "e5m2": eight_bit_floats(5, 2, 57344.0)}


def nearest_float(x: Array, numbers: list[float]) -> Array:
    """The nearest number of a format, half way to the even one; a float64 passes through float32, as processors do."""
    rounded = []
    for value in x.astype(np.float32).astype(np.float64):
        at = int(np.searchsorted(numbers, abs(value)))
        below, above = numbers[max(at - 1, 0)], numbers[min(at, len(numbers) - 1)]
        up, down = above - abs(value), abs(value) - below
        takes_upper = up < down or (up == down and at % 2 == 0)
        rounded.append(np.copysign(above if takes_upper else below, value))
    return np.array(rounded)
