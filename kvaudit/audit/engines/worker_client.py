"""Engines that are a Python library, loaded by a worker process with the Python in which the library is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvaudit.audit.engines.base import EngineContext, EngineFailed, GenerationRequest, Reply, Session
from kvaudit.audit.engines.process import Process
from kvaudit.audit.engines.weights import EngineCheckpoint
from kvaudit.core.completions import parse_finish
from kvaudit.core.errors import SpecError
from kvaudit.core.spec import expand
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import clip, clip_distinct, inline, is_text, short_repr

T = TypeVar("T")
_LONGEST_ERROR = 600  # characters of an engine's own error: its end matters as much as its beginning
_INSIDE = Path(__file__).with_name("inside")


class WorkerSession(Session):
    """A session whose engine runs in another process, by the script ``worker.py`` in the folder ``inside/``.

    The parameter ``inside`` is the name of a file in that folder, which loads the engine; its function ``start`` gets
    ``setup``. ``weights`` is the checkpoint that is served.
    """

    def __init__(
        self,
        engine: str,
        inside: str,
        setup: Mapping[str, Any],
        context: EngineContext,
        python: str,
        weights: EngineCheckpoint | None = None,
    ) -> None:
        self._engine, self._spec, self._vocabulary = engine, context.spec, vocabulary_size(context)
        command = [python, str(_INSIDE / "worker.py"), str(_INSIDE / inside)]
        self._lines = 0  # sent so far
        environment = {"OMP_NUM_THREADS": str(context.threads)}
        self._process = Process(command, engine=engine, log=context.log, environment=environment)
        try:
            line = {"start": {**setup, "threads": context.threads, "at_once": context.spec.at_once}}
            about = self._exchange(line, "start", "starting", "about", dict)
            facts = {
                str(name): inline(clip_distinct(" ".join(str(value).split()), 200)) for name, value in about.items()
            }
            self.described = facts | (weights.described if weights else {})
        except BaseException:
            self.stop()
            raise

    def answer(self, requests: Sequence[GenerationRequest]) -> list[Reply]:
        # a worker takes token ids and has no use for messages
        rows = [{name: value for name, value in one._asdict().items() if name != "messages"} for one in requests]
        replies = self.ask(rows, f"answering {len(rows)} requests")
        return [self.parse(row, request) for row, request in zip(replies, requests, strict=True)]

    def ask(self, rows: Sequence[Mapping[str, Any]], doing: str) -> list[Any]:
        """Send requests as JSON rows and return the worker's reply to each; raise EngineFailed if some are missing.

        ``doing`` is the engine's activity for error messages, such as "answering".
        """
        replies = self._exchange({"ask": rows}, "answer", doing, "replies", list)
        if len(replies) != len(rows):
            raise self._process.failure(f"it gave {len(replies)} replies to {len(rows)} requests")
        return replies

    def stop(self) -> None:
        self._process.stop()

    def _exchange(self, row: Mapping[str, Any], limit: str, doing: str, key: str, kind: type[T]) -> T:
        """Send ``row``; return field ``key`` of the worker's answer, which must be of type ``kind``.

        Raises EngineFailed for any other answer, or if none comes within the time limit, which is the field ``limit``
        of the engine's spec. ``doing`` says in error messages what the engine is doing.
        """
        self._lines += 1
        seconds = float(getattr(self._spec, limit))
        self._process.write_line(json.dumps(row), seconds)
        line = self._process.read_line(seconds, doing, f"engines.{self._engine}.{limit}")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise self._process.failure("it sent a line that is not JSON") from None
        if isinstance(answer, dict) and answer.get("to") != self._lines:
            raise self._process.failure("it sent an answer to no current request")
        if isinstance(answer, dict) and "error" in answer:
            self.stop()
            message = str(answer["error"])
            message = " ".join((message if is_text(message) else repr(message)).split())
            raise EngineFailed(f"engine {self._engine} refuses: {inline(clip(message, _LONGEST_ERROR))}")
        value = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise self._process.failure(f"it sent {short_repr(answer)}, expected {key!r}")
        return value

    def parse(self, row: Any, request: GenerationRequest) -> Reply:
        """Return the worker's reply ``row`` as a ``Reply``; raise EngineFailed if it is not valid."""
        reply = parse_reply(row, request, self._vocabulary)
        if reply is None:
            raise self._process.failure(
                f"it gave an invalid reply (limit {request.max_tokens} tokens): {short_repr(row)}"
            )
        return reply


def parse_reply(row: Any, request: GenerationRequest, vocabulary: int) -> Reply | None:
    """Return ``row``, a dict of ids, finish and logprob from an engine, as a ``Reply``; None if it is not valid.

    For example, it must keep to the token limit of ``request``, and its ids must be below ``vocabulary``.
    """
    try:
        ids, finish, logprob = row["ids"], parse_finish(row["finish"]), row["logprob"]
        if finish is None or not isinstance(ids, list) or len(ids) > request.max_tokens:
            return None
        # type(), because booleans are instances of int
        if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            return None
        if logprob is None:
            return Reply(tuple(ids), finish)
        return Reply(tuple(ids), finish, float(logprob)) if math.isfinite(logprob) else None
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def vocabulary_size(context: EngineContext) -> int:
    """Return the number of rows of the model's input embeddings."""
    return int(context.model.model.get_input_embeddings().weight.shape[0])


def python_of(setting: str | None, engine: str) -> str:
    """Return the path of the Python interpreter that runs an engine: the configured one, or that of this process.

    Raises SpecError if the configured one does not exist.
    """
    if setting is None:
        return sys.executable
    path = Path(expand(f"engines.{engine}.python", setting)).expanduser()
    if not path.is_file():
        raise SpecError(
            f"engines.{engine}.python is {str(path)!r}, which is not a file; give the python of its environment"
        )
    return str(path)


def python_with(modules: Sequence[str], spec: EngineSpec, engine: str, install: str) -> str:
    """Return the path of the Python interpreter that runs an engine, and that has all ``modules``.

    Raises SpecError, with the command ``install``, if a module is missing.
    """
    python = python_of(spec.python, engine)
    missing = [m for m in modules if not _has(m)] if spec.python is None else _missing(python, modules, engine)
    if missing:
        target = f" for {python}" if spec.python is not None else ""
        raise SpecError(f"engine {engine} is not installed{target}: {install} (no module {missing[0]})")
    return python


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


_PRINT_MISSING = """
import sys
from importlib.util import find_spec
for module in sys.argv[1:]:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        print(module)
"""


def _missing(python: str, modules: Sequence[str], engine: str) -> list[str]:
    """Return those of ``modules`` that the interpreter ``python`` cannot import."""
    command = [python, "-c", _PRINT_MISSING, *modules]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        raise SpecError(
            f"engines.{engine}.python is {python!r}, which does not run; give the python of its environment"
        ) from None
