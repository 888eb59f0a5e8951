"""SGLang: ``kv_cache_dtype`` (auto, fp8_e4m3, fp8_e5m2, ...) and any other flag of its server.

It needs a GPU, and kvaudit's authors have never run it: this code was tested with SGLang's own flag parser and a
stand-in server. It computes in bfloat16 unless ``dtype`` says otherwise, without prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvaudit.audit.engines.base import EngineContext, GenerationRequest, Settings
from kvaudit.audit.engines.http_server import ServerEngine, ServerSession, command_flags
from kvaudit.core.errors import SpecError

_RESERVED = {
    *("model", "model_path", "tokenizer_path", "host", "port", "served_model_name", "api_key", "config"),
    "trust_remote_code",
}
_PARALLEL = (  # each flag has two names
    ("tp_size", "tensor_parallel_size"),
    ("pp_size", "pipeline_parallel_size"),
    ("dp_size", "data_parallel_size"),
)
_FACTS = (  # of its server_info
    *("kv_cache_dtype", "quantization_param_path", "attention_backend", "prefill_attention_backend", "dtype"),
    *("decode_attention_backend", "max_running_requests", "disable_radix_cache", "enable_deterministic_inference"),
    *("tp_size", "page_size", "chunked_prefill_size"),
)


class SgLangSession(ServerSession):
    """A session with SGLang's server, where an answer ends at the requested stop tokens and at those of the model."""

    path = "generate"

    def _command(self, folder: Path, settings: Settings, context: EngineContext) -> list[str]:
        check_auto_dtype(settings, context.model.model.config.to_dict())
        defaults = {
            "context_length": str(context.model.max_positions),
            "max_running_requests": str(context.spec.at_once),
            "random_seed": "0",
            "disable_radix_cache": "true",
        }
        self._flags = command_flags({**defaults, **settings}, has_negation=False)
        return ["-m", "sglang.launch_server", f"--model-path={folder}", *self._flags]

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            # no other truncation of the distribution
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(request.stops),
            "sampling_seed": request.seed,
            "skip_special_tokens": False,
        }
        return {"input_ids": list(request.ids), "sampling_params": sampling, "return_logprob": True}

    def _row(self, reply: Mapping[str, Any], request: GenerationRequest) -> dict[str, Any]:
        """Return a reply as a dict of ``ids``, ``finish``, ``logprob`` and ``read`` (the ids of the prompt).

        SGLang does not repeat the prompt: ``read`` is the prompt that was sent, if the reply reports the same number of
        prompt tokens. Raises the errors of ``ServerSession._row``.
        """
        metadata, ids = reply["meta_info"], reply["output_ids"]
        logprobs = metadata["output_token_logprobs"]
        if [row[1] for row in logprobs] != ids:
            raise ValueError("the log-probs are of other tokens")
        read = request.ids if metadata["prompt_tokens"] == len(request.ids) else ()
        finish = metadata["finish_reason"]["type"]
        return {"ids": ids, "finish": finish, "logprob": math.fsum(row[0] for row in logprobs), "read": read}

    def _served_name(self) -> Any:
        return self._client.fetch("model_info")["served_model_name"]

    def _facts(self) -> dict[str, str]:
        # the path depends on the release
        info = self._fetch_json("server_info") or self._fetch_json("get_server_info")
        facts = {name: str(info[name]) for name in _FACTS if info.get(name) is not None}
        version = {"version": f"sglang {info['version']}"} if "version" in info else {}
        return {**version, "flags": " ".join(self._flags), **facts}


def check_auto_dtype(settings: Settings, config: Mapping[str, Any]) -> None:
    """Raise SpecError if ``kv_cache_dtype`` is auto and the checkpoint's config itself asks for a compressed cache.

    SGLang would then compress the reference too, and still report auto. ``config`` is the checkpoint's config; the keys
    that compressed-tensors and ModelOpt write into it are checked.
    """
    quantisation = config.get("quantization_config") or {}
    asked = [key for key in ("kv_cache_scheme", "kv_cache_quant_algo") if quantisation.get(key)]
    if asked and settings.get("kv_cache_dtype") == "auto":
        raise SpecError(
            f"engine sglang takes kv_cache_dtype auto from the checkpoint, whose config asks for a compressed cache "
            f"({asked[0]}); set kv_cache_dtype, such as bf16"
        )


class SgLang(ServerEngine):
    """SGLang's server, used through its own path ``/generate``."""

    name = "sglang"
    says = "SGLang (a GPU; not run here): kv_cache_dtype, quantization_param_path and the server's other flags"
    install = "pip install sglang in its own environment; give its --python, or engines: {sglang: {python: ...}}"
    compresses: ClassVar = {
        "kv_cache_dtype": ("auto", "bf16", "bfloat16"),
        **dict.fromkeys(("quantization_param_path", "enable_hisparse", "hisparse_config"), ()),
    }
    uncompressed: ClassVar[Settings] = {"kv_cache_dtype": "auto"}
    reserved: ClassVar = _RESERVED
    parallel: ClassVar = _PARALLEL
    always: ClassVar[Settings] = {"dtype": "bfloat16", "kv_cache_dtype": "auto"}
    session: ClassVar = SgLangSession
