"""OpenVINO GenAI: ``KV_CACHE_PRECISION`` and its kin, cache eviction; its default is a compressed cache (u8).

A checkpoint is converted once, by OpenVINO's own PyTorch frontend (``openvino_export``), in the precision of float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvaudit.audit.engines.base import Engine, Session, Settings, Work
from kvaudit.audit.engines.weights import check_room, converted
from kvaudit.audit.engines.worked import WorkedSession, python_with
from kvaudit.core.errors import SpecError
from kvaudit.core.grid import EngineSpec
from kvaudit.core.spec import expand

_IR = "openvino_model.xml"
_MODULES = ("openvino_genai",)
_APART = ("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION")
_PRECISIONS = ("u8", "u4", "f16", "bf16", "f32")  # that --kv knows


class OpenVino(Engine):
    """OpenVINO GenAI's continuous batching on a CPU."""

    name = "openvino"
    about = "OpenVINO GenAI: KV_CACHE_PRECISION (u8 by default), KEY_ and VALUE_CACHE_PRECISION, cache eviction"
    install = "pip install 'kvaudit[openvino]'"
    compresses: ClassVar = {
        **dict.fromkeys(("KV_CACHE_PRECISION", *_APART), ("f32", "bf16", "f16")),
        **dict.fromkeys(("KEY_CACHE_GROUP_SIZE", "VALUE_CACHE_GROUP_SIZE", "KEY_CACHE_QUANT_MODE"), ()),
        **dict.fromkeys(("start_size", "recent_size", "max_cache_size", "aggregation_mode"), ()),
        **dict.fromkeys(("apply_rotation", "snapkv_window_size"), ()),
    }
    uncompressed: ClassVar[Settings] = {"KV_CACHE_PRECISION": "f32"}  # or whatever INFERENCE_PRECISION_HINT is
    # by itself the engine computes in whatever the processor has, and lets the cache grow, which with u4 breaks the
    # heap in release 2026.4.1; one of a given size, in GiB, does not
    always: ClassVar[Settings] = {"INFERENCE_PRECISION_HINT": "f32", "cache_size": "2"}

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """With the precision that the engine would choose by itself written out: u8, of keys or values alone too."""
        if "KV_CACHE_PRECISION" in settings:
            return super().filled(settings)
        named = _APART if set(_APART) & set(settings) else ("KV_CACHE_PRECISION",)
        return super().filled({**dict.fromkeys(named, "u8"), **settings})

    @classmethod
    def kv(cls, text: str) -> Settings:
        """``u4`` for the whole cache, ``u8/u4`` for keys and values apart."""
        words = text.split("/")
        if len(words) > 2 or not all(word in _PRECISIONS for word in words):
            known = ", ".join(_PRECISIONS)
            raise SpecError(f"engine {cls.name}: --kv is {text[:80]!r}, wanted {known}, or KEYS/VALUES such as u8/u4")
        if len(words) == 1:
            return {"KV_CACHE_PRECISION": text}
        return {"KEY_CACHE_PRECISION": words[0], "VALUE_CACHE_PRECISION": words[1]}

    @classmethod
    def reference(cls, settings: Settings) -> Settings:
        """The cache in the precision in which the engine computes."""
        hint = settings.get("INFERENCE_PRECISION_HINT", "f32")
        hint = hint if hint in cls.compresses["KV_CACHE_PRECISION"] else "f32"
        return {**super().reference(settings), "KV_CACHE_PRECISION": hint}

    @classmethod
    def check(cls, settings: Settings, part: EngineSpec) -> None:  # noqa: ARG003
        """Raise SpecError where it is not installed."""
        python_with(_MODULES, part, cls.name, cls.install)

    @classmethod
    def start(cls, settings: Settings, work: Work) -> Session:
        """See ``Engine.start``."""
        python = python_with(_MODULES, work.part, cls.name, cls.install)
        folder, source = _folder(work)
        check_room(folder, cls.name)
        told = {"folder": str(folder), "device": "CPU", "settings": dict(settings)}
        session = WorkedSession(cls.name, "openvino_inside.py", told, work, python)
        session.about = {**session.about, "weights": source}
        return session


def _folder(work: Work) -> tuple[Path, str]:
    """Where the weights lie in OpenVINO's format, and where they came from in words."""
    if work.part.weights is not None:
        folder = Path(expand("engines.openvino.weights", work.part.weights)).expanduser()
        if not (folder / _IR).is_file():
            raise SpecError(f"engines.openvino.weights is {str(folder)!r}, wanted a folder that holds {_IR}")
        return folder, f"{folder}, not converted here"
    from kvaudit.audit.engines.openvino_export import TRACED, export_openvino

    found = converted("openvino", work.model.sha256, TRACED, lambda folder: export_openvino(work.model.model, folder))
    return found.folder, found.words
