"""Which properties an OpenVINO device takes: one rule for what it serves and for what it draws."""

from __future__ import annotations

from typing import Any

import openvino as ov

_HINT = "INFERENCE_PRECISION_HINT"


def check_properties(core: Any, device: str, settings: dict[str, str]) -> None:
    """Raise ValueError for a property that the device does not take, and for a precision that it lacks."""
    _check_known(core, device, settings)
    _check_computes(device, core.get_property(device, "OPTIMIZATION_CAPABILITIES"), settings)


def _check_known(core: Any, device: str, settings: dict[str, str]) -> None:
    """Raise ValueError for what the device does not take.

    It lists most of its properties; others, such as KEY_CACHE_QUANT_MODE, it only takes, and checks: it is given them
    with a model of one operation, for which that costs nothing.
    """
    nothing = ov.opset13.parameter([1], ov.Type.f32)
    trial = ov.Model([ov.opset13.relu(nothing)], [nothing])
    for name in sorted(set(settings) - set(core.get_property(device, "SUPPORTED_PROPERTIES"))):
        try:
            core.compile_model(trial, device, {name: settings[name]})
        except RuntimeError as error:
            said = str(error).strip().splitlines()[-1]
            unknown = "Unsupported property" in said
            raise ValueError(f"device {device} has no property {name}" if unknown else said) from None


def _check_computes(device: str, computes: list[str], settings: dict[str, str]) -> None:
    """Raise ValueError for a precision that the device lacks.

    It would compute in f32 and not say so; a cache in bf16 fails at the first prompt with a line of its source.
    """
    asked = {name: value for name, value in settings.items() if value == "bf16"}
    if settings.get(_HINT) == "f16":
        asked[_HINT] = "f16"
    for name, value in asked.items():
        if {"bf16": "BF16", "f16": "FP16"}[value] not in computes:
            raise ValueError(
                f"{name} is {value}, which device {device} does not compute in here ({', '.join(computes)}); take f32"
            )
