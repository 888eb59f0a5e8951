"""A stand-in for the servers of vLLM and SGLang and for endpoints, which misbehaves as the variable STANDIN says.

    STANDIN=WORD[:VALUE],...

Words whose value is the number of the first affected request, 0 by default: die, hang, 500, garbage, endless, huge,
redirect, other_ids, other_prompt, torn_logprobs, negative, ended (by a filter), fallback (to another model).
Words with another value: filter (a word in requests to reject), says (the answer), slow (seconds until it is ready),
usage (reported prompt tokens), ids (the reply of /tokenize, else missing), resolved (reported dtype of the cache).
The word reuse allows a port that was just closed.

The answer to a prompt is the prompt's first tokens, each plus one, up to the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = dict(part.partition(":")[::2] for part in os.environ.get("STANDIN", "").split(",") if part)
LOCK, COUNT = threading.Lock(), [0]
STARTED = time.monotonic()


def is_active(word: str, number: int) -> bool:
    return word in WORDS and number >= int(WORDS[word] or 0)


class Handler(BaseHTTPRequestHandler):
    options: argparse.Namespace

    def do_GET(self) -> None:
        name = self.options.served_model_name
        if time.monotonic() - STARTED < float(WORDS.get("slow", 0) or 0):
            self.send(b"loading", 503)
        elif self.path == "/v1/models":
            self.send_json({"data": [{"id": name}]})
        elif self.path == "/model_info":
            self.send_json({"served_model_name": name})
        elif self.path == "/version":
            self.send_json({"version": "0.0-standin"})
        elif self.path == "/server_info":
            self.send_json({"version": "0.0-standin", "kv_cache_dtype": self.options.kv_cache_dtype, "tp_size": 1})
        elif self.path == "/metrics":
            resolved = WORDS.get("resolved", self.options.kv_cache_dtype)
            self.send(f'vllm:cache_config_info{{block_size="16",cache_dtype="{resolved}"}} 1.0\n'.encode())
        else:
            self.send(b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in ("/tokenize", "/apply-template"):
            self.send_tokens(body)
            return
        with LOCK:
            number, COUNT[0] = COUNT[0], COUNT[0] + 1
        if is_active("die", number):
            print("RuntimeError: the stand-in has had enough", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if is_active("hang", number):
            time.sleep(600)
        if self.path == "/v1/chat/completions" and WORDS.get("filter", "\0") in body["messages"][-1]["content"]:
            self.send(b'{"error": {"message": "the prompt was filtered by our policy"}}', 400)
        elif is_active("redirect", number):
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
        elif is_active("500", number):
            self.send(b'{"error": {"message": "CUDA error: an illegal\\u001b[31m memory access"}}', 500)
        elif is_active("garbage", number):
            self.send(b"<html>\xff")
        elif is_active("huge", number) or is_active("endless", number):
            self.endless(0.0 if is_active("huge", number) else 0.05)
        else:
            self.send_json(self.reply(body, number))

    def reply(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        if self.path == "/v1/chat/completions":
            ended = "content_filter" if is_active("ended", number) else "stop"
            row = {
                "message": {"role": "assistant", "content": WORDS.get("says", "four") if number else "four"},
                "finish_reason": ended,
            }
            usage = {"prompt_tokens": int(WORDS["usage"])} if "usage" in WORDS else None
            model = "fallback-mini" if is_active("fallback", number) else "standin-1"
            return {"model": model, "choices": [row], "usage": usage}
        prompt = body.get("prompt", body.get("input_ids"))
        limit = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        ids = [token + 1 for token in prompt[:limit]]
        if is_active("other_ids", number):
            ids = [10**6, *ids[1:]]
        if is_active("negative", number):
            ids = [-1, *ids[1:]]
        logprobs = [-0.5] * (len(ids) - is_active("torn_logprobs", number))
        read = [*prompt[:-1], 0] if is_active("other_prompt", number) else prompt
        if self.path == "/v1/completions":
            choice = {"logprobs": {"token_logprobs": logprobs}, "token_ids": ids, "finish_reason": "length"}
            return {"choices": [{**choice, "prompt_token_ids": read}]}
        rows = [[value, token, None] for value, token in zip(logprobs, ids, strict=False)]
        metadata = {"finish_reason": {"type": "length"}, "prompt_tokens": len(read) + is_active("other_prompt", number)}
        return {"output_ids": ids, "meta_info": {**metadata, "output_token_logprobs": rows}}

    def send_tokens(self, body: dict[str, Any]) -> None:
        """Send the token ids that ``ids`` names, for any conversation, as vLLM does."""
        if "ids" not in WORDS or self.path == "/apply-template":
            self.send(b"", 404)
        else:
            self.send_json({"tokens": [int(token) for token in WORDS["ids"].split(".")]})

    def endless(self, pause: float) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b" " * (1 << 16))
            time.sleep(pause)

    def send_json(self, row: Any) -> None:
        self.send(json.dumps(row).encode())

    def send(self, raw: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


class Server(ThreadingHTTPServer):
    allow_reuse_address = "reuse" in WORDS

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that have disconnected."""


def main() -> None:
    words = sys.argv[3:] if sys.argv[1:2] == ["-m"] else sys.argv[1:]  # as "python -m module flags"
    parser = argparse.ArgumentParser(prog="standin", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="standin")
    for name in ("model", "model-path", "dtype", "kv-cache-dtype", "max-model-len", "max-num-seqs", "seed"):
        parser.add_argument(f"--{name}")
    for name in (
        "generation-config",
        "context-length",
        "max-running-requests",
        "random-seed",
        "max-num-batched-tokens",
    ):
        parser.add_argument(f"--{name}")
    for name in ("enforce-eager", "enable-prefix-caching", "enable-chunked-prefill", "disable-radix-cache"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    Handler.options = parser.parse_args(words)
    server = Server((Handler.options.host, Handler.options.port), Handler)
    print("stand-in on port", Handler.options.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
