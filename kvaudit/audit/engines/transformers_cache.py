"""transformers' own ``generate`` and its caches as an engine; ``cache: quantized`` takes ``QuantizedCache``'s options.

The first update of a quantised cache returns keys and values unquantised, so a prompt is read exactly, and
quantisation takes effect from the second token of an answer on. The newest entries, the residual, are quantised only
once the residual is full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from kvaudit.audit.engines.base import Engine, EngineContext, Session, Settings
from kvaudit.audit.engines.weights import convert_checkpoint
from kvaudit.audit.engines.worker_client import WorkerSession, python_with
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import install_command

_QUANTISER_SETTINGS = ("backend", "nbits", "axis_key", "axis_value", "q_group_size", "residual_length")
_BACKENDS = {"quanto": ("optimum.quanto",), "hqq": ("hqq",)}
_METHOD = "float32, save_pretrained 1"  # see ``convert_once``


class TransformersCache(Engine):
    """The engine that is transformers' own ``generate``, one batch at a time."""

    name = "transformers"
    says = "transformers: cache: static, quantized: backend (quanto hqq fp8), nbits, axis_key, axis_value, q_group_size"
    install = install_command("transformers-cache")
    compresses: ClassVar = {"cache": ("dynamic",), **dict.fromkeys(_QUANTISER_SETTINGS, ())}
    uncompressed: ClassVar[Settings] = {"cache": "dynamic"}
    always: ClassVar[Settings] = {"dtype": "float32", "attn_implementation": "sdpa"}

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """Return the settings with cache and backend filled in; raise SpecError for settings without effect."""
        quantiser = [name for name in _QUANTISER_SETTINGS if name in settings]
        cache = settings.get("cache", "quantized" if quantiser else "dynamic")
        if cache in ("dynamic", "static") and quantiser:
            raise SpecError(
                f"engine {cls.name}: {quantiser[0]} has no effect with cache {cache}; write cache: quantized"
            )
        defaults = {"cache": cache, **({"backend": "quanto"} if cache == "quantized" else {})}
        return super().filled({**defaults, **settings})

    @classmethod
    def kv(cls, text: str) -> Settings:
        """Return the settings of a quantised cache for "BACKEND-BITS", such as "quanto-4" or "hqq-2", or for "fp8"."""
        backend, _, bits = text.partition("-")
        if not backend or (bits and not bits.isdecimal()) or text.endswith("-"):
            raise SpecError(f"engine {cls.name}: --kv is {text[:80]!r}, expected BACKEND-BITS such as quanto-4, or fp8")
        return {"cache": "quantized", "backend": backend, **({"nbits": bits} if bits else {})}

    @classmethod
    def check(cls, settings: Settings, spec: EngineSpec) -> None:
        """Raise SpecError if transformers or the backend is not installed."""
        cls._python(settings, spec)

    @classmethod
    def start(cls, settings: Settings, context: EngineContext) -> Session:
        python = cls._python(settings, context.spec)
        if context.spec.weights is not None:
            raise SpecError("engines.transformers.weights is not supported: it reads the checkpoint itself; remove it")
        network = context.model.model
        weights = convert_checkpoint("transformers", context.model, _METHOD, lambda folder: _save(network, folder))
        device = context.model.device
        setup = {
            "folder": str(weights.path),
            "device": str(device) if device.type == "cuda" else "cpu",
            "settings": dict(settings),
        }
        return WorkerSession(cls.name, "transformers_inside.py", setup, context, python, weights)

    @classmethod
    def _python(cls, settings: Settings, spec: EngineSpec) -> str:
        modules = ("transformers", "torch", *_BACKENDS.get(settings.get("backend", ""), ()))
        return python_with(modules, spec, cls.name, cls.install)


def _save(network: Any, folder: Path) -> dict[str, str]:
    import torch
    import transformers

    state = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in network.state_dict().items()}
    network.save_pretrained(folder, state_dict=state)
    return {"transformers": transformers.__version__, "torch": torch.__version__}
