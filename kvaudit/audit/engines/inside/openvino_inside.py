"""OpenVINO GenAI as a worker holds it: its continuous batching, token ids in and out, no template and no tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from kvaudit.audit.engines.inside.openvino_properties import check_properties

_SCHEDULER = ("cache_size", "max_num_batched_tokens", "dynamic_split_fuse", "num_kv_blocks", "enable_prefix_caching")
_EVICTION = ("start_size", "recent_size", "max_cache_size", "aggregation_mode", "apply_rotation", "snapkv_window_size")
_CRUSH, _SPARSE = "kvcrush_config", "sparse_attention_config"  # a setting of theirs is NAME.FIELD


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """The pipeline of a folder under the settings; what the engine does not know it says itself."""
    settings, device = dict(setup["settings"]), setup["device"]
    scheduler = genai.SchedulerConfig()
    # every request reads its whole prompt, so that none depends on another
    scheduler.max_num_seqs, scheduler.enable_prefix_caching = setup["at_once"], False
    for name in _SCHEDULER:
        if name in settings:
            setattr(scheduler, name, _number(settings.pop(name)))
    _set_eviction(scheduler, settings)
    _set_sparse_prefill(scheduler, settings)
    core = ov.Core()
    check_properties(core, device, settings)
    properties = {name: _number(value) for name, value in settings.items()}
    properties["INFERENCE_NUM_THREADS"] = setup["threads"]
    pipeline = genai.ContinuousBatchingPipeline(setup["folder"], scheduler, device, properties)
    description = {
        "version": f"openvino_genai {genai.__version__}, openvino {ov.get_version()}",
        "device": f"{device} ({core.get_property(device, 'FULL_DEVICE_NAME')})",
        **_scheduled(scheduler),
        **{name: str(value) for name, value in properties.items()},
    }
    return description, lambda rows: _answered(pipeline, rows)


def _set_eviction(scheduler: Any, settings: dict[str, str]) -> None:
    """Take the settings of the cache's eviction, KVCrush's among them, out of ``settings``."""
    eviction = {name: _number(settings.pop(name)) for name in _EVICTION if name in settings}
    crush = _taken(settings, _CRUSH)
    if not eviction and not crush:
        return
    if "aggregation_mode" in eviction:
        eviction["aggregation_mode"] = _member(
            "aggregation_mode", genai.AggregationMode, str(eviction["aggregation_mode"])
        )
    if crush:
        eviction[_CRUSH] = _filled(genai.KVCrushConfig(), _CRUSH, crush)
    scheduler.use_cache_eviction = True
    scheduler.cache_eviction_config = genai.CacheEvictionConfig(
        **{"aggregation_mode": genai.AggregationMode.NORM_SUM, **eviction}
    )


def _set_sparse_prefill(scheduler: Any, settings: dict[str, str]) -> None:
    """Take the settings of a sparse prefill out of ``settings``."""
    fields = _taken(settings, _SPARSE)
    if "use_sparse_attention" in settings:
        scheduler.use_sparse_attention = _number(settings.pop("use_sparse_attention"))
    if scheduler.use_sparse_attention:
        scheduler.sparse_attention_config = _filled(genai.SparseAttentionConfig(), _SPARSE, fields)


def _taken(settings: dict[str, str], part: str) -> dict[str, str]:
    """The fields of a configuration inside another, taken out of ``settings``."""
    names = [name for name in settings if name.startswith(f"{part}.")]
    return {name.removeprefix(f"{part}."): settings.pop(name) for name in names}


def _filled(config: Any, part: str, fields: dict[str, str]) -> Any:
    """A configuration of the engine's with other values; raises ValueError for a field or a value that it lacks."""
    known = _fields(config)
    for name, text in fields.items():
        if name not in known:
            raise ValueError(f"{part} has no {name}; openvino_genai's has {', '.join(known)}")
        kind = type(getattr(config, name))
        if hasattr(kind, "__members__"):
            value = _member(f"{part}.{name}", kind, text)
        else:
            value = float(text) if kind is float else _number(text)
        setattr(config, name, value)
    return config


def _member(name: str, kind: Any, text: str) -> Any:
    if text not in kind.__members__:
        raise ValueError(f"{name} {text!r}, openvino_genai has {', '.join(kind.__members__)}")
    return kind.__members__[text]


def _scheduled(scheduler: Any) -> dict[str, str]:
    """What the batching, the cache's size and its eviction come to, and how sparsely prompts are read."""
    names = ("max_num_seqs", "max_num_batched_tokens", "dynamic_split_fuse", "cache_size", "enable_prefix_caching")
    said = {"scheduler": ", ".join(f"{name} {getattr(scheduler, name)}" for name in names)}
    if not scheduler.use_cache_eviction:
        said["scheduler"] += ", eviction off"
    else:
        eviction = scheduler.cache_eviction_config
        own, _, crush = " ".join(eviction.to_string().split()).partition(" KVCrushConfig")
        said["eviction"] = own + (" }" if crush else "")
        if eviction.kvcrush_config.budget:
            said |= _read_back(_CRUSH, eviction.kvcrush_config)
    return said | (_read_back(_SPARSE, scheduler.sparse_attention_config) if scheduler.use_sparse_attention else {})


def _read_back(part: str, config: Any) -> dict[str, str]:
    """The fields of a configuration as the engine holds them, under the names by which they are set."""
    found = {name: getattr(config, name) for name in _fields(config)}
    return {f"{part}.{name}": str(getattr(value, "name", value)) for name, value in found.items()}


def _fields(config: Any) -> list[str]:
    return [name for name in dir(config) if not name.startswith("_") and name != "to_string"]


def _answered(pipeline: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    prompts = [ov.Tensor(np.array([row["ids"]], dtype=np.int64)) for row in rows]
    found = pipeline.generate(prompts, [_decoding(row) for row in rows])
    return [_reply(one, row) for one, row in zip(found, rows, strict=True)]


def _decoding(row: dict[str, Any]) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.stop_token_ids = row["most"], set(row["stops"])
    config.logprobs = 1  # or scores are not summed
    config.do_sample = row["temperature"] > 0
    if config.do_sample:
        config.temperature, config.top_p, config.rng_seed = row["temperature"], row["top_p"], row["seed"]
    return config


def _reply(found: Any, row: dict[str, Any]) -> dict[str, Any]:
    ids = list(found.m_generation_ids[0]) if found.m_generation_ids else []
    ended = bool(ids) and ids[-1] in row["stops"]
    if not ended and len(ids) < row["most"]:  # a prompt that does not fit the cache is dropped without a word
        raise RuntimeError(
            f"an answer ended after {len(ids)} of {row['most']} tokens without an end; the prompt has "
            f"{len(row['ids'])}: a larger cache_size may hold it"
        )
    return {"ids": ids, "finish": "stop" if ended else "length", "logprob": found.m_scores[0]}


def _number(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return text
