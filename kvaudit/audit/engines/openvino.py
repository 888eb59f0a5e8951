"""OpenVINO GenAI: ``KV_CACHE_PRECISION`` (by default u8) and related properties, cache eviction, sparse prefill.

    start_size, recent_size, max_cache_size    CacheEvictionConfig, with aggregation_mode and others
    kvcrush_config.budget, ...                 KVCrushConfig, inside CacheEvictionConfig
    sparse_attention_config.mode, ...          SparseAttentionConfig, enabled by use_sparse_attention

A checkpoint is converted once, in float32, by OpenVINO's PyTorch frontend (``exports.openvino``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvaudit.audit.engines.base import Drawer, Engine, EngineContext, Session, Settings
from kvaudit.audit.engines.weights import EngineCheckpoint, check_weights_fit, configured_weights, convert_checkpoint
from kvaudit.audit.engines.worker_client import WorkerSession, python_with
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import install_command

if TYPE_CHECKING:
    from kvaudit.audit.cache.engine_store import EngineStore

_HINT = "INFERENCE_PRECISION_HINT"
_IR = "openvino_model.xml"
_PRECISION = "KV_CACHE_PRECISION"
_SEPARATE = ("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION")
_SIZES = ("start_size", "recent_size", "max_cache_size")  # all of them are required for eviction
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
_SCHEDULER = (
    *(*_EVICTION, _SWITCH, "max_num_batched_tokens", "dynamic_split_fuse", "num_kv_blocks", "max_num_seqs"),
    "enable_prefix_caching",
)
_CODED = ("u8", "u4")
_UNKNOWN_STORE = ("KEY_CACHE_GROUP_SIZE", "KEY_CACHE_QUANT_MODE", "KEY_CACHE_QUANT_ALG", "VALUE_CACHE_QUANT_ALG")
_KV_OPTION = ("u8", "u4", "f16", "bf16", "f32")  # values of --kv


class OpenVino(Engine):
    """OpenVINO GenAI's continuous batching on a CPU."""

    name = "openvino"
    says = (
        "OpenVINO GenAI: KV_CACHE_PRECISION (u8 by default), KEY_ and VALUE_CACHE_PRECISION, KEY_CACHE_QUANT_MODE, "
        "start_size recent_size max_cache_size (eviction), kvcrush_config.budget, sparse_attention_config.mode"
    )
    install = install_command("openvino")
    compresses: ClassVar = {
        **dict.fromkeys((_PRECISION, *_SEPARATE), ("f32", "bf16", "f16")),
        **dict.fromkeys(("KEY_CACHE_GROUP_SIZE", "VALUE_CACHE_GROUP_SIZE", "KEY_CACHE_QUANT_MODE"), ()),
        **dict.fromkeys((*_EVICTION, *_CRUSH, *_SPARSE), ()),
        _SWITCH: ("false",),
    }
    uncompressed: ClassVar[Settings] = {_PRECISION: "f32"}  # or INFERENCE_PRECISION_HINT, see ``reference``
    # the defaults depend on the processor; a growing cache corrupts memory with u4 in release 2026.4.1, one of a fixed
    # size (GiB) does not
    always: ClassVar[Settings] = {_HINT: "f32", "cache_size": "2"}
    keeps = "max_cache_size"

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """Return the settings with defaults filled in; the cache's default precision is u8.

        If a precision is set for keys only, values get the default, and the reverse. Raises SpecError for settings of
        a feature that is not enabled, since the engine would ignore them silently.
        """
        if any(name.startswith("sparse_attention_config.") for name in settings):
            # its settings enable sparse attention, unless it is disabled explicitly
            settings = {_SWITCH: "true", **settings}
        _check_effective(settings)
        if _PRECISION in settings:
            return super().filled(settings)
        names = _SEPARATE if set(_SEPARATE) & set(settings) else (_PRECISION,)
        return super().filled({**dict.fromkeys(names, "u8"), **settings})

    @classmethod
    def kv(cls, text: str) -> Settings:
        """Return the settings for a text such as ``u4`` (the whole cache) or ``u8/u4`` (keys/values)."""
        types = text.split("/")
        if len(types) > 2 or not all(name in _KV_OPTION for name in types):
            values = ", ".join(_KV_OPTION)
            raise SpecError(
                f"engine {cls.name}: --kv is {text[:80]!r}, expected {values}, or KEYS/VALUES such as u8/u4"
            )
        return {_PRECISION: text} if len(types) == 1 else dict(zip(_SEPARATE, types, strict=True))

    @classmethod
    def reference(cls, settings: Settings) -> Settings:
        """Return the settings of the uncompressed reference: a cache in the precision in which the model computes."""
        hint = settings.get(_HINT, "f32")
        return {**super().reference(settings), _PRECISION: hint if hint in cls.compresses[_PRECISION] else "f32"}

    @classmethod
    def check(cls, settings: Settings, spec: EngineSpec) -> None:  # noqa: ARG003
        """Raise SpecError if OpenVINO GenAI is not installed."""
        python_with(("openvino_genai",), spec, cls.name, cls.install)

    @classmethod
    def start(cls, settings: Settings, context: EngineContext) -> Session:
        return cls._worker(settings, context, "openvino_genai", "openvino_inside.py")

    @classmethod
    def _worker(cls, settings: Settings, context: EngineContext, module: str, inside: str) -> WorkerSession:
        python = python_with((module,), context.spec, cls.name, cls.install)
        weights = _weights(context)
        check_weights_fit(weights.path, cls.name)
        setup = {"folder": str(weights.path), "device": "CPU", "settings": dict(settings)}
        return WorkerSession(cls.name, inside, setup, context, python, weights)

    @classmethod
    def check_drawing(cls, settings: Settings) -> None:
        """Raise SpecError for settings of GenAI's scheduler, which training does not use."""
        scheduler = [name for name in settings if name in _SCHEDULER or "_config." in name]
        if scheduler:
            raise SpecError(
                f"engine openvino: {scheduler[0]} belongs to GenAI's scheduler, which training does not use; remove it "
                "from train.rollouts"
            )

    @classmethod
    def drawer(cls, settings: Settings, context: EngineContext) -> Drawer:
        from kvaudit.audit.engines.rollouts import WorkerDrawer

        session = cls._worker(settings, context, "openvino", "openvino_rollouts_inside.py")
        return WorkerDrawer(session, cls.name, context, exact=settings.get(_HINT) == "f32")

    @classmethod
    def store(cls, settings: Settings) -> EngineStore | None:
        """Return how OpenVINO's CPU plug-in rounds the keys and values in its cache; None if unknown.

        Keys have one scale per channel of a block of tokens, values one per token or per group of its channels.
        """
        from kvaudit.audit.cache.engine_store import ByChannel, ByToken, Cast, EngineStore

        whole = settings.get(_PRECISION, "")
        keys, values = (settings.get(name, whole) for name in _SEPARATE)
        casts = {"f32": None, "f16": Cast("float16")}
        group = settings.get("VALUE_CACHE_GROUP_SIZE", "0")
        if not {keys, values} <= {*_CODED, *casts} or not group.isdecimal():
            return None
        if any(name in settings for name in _UNKNOWN_STORE):
            return None
        # u8 and u4 name their bits
        stored_values = ByToken(int(values[1:]), int(group)) if values in _CODED else casts[values]
        return EngineStore(ByChannel(int(keys[1:])) if keys in _CODED else casts[keys], stored_values)


