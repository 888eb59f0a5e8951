"""A server that stands in for vLLM's, SGLang's or an endpoint, and misbehaves as STANDIN says.

    STANDIN=WORD[:NUMBER],...    NUMBER: the request from which on, 0 the first
    die, hang, 500, garbage, endless, huge, redirect, other_ids, other_prompt, torn_logprobs, negative
    filter (a word: a conversation that holds it is refused), ended (by a filter, in place of an end), says (its answer)
    fallback (names another model in its answers)
    reuse (a port that another one has just left)
    slow (seconds until it can be asked), usage (tokens that it claims to have read), ids (has no /tokenize)

It answers a prompt with its first tokens, each one higher, and keeps to the limit.
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
DOOR, COUNT = threading.Lock(), [0]
STARTED = time.monotonic()


def is_on(word: str, number: int) -> bool:
    return word in WORDS and number >= int(WORDS[word] or 0)


class Handler(BaseHTTPRequestHandler):
    options: argparse.Namespace

    def do_GET(self) -> None:
        name = self.options.served_model_name
        if time.monotonic() - STARTED < float(WORDS.get("slow", 0) or 0):
            self.say(b"loading", 503)
        elif self.path == "/v1/models":
            self.say_json({"data": [{"id": name}]})
        elif self.path == "/model_info":
            self.say_json({"served_model_name": name})
        elif self.path == "/version":
            self.say_json({"version": "0.0-standin"})
        elif self.path == "/server_info":
            self.say_json({"version": "0.0-standin", "kv_cache_dtype": self.options.kv_cache_dtype, "tp_size": 1})
        elif self.path == "/metrics":
            resolved = WORDS.get("resolved", self.options.kv_cache_dtype)
            self.say(f'vllm:cache_config_info{{block_size="16",cache_dtype="{resolved}"}} 1.0\n'.encode())
        else:
            self.say(b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in ("/tokenize", "/apply-template"):
            self.show(body)
            return
        with DOOR:
            number, COUNT[0] = COUNT[0], COUNT[0] + 1
        if is_on("die", number):
            print("RuntimeError: the stand-in has had enough", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if is_on("hang", number):
            time.sleep(600)
        if self.path == "/v1/chat/completions" and WORDS.get("filter", "\0") in body["messages"][-1]["content"]:
            self.say(b'{"error": {"message": "the prompt was filtered by our policy"}}', 400)
        elif is_on("redirect", number):
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
        elif is_on("500", number):
            self.say(b'{"error": {"message": "CUDA error: an illegal\\u001b[31m memory access"}}', 500)
        elif is_on("garbage", number):
            self.say(b"<html>\xff")
        elif is_on("huge", number) or is_on("endless", number):
            self.endless(0.0 if is_on("huge", number) else 0.05)
        else:
            self.say_json(self.reply(body, number))

    def reply(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        if self.path == "/v1/chat/completions":
            ended = "content_filter" if is_on("ended", number) else "stop"
            row = {
                "message": {"role": "assistant", "content": WORDS.get("says", "four") if number else "four"},
                "finish_reason": ended,
            }
            usage = {"prompt_tokens": int(WORDS["usage"])} if "usage" in WORDS else None
            model = "fallback-mini" if is_on("fallback", number) else "standin-1"
            return {"model": model, "choices": [row], "usage": usage}
        prompt = body.get("prompt", body.get("input_ids"))
        most = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        ids = [token + 1 for token in prompt[:most]]
        if is_on("other_ids", number):
            ids = [10**6, *ids[1:]]
        if is_on("negative", number):
            ids = [-1, *ids[1:]]
        logprobs = [-0.5] * (len(ids) - is_on("torn_logprobs", number))
        read = [*prompt[:-1], 0] if is_on("other_prompt", number) else prompt
        if self.path == "/v1/completions":
            choice = {"logprobs": {"token_logprobs": logprobs}, "token_ids": ids, "finish_reason": "length"}
            return {"choices": [{**choice, "prompt_token_ids": read}]}
        rows = [[value, token, None] for value, token in zip(logprobs, ids, strict=False)]
        told = {"finish_reason": {"type": "length"}, "prompt_tokens": len(read) + is_on("other_prompt", number)}
        return {"output_ids": ids, "meta_info": {**told, "output_token_logprobs": rows}}

    def show(self, body: dict[str, Any]) -> None:
        """Token ids as vLLM shows them: what ``ids`` names, for any conversation."""
        if "ids" not in WORDS or self.path == "/apply-template":
            self.say(b"", 404)
        else:
            self.say_json({"tokens": [int(token) for token in WORDS["ids"].split(".")]})

    def endless(self, pause: float) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b" " * (1 << 16))
            time.sleep(pause)

    def say_json(self, row: Any) -> None:
        self.say(json.dumps(row).encode())

    def say(self, raw: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


class Server(ThreadingHTTPServer):
    allow_reuse_address = "reuse" in WORDS

    def handle_error(self, *_: Any) -> None:
        """Whoever asked has gone."""


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
