"""SGLang: ``kv_cache_dtype`` (auto, fp8_e4m3, fp8_e5m2, ...) and any other flag of its server.

It wants a GPU. What is written here was held to the flags of its own parser, and to a server that stands in for it; it
has not been run. It computes in bfloat16 unless ``dtype`` says otherwise, without its prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvaudit.audit.engines.base import GenerationRequest, Settings, EngineContext
from kvaudit.audit.engines.http_server import ServerEngine, ServerSession, command_flags, environment_variables
from kvaudit.audit.engines.worker_client import python_of

_OURS = {
    *("model", "model_path", "tokenizer_path", "host", "port", "served_model_name", "api_key", "config"),
    "trust_remote_code",
}
_INFO = (
    *("kv_cache_dtype", "quantization_param_path", "attention_backend", "prefill_attention_backend", "dtype"),
    *("decode_attention_backend", "max_running_requests", "disable_radix_cache", "enable_deterministic_inference"),
    *("tp_size", "page_size", "chunked_prefill_size"),
)


class SgLang(ServerEngine):
    """SGLang's server and its own ``/generate``."""

    name = "sglang"
    says = "SGLang (a GPU; not run here): kv_cache_dtype, quantization_param_path and the server's other flags"
    install = "pip install sglang in its own environment; give its --python, or engines: {sglang: {python: ...}}"
    compresses: ClassVar = {
        "kv_cache_dtype": ("auto", "bf16", "bfloat16"),
        **dict.fromkeys(("quantization_param_path", "enable_hisparse", "hisparse_config"), ()),
    }
    uncompressed: ClassVar[Settings] = {"kv_cache_dtype": "auto"}
    ours: ClassVar = _OURS
    always: ClassVar[Settings] = {"dtype": "bfloat16", "kv_cache_dtype": "auto"}

    @classmethod
    def served_from(cls, folder: Path, settings: Settings, work: EngineContext) -> ServerSession:
        return SgLangSession(folder, settings, work)


class SgLangSession(ServerSession):
    """Its server, asked for tokens. A batch's answers end at the model's own end tokens too: it knows no other way."""

    path = "generate"

    def __init__(self, folder: Path, settings: Settings, work: EngineContext) -> None:
        own = {
            "context_length": str(work.model.max_positions),
            "max_running_requests": str(work.part.at_once),
            "random_seed": "0",
            "disable_radix_cache": "true",
        }
        self._flags = command_flags({**own, **settings}, negated=False)
        python = python_of(work.part.python, SgLang.name)
        command = [python, "-m", "sglang.launch_server", f"--model-path={folder}", *self._flags, "--host=127.0.0.1"]
        super().__init__(SgLang.name, command, "--served-model-name", work, environment_variables(settings))

    def _body(self, asked: GenerationRequest) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": asked.most,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            # nothing that would cut the distribution off
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(asked.stops),
            "sampling_seed": asked.seed,
            "skip_special_tokens": False,
        }
        return {"input_ids": list(asked.ids), "sampling_params": sampling, "return_logprob": True}

    def _row(self, said: Mapping[str, Any], asked: GenerationRequest) -> dict[str, Any]:
        """Of the prompt it says only how many tokens it read."""
        meta, ids = said["meta_info"], said["output_ids"]
        logprobs = meta["output_token_logprobs"]
        if [row[1] for row in logprobs] != ids:
            raise ValueError("log-probs of other tokens")
        read = asked.ids if meta["prompt_tokens"] == len(asked.ids) else ()
        finish = meta["finish_reason"]["type"]
        return {"ids": ids, "finish": finish, "logprob": math.fsum(row[0] for row in logprobs), "read": read}

    def _says_name(self) -> Any:
        return self._client.fetch("model_info")["served_model_name"]

    def _described(self) -> dict[str, str]:
        """Its version, and its settings as they were resolved."""
        # under the one path or the other, by its release
        info = self._fetched("server_info") or self._fetched("get_server_info")
        found = {name: str(info[name]) for name in _INFO if info.get(name) is not None}
        version = {"version": f"sglang {info['version']}"} if "version" in info else {}
        return {**version, "flags": " ".join(self._flags), **found}
