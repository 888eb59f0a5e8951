"""OpenVINO GenAI: ``KV_CACHE_PRECISION`` and its kin, cache eviction, sparse prefill; by default it compresses (u8).

    start_size, recent_size, max_cache_size    its CacheEvictionConfig, with aggregation_mode and the like
    kvcrush_config.budget, ...                 the KVCrushConfig in it
    sparse_attention_config.mode, ...          its SparseAttentionConfig, which use_sparse_attention turns on

A checkpoint is converted once, by OpenVINO's own PyTorch frontend (``exports.openvino``), in the precision of float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvaudit.audit.engines.base import Drawer, Engine, Session, Settings, EngineContext
from kvaudit.audit.engines.weights import EngineCheckpoint, check_weights_fit, convert_checkpoint, configured_weights
from kvaudit.audit.engines.worker_client import WorkerSession, python_with
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import install_line

if TYPE_CHECKING:
    from kvaudit.audit.cache.engine_store import EngineStore

_HINT = "INFERENCE_PRECISION_HINT"
_IR = "openvino_model.xml"
_MODULES = ("openvino_genai",)
_APART = ("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION")
_SIZES = ("start_size", "recent_size", "max_cache_size")  # without which nothing is evicted
_EVICTION = (*_SIZES, "aggregation_mode", "apply_rotation", "snapkv_window_size")
_CRUSH = tuple(f"kvcrush_config.{name}" for name in ("budget", "anchor_point_mode", "rng_seed"))
_SPARSE = tuple(
    f"sparse_attention_config.{name}"
    for name in (
        *("mode", "num_last_dense_tokens_in_prefill", "num_retained_start_tokens_in_cache"),
        *("num_retained_recent_tokens_in_cache", "xattention_threshold", "xattention_block_size", "xattention_stride"),
    )
)
_SWITCH = "use_sparse_attention"
_DRAWING = ("openvino",)  # modules that rollouts need
_SCHEDULED = (
    *(*_EVICTION, _SWITCH, "max_num_batched_tokens", "dynamic_split_fuse", "num_kv_blocks", "max_num_seqs"),
    "enable_prefix_caching",
)
_CODED = ("u8", "u4")
_UNKNOWN_STORE = ("KEY_CACHE_GROUP_SIZE", "KEY_CACHE_QUANT_MODE", "KEY_CACHE_QUANT_ALG", "VALUE_CACHE_QUANT_ALG")
_PRECISIONS = ("u8", "u4", "f16", "bf16", "f32")  # that --kv knows


class OpenVino(Engine):
    """OpenVINO GenAI's continuous batching on a CPU."""

    name = "openvino"
    says = (
        "OpenVINO GenAI: KV_CACHE_PRECISION (u8 by default), KEY_ and VALUE_CACHE_PRECISION, KEY_CACHE_QUANT_MODE, "
        "start_size recent_size max_cache_size (eviction), kvcrush_config.budget, sparse_attention_config.mode"
    )
    install = install_line("openvino")
    compresses: ClassVar = {
        **dict.fromkeys(("KV_CACHE_PRECISION", *_APART), ("f32", "bf16", "f16")),
        **dict.fromkeys(("KEY_CACHE_GROUP_SIZE", "VALUE_CACHE_GROUP_SIZE", "KEY_CACHE_QUANT_MODE"), ()),
        **dict.fromkeys((*_EVICTION, *_CRUSH, *_SPARSE), ()),
        _SWITCH: ("false",),
    }
    uncompressed: ClassVar[Settings] = {"KV_CACHE_PRECISION": "f32"}  # or whatever INFERENCE_PRECISION_HINT is
    # by itself the engine computes in whatever the processor has, and lets the cache grow, which with u4 breaks the
    # heap in release 2026.4.1; one of a given size, in GiB, does not
    always: ClassVar[Settings] = {"INFERENCE_PRECISION_HINT": "f32", "cache_size": "2"}
    keeps = "max_cache_size"

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """With the precision that the engine would choose by itself written out: u8, of keys or values alone too.

        Raises SpecError for settings of a part that is not turned on: the engine would take them and do nothing.
        """
        if any(name.startswith("sparse_attention_config.") for name in settings):
            # a setting of that part turns it on, unless it is said to be off
            settings = {_SWITCH: "true", **settings}
        _check_acting(settings)
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
    def start(cls, settings: Settings, work: EngineContext) -> Session:
        return cls._worker(settings, work, _MODULES, "openvino_inside.py")

    @classmethod
    def _worker(cls, settings: Settings, work: EngineContext, modules: tuple[str, ...], inside: str) -> WorkerSession:
        python = python_with(modules, work.part, cls.name, cls.install)
        weights = _weights(work)
        check_weights_fit(weights.path, cls.name)
        setup = {"folder": str(weights.path), "device": "CPU", "settings": dict(settings)}
        return WorkerSession(cls.name, inside, setup, work, python, weights)

    @classmethod
    def check_drawing(cls, settings: Settings) -> None:
        """See ``Engine.check_drawing``: the runtime is fed by us, so what is of GenAI's scheduler does nothing."""
        scheduled = [name for name in settings if name in _SCHEDULED or "_config." in name]
        if scheduled:
            raise SpecError(
                f"engine openvino draws rollouts without the scheduler of GenAI, which {scheduled[0]} is of; leave it "
                "out of train.rollouts"
            )

    @classmethod
    def drawer(cls, settings: Settings, work: EngineContext) -> Drawer:
        from kvaudit.audit.engines.rollouts import WorkerDrawer

        session = cls._worker(settings, work, _DRAWING, "openvino_rollouts_inside.py")
        return WorkerDrawer(session, cls.name, work, exact=settings.get(_HINT) == "f32")

    @classmethod
    def store(cls, settings: Settings) -> EngineStore | None:
        """See ``Engine.store``: keys by channel in blocks, values by token, as its CPU plugin codes them."""
        from kvaudit.audit.cache.engine_store import ByChannel, ByToken, EngineStore, Cast

        whole = settings.get("KV_CACHE_PRECISION", "")
        keys, values = (settings.get(name, whole) for name in _APART)
        exact = {"f32": None, "f16": Cast("float16")}
        group = settings.get("VALUE_CACHE_GROUP_SIZE", "0")
        known = {keys, values} <= {*_CODED, *exact} and group.isdigit()
        if not known or any(name in settings for name in _UNKNOWN_STORE):
            return None
        # u8 and u4 say their bits
        coded = ByToken(int(values[1:]), int(group)) if values in _CODED else exact[values]
        return EngineStore(ByChannel(int(keys[1:])) if keys in _CODED else exact[keys], coded)


