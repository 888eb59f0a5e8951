"""llama.cpp by llama-cpp-python: ``type_k`` and ``type_v`` of its KV cache, in the names that its own tools have.

A run's GGUF file is served as it is; any other checkpoint is written as one once (``exports.llama_cpp``), and what a
learner has is written as one in every step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvaudit.audit.engines.base import Drawer, Engine, Session, Settings, EngineContext
from kvaudit.audit.engines.rollouts import WorkerDrawer
from kvaudit.audit.engines.weights import EngineCheckpoint, check_weights_fit, convert_checkpoint, configured_weights
from kvaudit.audit.engines.worker_client import WorkerSession, python_with, vocabulary_size
from kvaudit.audit.sampling.weights import check_gguf
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import install_line

if TYPE_CHECKING:
    from torch import Tensor

    from kvaudit.audit.cache.engine_store import EngineStore

_UNCOMPRESSED = ("f32", "f16", "bf16")
_MODULES = ("llama_cpp",)


class LlamaCpp(Engine):
    """llama.cpp, several sequences at once."""

    name = "llama.cpp"
    says = "llama.cpp: type_k and type_v, f16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl and wider; LLAMA_ATTN_ROT_DISABLE"
    install = install_line("llama-cpp")
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
    def start(cls, settings: Settings, work: EngineContext) -> Session:
        return cls._worker(settings, work, _weights(work))

    @classmethod
    def _worker(cls, settings: Settings, work: EngineContext, weights: EngineCheckpoint) -> WorkerSession:
        python = python_with(_MODULES, work.part, cls.name, cls.install)
        check_weights_fit(weights.path, cls.name)
        setup = {"file": str(weights.path), "vocabulary": vocabulary_size(work), "settings": dict(settings)}
        return WorkerSession(cls.name, "llama_cpp_inside.py", setup, work, python, weights)

    @classmethod
    def check_drawing(cls, settings: Settings) -> None:
        """See ``Engine.check_drawing``: whatever its context can be told."""

    @classmethod
    def store(cls, settings: Settings) -> EngineStore | None:  # noqa: ARG003
        """See ``Engine.store``: its cache is read out. That it codes queries too is not replayed."""
        from kvaudit.audit.cache.engine_store import EngineStore

        return EngineStore(None, None, shown=True)

    @classmethod
    def drawer(cls, settings: Settings, work: EngineContext) -> Drawer:
        """See ``Engine.drawer``; raises SpecError for a file that is named, which training would not change."""
        if work.part.weights is not None:
            raise SpecError(
                "engine llama.cpp draws by the learner's weights, which are written for it in every step; leave "
                "engines.llama.cpp.weights out"
            )
        return _GgufDrawer(cls._worker(settings, work, _exported(work)), work)


class _GgufDrawer(WorkerDrawer):
    """llama.cpp, which loads a file of weights in every step, and shows what its queries read."""

    def __init__(self, session: WorkerSession, work: EngineContext) -> None:
        from kvaudit.audit.engines.exports.llama_cpp import head_layout
        from kvaudit.audit.engines.exports.llama_cpp import HeadLayout

        self._model = work.model.model
        turned = {name: session.described.get(f"{name} rotated") == "1" for name in ("K", "V")}
        self._layout = HeadLayout(*head_layout(self._model.config), turned["K"], turned["V"])
        super().__init__(session, LlamaCpp.name, work, exact=False)

    def _kept(self, file: Mapping[str, Any], row: int) -> tuple[Tensor, Tensor]:
        from kvaudit.audit.engines.exports.llama_cpp import read_state

        return read_state(file[f"{row}.state"], self._layout)

    def _written(self, weights: Mapping[str, Tensor]) -> tuple[Path, str]:
        from kvaudit.audit.engines.exports.llama_cpp import GGUF_FILE, export_gguf

        path = self._handover.path / GGUF_FILE
        export_gguf(self._model, path.parent, weights)
        with path.open("rb") as file:
            return path, hashlib.file_digest(file, "sha256").hexdigest()


def _weights(work: EngineContext) -> EngineCheckpoint:
    if named := configured_weights(work, "llama.cpp", "", "a GGUF file"):
        check_gguf(named.path)
        return named
    if work.model.name.endswith(".gguf"):
        return EngineCheckpoint(Path(work.model.name).expanduser(), "the file of the model, as it is")
    return _exported(work)


def _exported(work: EngineContext) -> EngineCheckpoint:
    from kvaudit.audit.engines.exports.llama_cpp import GGUF_FILE, GGUF_METHOD, export_gguf

    found = convert_checkpoint("gguf", work.model, GGUF_METHOD, lambda folder: export_gguf(work.model.model, folder))
    return found._replace(path=found.path / GGUF_FILE)
