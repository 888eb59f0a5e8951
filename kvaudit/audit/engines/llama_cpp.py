"""llama.cpp by llama-cpp-python; ``type_k`` and ``type_v`` are its KV cache's types, named as in its own tools.

A GGUF file that a run names as its model is served unchanged. Any other checkpoint is converted to GGUF once
(``exports.llama_cpp``); in training, the learner's weights are converted in every step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvaudit.audit.engines.base import Drawer, Engine, EngineContext, Session, Settings
from kvaudit.audit.engines.rollouts import WorkerDrawer
from kvaudit.audit.engines.weights import EngineCheckpoint, check_weights_fit, configured_weights, convert_checkpoint
from kvaudit.audit.engines.worker_client import WorkerSession, python_with, vocabulary_size
from kvaudit.audit.sampling.weights import check_gguf
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import install_command

if TYPE_CHECKING:
    from torch import Tensor

    from kvaudit.audit.cache.engine_store import EngineStore

_UNCOMPRESSED = ("f32", "f16", "bf16")
_MODULES = ("llama_cpp",)


class LlamaCpp(Engine):
    """llama.cpp through llama-cpp-python, with several sequences at once."""

    name = "llama.cpp"
    says = "llama.cpp: type_k and type_v, f16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl and wider; LLAMA_ATTN_ROT_DISABLE"
    install = install_command("llama-cpp")
    compresses: ClassVar = {"type_k": _UNCOMPRESSED, "type_v": _UNCOMPRESSED}
    uncompressed: ClassVar[Settings] = {"type_k": "f16", "type_v": "f16"}
    # values are quantised under flash attention only; the reference has it too, so that only the types differ
    always: ClassVar[Settings] = {"flash_attn": "true", "type_k": "f16", "type_v": "f16"}

    @classmethod
    def kv(cls, text: str) -> Settings:
        """Return the settings for a text such as ``q8_0`` (the whole cache) or ``q8_0/q4_0`` (keys/values).

        Whether llama.cpp has such types is not checked.
        """
        keys, _, values = text.partition("/")
        if not keys or "/" in values or text.endswith("/"):
            raise SpecError(
                f"engine {cls.name}: --kv is {text[:80]!r}, expected a type, or KEYS/VALUES such as q8_0/q4_0"
            )
        return {"type_k": keys, "type_v": values or keys}

    @classmethod
    def check(cls, settings: Settings, spec: EngineSpec) -> None:  # noqa: ARG003
        """Raise SpecError if llama-cpp-python is not installed."""
        python_with(_MODULES, spec, cls.name, cls.install)

    @classmethod
    def start(cls, settings: Settings, context: EngineContext) -> Session:
        return cls._worker(settings, context, _weights(context))

    @classmethod
    def _worker(cls, settings: Settings, context: EngineContext, weights: EngineCheckpoint) -> WorkerSession:
        python = python_with(_MODULES, context.spec, cls.name, cls.install)
        check_weights_fit(weights.path, cls.name)
        setup = {"file": str(weights.path), "vocabulary": vocabulary_size(context), "settings": dict(settings)}
        return WorkerSession(cls.name, "llama_cpp_inside.py", setup, context, python, weights)

    @classmethod
    def check_drawing(cls, settings: Settings) -> None:
        """Accept all settings, since rollouts can be sampled under any of them."""

    @classmethod
    def store(cls, settings: Settings) -> EngineStore | None:  # noqa: ARG003
        """Return a store that is marked ``shown``: training need not round keys and values itself.

        It reads them, already rounded, out of llama.cpp's own cache. llama.cpp also rounds queries; training does not
        imitate that.
        """
        from kvaudit.audit.cache.engine_store import EngineStore

        return EngineStore(None, None, shown=True)

    @classmethod
    def drawer(cls, settings: Settings, context: EngineContext) -> Drawer:
        """Start the engine for sampling rollouts.

        Raises SpecError if the spec names a GGUF file, since its weights cannot follow the learner's.
        """
        if context.spec.weights is not None:
            raise SpecError(
                "engines.llama.cpp.weights cannot be used for training rollouts, which need the learner's weights; "
                "remove it"
            )
        return _GgufDrawer(cls._worker(settings, context, _export(context)), context)


class _GgufDrawer(WorkerDrawer):
    """A drawer (engine that samples training rollouts) that loads the weights of every step as a GGUF file.

    Keys and values are read out of llama.cpp's cache.
    """

    def __init__(self, session: WorkerSession, context: EngineContext) -> None:
        from kvaudit.audit.engines.exports.llama_cpp import cache_layout

        self._model = context.model.model
        keys_rotated, values_rotated = (session.described.get(f"{name} rotated") == "1" for name in ("K", "V"))
        self._layout = cache_layout(self._model.config, keys_rotated=keys_rotated, values_rotated=values_rotated)
        super().__init__(session, LlamaCpp.name, context, exact=False)

    def _keys_and_values(self, file: Mapping[str, Any], row: int) -> tuple[Tensor, Tensor]:
        from kvaudit.audit.engines.exports.llama_cpp import read_state

        return read_state(file[f"{row}.state"], self._layout)

    def _write(self, weights: Mapping[str, Tensor]) -> tuple[Path, str]:
        from kvaudit.audit.engines.exports.llama_cpp import GGUF_FILE, export_gguf

        path = self._exchange.path / GGUF_FILE
        export_gguf(self._model, path.parent, weights)
        with path.open("rb") as file:
            return path, hashlib.file_digest(file, "sha256").hexdigest()


def _weights(context: EngineContext) -> EngineCheckpoint:
    if weights := configured_weights(context, "llama.cpp", "", "a GGUF file"):
        check_gguf(weights.path)
        return weights
    if context.model.name.endswith(".gguf"):
        return EngineCheckpoint(Path(context.model.name).expanduser(), "the file of the model, as it is")
    return _export(context)


def _export(context: EngineContext) -> EngineCheckpoint:
    from kvaudit.audit.engines.exports.llama_cpp import GGUF_FILE, GGUF_METHOD, export_gguf

    network = context.model.model
    weights = convert_checkpoint("gguf", context.model, GGUF_METHOD, lambda folder: export_gguf(network, folder))
    return weights._replace(path=weights.path / GGUF_FILE)
