"""Run the chat templates of tokenizers, which are untrusted programs, in a subprocess with limited CPU time and memory.

One subprocess serves all templates through a pipe. Rendered texts are cached, since a grid renders the same prompts for
every policy and checkpoint. The memory limit works on Linux only.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from kvaudit.core.errors import RunError, SpecError

SECONDS = 2  # of CPU time for one conversation; common templates take milliseconds
MEMORY = 512 << 20  # bytes beyond what the process starts with
_CHARACTERS = 16 << 20
_CACHE_BYTES = 128 << 20
_ENTRY = 256  # bytes of overhead for each cached text
_UNSTABLE = ("strftime_now", "random", "lipsum")  # names that may make the output differ each time
_WRITES = re.compile(r"\b(strftime_now|lipsum)\b|\|\s*(random)\b|\b(random)\s*\(")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
_TOO_MUCH = (
    f"the chat template takes more than {SECONDS} s, {MEMORY >> 20} MB or {_CHARACTERS >> 20} million characters for "
    "one conversation; repair it or use another model"
)


def has_address(text: str) -> bool:
    """Return whether a rendered text holds the address of a Python object, which another process would not repeat."""
    return _ADDRESS.search(text) is not None


def unstable_names(template: str) -> list[str]:
    """Return the names in a template that may make its output differ each day, or each time, such as strftime_now."""
    return sorted({next(filter(None, groups)) for groups in _WRITES.findall(template)})


class TemplateRefusal(Exception):
    """An error raised by a template, for a role or an order of roles that it does not accept."""


class Renderer:
    """The subprocess that renders chat templates, with a cache of the rendered texts.

    It starts when the first conversation is rendered and ends with this process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._texts: dict[bytes, str] = {}  # by hash of the request, oldest first
        self._bytes = 0

    def render(self, template: str, rows: Sequence[Mapping[str, str]], names: Mapping[str, Any]) -> str:
        """Return the conversation as text, including the generation prompt; ``names`` are variables of the template.

        Raises TemplateRefusal if the template raises, SpecError if it exceeds a limit.
        """
        request = {"template": template, "rows": rows, "names": dict(names)}
        key = sha256(json.dumps(request).encode()).digest()
        # one request at a time, or answers could be mixed up
        with self._lock:
            if key in self._texts:
                return self._texts[key]
            answer = self._answer(request)
            if "refused" in answer:
                raise TemplateRefusal(answer["refused"])
            if "text" not in answer:
                raise SpecError(_TOO_MUCH)
            if not any(name in template for name in _UNSTABLE):
                self._add_to_cache(key, str(answer["text"]))
            return str(answer["text"])

    def parse(
        self, template: Mapping[str, Any], text: str, prompt: str, tools: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Return an answer parsed into a message (text and tool calls) by the tokenizer's ``response_template``.

        None if it cannot be parsed or takes too long.
        """
        request = {"response_template": dict(template), "text": text, "prompt": prompt, "tools": list(tools)}
        with self._lock:
            message = self._answer(request).get("message")
        return message if isinstance(message, dict) else None

    def _add_to_cache(self, key: bytes, text: str) -> None:
        self._texts[key] = text
        self._bytes += sys.getsizeof(text) + _ENTRY
        while self._bytes > _CACHE_BYTES:
            self._bytes -= sys.getsizeof(self._texts.pop(next(iter(self._texts)))) + _ENTRY

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        # clear it first: an interrupted process must not be used again, since its answer may still arrive
        process, self._process = self._process or _start(), None
        line = _send_and_read(process, request)
        if line.endswith(b"\n"):
            self._process = process
            answer: dict[str, Any] = json.loads(line)
            return answer
        process.communicate()
        if process.returncode == -signal.SIGXCPU:
            return {}
        raise RunError(f"the process that renders chat templates ended with code {process.returncode}; run again")

    def end(self) -> None:
        """End the subprocess; the next conversation starts another."""
        if self._process is not None:
            self._process.kill()  # it keeps nothing, and may still be starting
            self._process.communicate()
            self._process = None


renderer = Renderer()


def end_at_exit() -> None:
    """End the subprocess when this process exits; if Ctrl-C is pressed meanwhile, it prints no traceback."""
    with suppress(KeyboardInterrupt):
        renderer.end()


atexit.register(end_at_exit)


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvaudit.audit.sampling.rendering"],  # -P: no module from the working folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # so that Ctrl-C does not reach it; it ends when its standard input is closed
    )


def _send_and_read(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> bytes:
    """Send a request and return the answer's line; if the process ended, the line is empty or incomplete."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, request)
        return process.stdout.readline()
    except BrokenPipeError:
        return b""
    except BaseException:  # a late answer would be taken for the answer to the next request
        process.kill()
        process.communicate()
        raise


def _send(out: IO[bytes], message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message).encode() + b"\n")
    out.flush()


def _serve() -> None:
    """Answer requests from standard input until it is closed; this function runs in the subprocess."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # the limit counts from the start of the process, in whole seconds, so it is raised for every conversation
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + SECONDS)
        request = json.loads(line)
        is_answer = "response_template" in request
        _send(sys.stdout.buffer, _parse(request) if is_answer else _render(render_jinja_template, request))


def _parse(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"message": an answer parsed into text and tool calls}; {} if it cannot be parsed.

    Older versions of transformers have no parser.
    """
    try:
        from transformers.utils.chat_parsing import parse_response

        message = parse_response(
            request["text"], request["response_template"], prefix=request["prompt"], tools=request["tools"] or None
        )
        json.dumps(message)
    except Exception:  # an answer that does not fit its template, or a template that is none
        return {}
    return {"message": message}


def _render(render: Any, request: Mapping[str, Any]) -> dict[str, str]:
    """Return {"text": the rendered text} or {"refused": the template's error}; {} if the text exceeds a limit."""
    try:
        texts, _ = render(
            conversations=[request["rows"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["names"],
        )
    except MemoryError:
        return {}
    except Exception as error:  # a template can raise anything
        return {"refused": str(error).partition("\n")[0] or type(error).__name__}
    return {"text": texts[0]} if len(texts[0]) <= _CHARACTERS else {}


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump when the kernel ends it
    if sys.platform == "linux":
        # the first field is the address space in pages
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    _serve()