def _check_acting(settings: Settings) -> None:
    """Raise SpecError for eviction without its sizes, KVCrush without a budget, sparse prefill that is off."""
    crush = [name for name in settings if name.startswith("kvcrush_config.")]
    sparse = [name for name in settings if name.startswith("sparse_attention_config.")]
    evicting = [name for name in settings if name in _EVICTION] + crush
    lacking = [name for name in _SIZES if name not in settings]
    if evicting and lacking:
        raise SpecError(f"engine openvino: {evicting[0]} wants {', '.join(_SIZES)} beside it; add {', '.join(lacking)}")
    if crush and settings.get(_CRUSH[0], "0") == "0":
        raise SpecError(f"engine openvino: {crush[0]} does nothing without a {_CRUSH[0]} above 0; name one, in blocks")
    if crush and settings.get("aggregation_mode") == "ADAPTIVE_RKV":
        raise SpecError(
            f"engine openvino: {crush[0]} does nothing under aggregation_mode ADAPTIVE_RKV; take one of them"
        )
    if sparse and settings[_SWITCH] == "false":
        raise SpecError(f"engine openvino: {sparse[0]} does nothing with {_SWITCH} false; leave that out")


def _weights(work: EngineContext) -> EngineCheckpoint:
    if named := configured_weights(work, "openvino", _IR, f"a folder that holds {_IR}"):
        return named
    from kvaudit.audit.engines.exports.openvino import OPENVINO_METHOD, export_openvino

    return convert_checkpoint("openvino", work.model, OPENVINO_METHOD, lambda folder: export_openvino(work.model.model, folder))