def _check_effective(settings: Settings) -> None:
    """Raise SpecError for settings that are incomplete or would have no effect.

    These are eviction without its sizes, KVCrush without a budget or combined with ADAPTIVE_RKV, and settings of sparse
    attention if it is switched off.
    """
    crush = [name for name in settings if name.startswith("kvcrush_config.")]
    sparse = [name for name in settings if name.startswith("sparse_attention_config.")]
    evicting = [name for name in settings if name in _EVICTION] + crush
    missing = [name for name in _SIZES if name not in settings]
    if evicting and missing:
        raise SpecError(f"engine openvino: {evicting[0]} requires {', '.join(_SIZES)}; add {', '.join(missing)}")
    if crush and settings.get(_CRUSH[0], "0") == "0":
        raise SpecError(f"engine openvino: {crush[0]} has no effect without a {_CRUSH[0]} above 0; set it, in blocks")
    if crush and settings.get("aggregation_mode") == "ADAPTIVE_RKV":
        raise SpecError(
            f"engine openvino: {crush[0]} has no effect with aggregation_mode ADAPTIVE_RKV; remove one of them"
        )
    if sparse and settings[_SWITCH] == "false":
        raise SpecError(f"engine openvino: {sparse[0]} has no effect with {_SWITCH} false; remove {_SWITCH}")


def _weights(context: EngineContext) -> EngineCheckpoint:
    if weights := configured_weights(context, "openvino", _IR, f"a folder that holds {_IR}"):
        return weights
    from kvaudit.audit.engines.exports.openvino import OPENVINO_METHOD, export_openvino

    network = context.model.model
    return convert_checkpoint(
        "openvino", context.model, OPENVINO_METHOD, lambda folder: export_openvino(network, folder)
    )
