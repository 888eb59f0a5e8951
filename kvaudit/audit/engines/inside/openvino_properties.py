"""The check that a device supports the OpenVINO properties (settings) in a spec, for serving and for rollouts."""

from __future__ import annotations

from typing import Any

import openvino as ov

_HINT = "INFERENCE_PRECISION_HINT"


def check_properties(core: Any, device: str, settings: dict[str, str]) -> None:
    """Raise ValueError for a property that the device does not have, and for a precision that it does not support."""
    # a device lists most of its properties; others, such as KEY_CACHE_QUANT_MODE, can only be tried out, which is
    # cheap with a model of one operation
    parameter = ov.opset13.parameter([1], ov.Type.f32)
    trial = ov.Model([ov.opset13.relu(parameter)], [parameter])
    for name in sorted(set(settings) - set(core.get_property(device, "SUPPORTED_PROPERTIES"))):
        try:
            core.compile_model(trial, device, {name: settings[name]})
        except RuntimeError as error:
            message = str(error).strip().splitlines()[-1]
            is_unknown = "Unsupported property" in message
            raise ValueError(f"device {device} has no property {name}" if is_unknown else message) from None
    _check_precisions(device, core.get_property(device, "OPTIMIZATION_CAPABILITIES"), settings)


def _check_precisions(device: str, capabilities: list[str], settings: dict[str, str]) -> None:
    """Raise ValueError for a precision that the device does not support.

    Without this check OpenVINO would silently compute in f32; with a cache in bf16 it would fail at the first prompt
    with an internal error.
    """
    required = {name: value for name, value in settings.items() if value == "bf16"}
    if settings.get(_HINT) == "f16":
        required[_HINT] = "f16"
    for name, value in required.items():
        if {"bf16": "BF16", "f16": "FP16"}[value] not in capabilities:
            raise ValueError(
                f"{name} is {value}, which device {device} does not support ({', '.join(capabilities)}); use f32"
            )
