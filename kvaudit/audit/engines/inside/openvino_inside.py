"""OpenVINO GenAI in a worker process: its continuous batching with token ids, without template or tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from kvaudit.audit.engines.inside.openvino_properties import check_properties

_SCHEDULER = ("cache_size", "max_num_batched_tokens", "dynamic_split_fuse", "num_kv_blocks", "enable_prefix_caching")
_EVICTION = ("start_size", "recent_size", "max_cache_size", "aggregation_mode", "apply_rotation", "snapkv_window_size")
_CRUSH, _SPARSE = "kvcrush_config", "sparse_attention_config"  # their settings are NAME.FIELD


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """Start the pipeline of a model folder; return its description and a function that answers requests (rows).

    Raises ValueError for a setting that the engine does not know; the message names it.
    """
    settings, device = dict(setup["settings"]), setup["device"]
    scheduler = genai.SchedulerConfig()
    # without prefix cache each request reads its whole prompt and depends on no other request
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
        **_describe(scheduler),
        **{name: str(value) for name, value in properties.items()},
    }
    return description, lambda rows: _answer(pipeline, rows)


def _set_eviction(scheduler: Any, settings: dict[str, str]) -> None:
    """Move the settings of cache eviction, including KVCrush, from ``settings`` to the scheduler."""
    eviction = {name: _number(settings.pop(name)) for name in _EVICTION if name in settings}
    crush = _pop_fields(settings, _CRUSH)
    if not eviction and not crush:
        return
    mode = str(eviction.pop("aggregation_mode", "NORM_SUM"))
    eviction["aggregation_mode"] = _member("aggregation_mode", genai.AggregationMode, mode)
    if crush:
        eviction[_CRUSH] = _with_fields(genai.KVCrushConfig(), _CRUSH, crush)
    scheduler.use_cache_eviction = True
    scheduler.cache_eviction_config = genai.CacheEvictionConfig(**eviction)


def _set_sparse_prefill(scheduler: Any, settings: dict[str, str]) -> None:
    fields = _pop_fields(settings, _SPARSE)
    if "use_sparse_attention" in settings:
        scheduler.use_sparse_attention = _number(settings.pop("use_sparse_attention"))
    if scheduler.use_sparse_attention:
        scheduler.sparse_attention_config = _with_fields(genai.SparseAttentionConfig(), _SPARSE, fields)


def _pop_fields(settings: dict[str, str], prefix: str) -> dict[str, str]:
    names = [name for name in settings if name.startswith(f"{prefix}.")]
    return {name.removeprefix(f"{prefix}."): settings.pop(name) for name in names}


def _with_fields(config: Any, prefix: str, fields: dict[str, str]) -> Any:
    """Return ``config`` with ``fields`` set; raise ValueError for an unknown field or value.

    The message names the field after ``prefix``, such as "kvcrush_config".
    """
    names = _field_names(config)
    for name, text in fields.items():
        if name not in names:
            raise ValueError(f"{prefix} has no {name}; openvino_genai's has {', '.join(names)}")
        kind = type(getattr(config, name))
        if hasattr(kind, "__members__"):
            value = _member(f"{prefix}.{name}", kind, text)
        else:
            value = float(text) if kind is float else _number(text)
        setattr(config, name, value)
    return config


def _member(name: str, enum: Any, text: str) -> Any:
    if text not in enum.__members__:
        raise ValueError(f"{name} {text!r}, openvino_genai has {', '.join(enum.__members__)}")
    return enum.__members__[text]


def _describe(scheduler: Any) -> dict[str, str]:
    names = ("max_num_seqs", "max_num_batched_tokens", "dynamic_split_fuse", "cache_size", "enable_prefix_caching")
    facts = {"scheduler": ", ".join(f"{name} {getattr(scheduler, name)}" for name in names)}
    if not scheduler.use_cache_eviction:
        facts["scheduler"] += ", eviction off"
    else:
        eviction = scheduler.cache_eviction_config
        text, _, crush = " ".join(eviction.to_string().split()).partition(" KVCrushConfig")
        facts["eviction"] = text + (" }" if crush else "")
        if eviction.kvcrush_config.budget:
            facts |= _read_fields(_CRUSH, eviction.kvcrush_config)
    return facts | (_read_fields(_SPARSE, scheduler.sparse_attention_config) if scheduler.use_sparse_attention else {})


def _read_fields(prefix: str, config: Any) -> dict[str, str]:
    values = {name: getattr(config, name) for name in _field_names(config)}
    return {f"{prefix}.{name}": str(getattr(value, "name", value)) for name, value in values.items()}


def _field_names(config: Any) -> list[str]:
    return [name for name in dir(config) if not name.startswith("_") and name != "to_string"]


def _answer(pipeline: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    prompts = [ov.Tensor(np.array([row["ids"]], dtype=np.int64)) for row in rows]
    results = pipeline.generate(prompts, [_generation_config(row) for row in rows])
    return [_reply(result, row) for result, row in zip(results, rows, strict=True)]


def _generation_config(row: dict[str, Any]) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.stop_token_ids = row["max_tokens"], set(row["stops"])
    config.logprobs = 1  # otherwise m_scores is not the sum of log-probs
    config.do_sample = row["temperature"] > 0
    if config.do_sample:
        config.temperature, config.top_p, config.rng_seed = row["temperature"], row["top_p"], row["seed"]
    return config


def _reply(result: Any, row: dict[str, Any]) -> dict[str, Any]:
    ids = list(result.m_generation_ids[0]) if result.m_generation_ids else []
    is_stopped = bool(ids) and ids[-1] in row["stops"]
    if not is_stopped and len(ids) < row["max_tokens"]:  # the engine silently drops a prompt that exceeds the cache
        raise RuntimeError(
            f"an answer ended after {len(ids)} of {row['max_tokens']} tokens without a stop token; the prompt has "
            f"{len(row['ids'])} tokens: set a larger cache_size"
        )
    return {"ids": ids, "finish": "stop" if is_stopped else "length", "logprob": result.m_scores[0]}


def _number(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return text
