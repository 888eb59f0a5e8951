"""llama.cpp by llama-cpp-python: ``type_k`` and ``type_v`` of its KV cache, in the names that its own tools have.

A run's GGUF file is served as it is; any other checkpoint is written as one once (``exports.llama_cpp``).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvaudit.audit.engines.base import Engine, Session, Settings, Work
from kvaudit.audit.engines.weights import ServedWeights, check_room, converted, named_weights
from kvaudit.audit.engines.worked import WorkedSession, python_with, vocabulary_of
from kvaudit.audit.sampling.gguf_header import check_gguf
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec

_UNCOMPRESSED = ("f32", "f16", "bf16")
_MODULES = ("llama_cpp",)


class LlamaCpp(Engine):
    """llama.cpp, several sequences at once."""

    name = "llama.cpp"
    says = "llama.cpp: type_k and type_v, f16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl and wider; LLAMA_ATTN_ROT_DISABLE"
    install = "pip install 'kvaudit[llama-cpp]'"
    compresses: ClassVar = {"type_k": _UNCOMPRESSED, "type_v": _UNCOMPRESSED}
    uncompressed: ClassVar[Settings] = {"type_k": "f16", "type_v": "f16"}
    # V is coded under flash attention alone, so the reference too has it, and the types are all that differs
    always: ClassVar[Settings] = {"flash_attn": "true", "type_k": "f16", "type_v": "f16"}

    @classmethod
    def kv(cls, text: str) -> Settings:
        """``q8_0`` for keys and values, ``q8_0/q4_0`` for either; the types are held to the engine's when it starts."""
        keys, _, values = text.partition("/")
        if not keys or "/" in values or text.endswith("/"):
            raise SpecError(
                f"engine {cls.name}: --kv is {text[:80]!r}, wanted a type, or KEYS/VALUES such as q8_0/q4_0"
            )
        return {"type_k": keys, "type_v": values or keys}

    @classmethod
    def check(cls, settings: Settings, part: EngineSpec) -> None:  # noqa: ARG003
        """Raise SpecError where it is not installed."""
        python_with(_MODULES, part, cls.name, cls.install)

    @classmethod
    def start(cls, settings: Settings, work: Work) -> Session:
        python = python_with(_MODULES, work.part, cls.name, cls.install)
        weights = _weights(work)
        check_room(weights.path, cls.name)
        setup = {"file": str(weights.path), "vocabulary": vocabulary_of(work), "settings": dict(settings)}
        return WorkedSession(cls.name, "llama_cpp_inside.py", setup, work, python, weights.origin)


def _weights(work: Work) -> ServedWeights:
    if named := named_weights(work, "llama.cpp", "", "a GGUF file"):
        check_gguf(named.path)
        return named
    if work.model.name.endswith(".gguf"):
        return ServedWeights(Path(work.model.name).expanduser(), "the file of the model, as it is")
    from kvaudit.audit.engines.exports.llama_cpp import GGUF_FILE, WRITTEN, export_gguf

    found = converted("gguf", work.model.sha256, WRITTEN, lambda folder: export_gguf(work.model.model, folder))
    return found._replace(path=found.path / GGUF_FILE)
