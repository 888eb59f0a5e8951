"""transformers' own caches under its own ``generate``: ``cache: quantized`` with the names of ``QuantizedCache``.

Its first update returns keys and values as they came, so a prompt is read uncoded and the code is met from the second
token of an answer on; and what stays in the residual is not coded before it is full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from kvaudit.audit.engines.base import Engine, Session, Settings, EngineContext
from kvaudit.audit.engines.weights import convert_checkpoint
from kvaudit.audit.engines.worker_client import WorkerSession, python_with
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import install_line

_OF_A_CODE = ("backend", "nbits", "axis_key", "axis_value", "q_group_size", "residual_length")
_BACKENDS = {"quanto": ("optimum.quanto",), "hqq": ("hqq",)}
_SAVED = "float32, save_pretrained 1"  # by which conversions are told apart


class TransformersCache(Engine):
    """Stock transformers, a batch at a time."""

    name = "transformers"
    says = "transformers: cache: static, quantized: backend (quanto hqq fp8), nbits, axis_key, axis_value, q_group_size"
    install = install_line("transformers-cache")
    compresses: ClassVar = {"cache": ("dynamic",), **dict.fromkeys(_OF_A_CODE, ())}
    uncompressed: ClassVar[Settings] = {"cache": "dynamic"}
    always: ClassVar[Settings] = {"dtype": "float32", "attn_implementation": "sdpa"}

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """With the cache, and the backend of one that is quantized, written out; raises SpecError for idle settings."""
        coded = [name for name in _OF_A_CODE if name in settings]
        cache = settings.get("cache", "quantized" if coded else "dynamic")
        if cache in ("dynamic", "static") and coded:
            raise SpecError(f"engine {cls.name}: {coded[0]} does nothing with cache {cache}; write cache: quantized")
        named = {"cache": cache, **({"backend": "quanto"} if cache == "quantized" else {})}
        return super().filled({**named, **settings})

    @classmethod
    def kv(cls, text: str) -> Settings:
        """``BACKEND-BITS``, such as quanto-4 or hqq-2, or fp8."""
        backend, _, bits = text.partition("-")
        if not backend or (bits and not bits.isdigit()) or text.endswith("-"):
            raise SpecError(f"engine {cls.name}: --kv is {text[:80]!r}, wanted BACKEND-BITS such as quanto-4, or fp8")
        return {"cache": "quantized", "backend": backend, **({"nbits": bits} if bits else {})}

    @classmethod
    def check(cls, settings: Settings, part: EngineSpec) -> None:
        """Raise SpecError where transformers or the backend is not installed."""
        python_with(cls._modules(settings), part, cls.name, cls.install)

    @classmethod
    def start(cls, settings: Settings, work: EngineContext) -> Session:
        python = python_with(cls._modules(settings), work.part, cls.name, cls.install)
        if work.part.weights is not None:
            raise SpecError("engines.transformers.weights: it reads the checkpoint itself; leave it out")
        weights = convert_checkpoint("transformers", work.model, _SAVED, lambda folder: _save(work.model.model, folder))
        device = work.model.device
        where = str(device) if device.type == "cuda" else "cpu"
        setup = {"folder": str(weights.path), "device": where, "settings": dict(settings)}
        return WorkerSession(cls.name, "transformers_inside.py", setup, work, python, weights)

    @classmethod
    def _modules(cls, settings: Settings) -> tuple[str, ...]:
        return ("transformers", "torch", *_BACKENDS.get(settings.get("backend", ""), ()))


def _save(model: Any, folder: Path) -> dict[str, str]:
    import torch
    import transformers

    state = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    return {"transformers": transformers.__version__, "torch": torch.__version__}
