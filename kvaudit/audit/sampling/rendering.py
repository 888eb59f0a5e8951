"""Chat templates are programs of strangers: they run in a process of their own, which the kernel holds to limits.

One such process serves every template of this one, so a conversation costs a message through a pipe, and what was
rendered is remembered: a grid asks for the same prompts under every policy and of every checkpoint. A template that
takes more than SECONDS of processor time is ended by the kernel, one that wants more than MEMORY gets none (on Linux;
elsewhere only time is limited), and a text of more than _CHARACTERS is not handed over. Limits on single operations
would not hold: nested loops, macros that call themselves twice, powers and widths each need their own.
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
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from kvaudit.core.errors import RunError, SpecError

SECONDS = 2  # of processor time for one conversation; templates in use take milliseconds
MEMORY = 512 << 20  # bytes beyond what the process starts with
_CHARACTERS = 16 << 20
_REMEMBERED = 128 << 20  # bytes of texts that are kept, the latest
_ENTRY = 256  # bytes that a text takes beside its own
_UNSTEADY = ("strftime_now", "random", "lipsum")  # names by which a template may say something else each time
_WRITES = re.compile(r"\b(strftime_now|lipsum)\b|\|\s*(random)\b|\b(random)\s*\(")
_TOO_MUCH = (
    f"the chat template takes more than {SECONDS} s, {MEMORY >> 20} MB or {_CHARACTERS >> 20} million characters for "
    "one conversation; mend it or take another model"
)


def unstable_names(template: str) -> list[str]:
    """What a template names by which it may write something else another day, or every time."""
    return sorted({next(filter(None, found)) for found in _WRITES.findall(template)})


class TemplateRefusal(Exception):
    """What a template raised itself: a role, or an order of roles, that it does not take."""


class Renderer:
    """The process that renders; started with the first conversation, ended with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._texts: dict[bytes, str] = {}  # by the hash of what was asked, the oldest first
        self._bytes = 0

    def render(self, template: str, rows: Sequence[Mapping[str, str]], names: Mapping[str, Any]) -> str:
        """The conversation as text, generation prompt included; ``names`` are what else the template can name.

        Raises TemplateRefusal for what the template raises, SpecError where it exceeds a limit.
        """
        request = {"template": template, "rows": rows, "names": dict(names)}
        key = sha256(json.dumps(request).encode()).digest()
        # one request at a time goes through the pipe, or answers would be mixed up
        with self._lock:
            if key in self._texts:
                return self._texts[key]
            answer = self._answer(request)
            if "refused" in answer:
                raise TemplateRefusal(answer["refused"])
            if "text" not in answer:
                raise SpecError(_TOO_MUCH)
            if not any(name in template for name in _UNSTEADY):
                self._remember(key, str(answer["text"]))
            return str(answer["text"])

    def _remember(self, key: bytes, text: str) -> None:
        self._texts[key] = text
        self._bytes += sys.getsizeof(text) + _ENTRY
        while self._bytes > _REMEMBERED:
            self._bytes -= sys.getsizeof(self._texts.pop(next(iter(self._texts)))) + _ENTRY

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process, self._process = self._process or _start(), None
        line = _asked(process, request)
        if line.endswith(b"\n"):
            self._process = process  # an exchange that was interrupted leaves none behind: its answer is still to come
            found: dict[str, Any] = json.loads(line)
            return found
        process.communicate()
        if process.returncode == -signal.SIGXCPU:
            return {}
        raise RunError(f"the process that renders chat templates ended with code {process.returncode}; run again")

    def end(self) -> None:
        """End the process; the next conversation starts another."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


renderer = Renderer()
atexit.register(renderer.end)


def _start() -> subprocess.Popen[bytes]:
    """Ctrl-C at the terminal is not for it: it ends when its standard input does."""
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvaudit.audit.sampling.rendering"],  # -P: no module from the working folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def _asked(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> bytes:
    """The line that answers a request; empty, or cut off, where the process ended over it."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, request)
        return process.stdout.readline()
    except BrokenPipeError:
        return b""
    except BaseException:  # an answer may still come, which the next request would take for its own
        process.kill()
        process.communicate()
        raise


def _send(out: IO[bytes], message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message).encode() + b"\n")
    out.flush()


def _serve() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # counted from the start of the process, in whole seconds: set anew for every conversation
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + SECONDS)
        _send(sys.stdout.buffer, _rendered(render_jinja_template, json.loads(line)))


def _rendered(render: Any, request: Mapping[str, Any]) -> dict[str, str]:
    """What is asked for, what the template raised instead, or nothing where it is too much."""
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
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that is ended leaves no dump
    if sys.platform == "linux":
        # the first field: pages of address space
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    _serve()
