"""Engines that kvaudit starts as a server, on a free port of the loopback interface; prompts go over HTTP as token ids.

A server that dies, hangs or sends unusable replies raises ``EngineFailed``: every wait has a time limit, and a batch
has one limit for all of its requests. Proxies of the environment are not used, and the server downloads no models.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kvaudit.audit.engines.base import Engine, EngineContext, EngineFailed, GenerationRequest, Reply, Session, Settings
from kvaudit.audit.engines.process import Process, free_port
from kvaudit.audit.engines.weights import safetensors_folder
from kvaudit.audit.engines.worker_client import parse_reply, python_of, python_with, vocabulary_size
from kvaudit.core.endpoint import Endpoint, Unanswered, over_http
from kvaudit.core.errors import SpecError
from kvaudit.core.network import start_all, wait_in_slices
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import clip_distinct, inline, one_line, short_text

_PORTS = 3  # tries, if another program takes the port before the engine does
_PORT_IN_USE = ("already in use", "EADDRINUSE", "is in use")
_POLL, _PROBE_SECONDS = 0.25, 5.0  # seconds between two health checks, and for one of them
_TRIES = 2  # of one request: our own server has no rate limits
_LONGEST_REPLY = 32 << 20  # bytes: a reply repeats the prompt
_EXIT_SECONDS = 3.0  # for a process to end whose connection broke
_FLAG, _VARIABLE = re.compile(r"[a-z][a-z0-9_.]*"), re.compile(r"[A-Z][A-Z0-9_]*")
_COUNT = re.compile(r"[1-9][0-9]{0,3}")
_DTYPE = re.compile(r"\w[\w.-]*", re.ASCII)
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}

_Q = TypeVar("_Q")
_R = TypeVar("_R")


class ServerEngine(Engine):
    """An engine that is a server; its settings are the server's command-line flags and environment variables.

    The engine's ``name`` is also that of its Python package. ``reserved`` are the flags that kvaudit sets itself.
    """

    reserved: ClassVar[Collection[str]] = ()
    parallel: ClassVar[Sequence[Collection[str]]] = ()  # per way of spreading over GPUs, the names of its flag
    session: ClassVar[type[ServerSession]]

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """Return the settings with defaults, all flags spelled alike: "--kv-cache-dtype" becomes "kv_cache_dtype".

        Raises SpecError if a setting is invalid or given twice.
        """
        # --kv-cache-dtype, kv-cache-dtype and kv_cache_dtype are one flag
        spelled = {
            name if _VARIABLE.fullmatch(name) else name.removeprefix("--").replace("-", "_"): value
            for name, value in settings.items()
        }
        if len(spelled) < len(settings):
            twice = [name for name in settings if name not in spelled]
            raise SpecError(f"engine {cls.name} has a setting twice, in two spellings: {short_text(twice[0])!r}")
        cls._check_flags(spelled)
        return super().filled(spelled)

    @classmethod
    def _check_flags(cls, settings: Settings) -> None:
        """Raise SpecError for a setting that kvaudit sets itself, and for one that is no flag or environment variable.

        Command-line parsers accept abbreviated flags. A setting is therefore refused too if it abbreviates a reserved
        flag, or a flag that kvaudit has to read because it compresses the cache or sets the number of GPUs.
        """
        read = {*cls.compresses, *(name for names in cls.parallel for name in names)}
        for name in settings:
            if any(flag.startswith(name) for flag in cls.reserved):
                known = ", ".join(sorted(cls.reserved))
                raise SpecError(f"engine {cls.name}: {name} is set by kvaudit; remove it (reserved: {known})")
            if name not in read and (full := [flag for flag in sorted(read) if flag.startswith(name)]):
                raise SpecError(f"engine {cls.name}: {name} abbreviates {full[0]}; write it in full")
            if not _FLAG.fullmatch(name) and not _VARIABLE.fullmatch(name):
                raise SpecError(
                    f"engine {cls.name}: setting {short_text(name)!r} is neither a command-line flag (kv_cache_dtype) "
                    "nor an environment variable (VLLM_CPU_KVCACHE_SPACE)"
                )

    @classmethod
    def kv(cls, text: str) -> Settings:
        """Return ``{"kv_cache_dtype": TEXT}`` for ``kvaudit check --kv TEXT``; raise SpecError for a malformed TEXT."""
        # otherwise the server loads for a minute before it rejects the value
        if not _DTYPE.fullmatch(text):
            raise SpecError(
                f"engine {cls.name}: --kv is {text[:80]!r}, expected a value of kv_cache_dtype, such as fp8_e5m2; give "
                "other settings by --set NAME=VALUE"
            )
        return {"kv_cache_dtype": text}

    @classmethod
    def gpus(cls, settings: Settings) -> int:
        """Return the number of GPUs: the product of the settings for all kinds of parallelism."""
        given = [next((settings[name] for name in names if name in settings), "1") for names in cls.parallel]
        return math.prod(int(text) if _COUNT.fullmatch(text) else 1 for text in given)

    @classmethod
    def check(cls, settings: Settings, spec: EngineSpec) -> None:  # noqa: ARG003
        """Raise SpecError if the engine is not installed."""
        python_with((cls.name,), spec, cls.name, cls.install)

    @classmethod
    def start(cls, settings: Settings, context: EngineContext) -> Session:
        weights = safetensors_folder(context, cls.name)
        session = cls.session(cls.name, weights.path, settings, context)
        session.described = {**session.described, **weights.described}
        return session


class ServerSession(Session):
    """A session whose engine is a server that kvaudit has started.

    The server takes requests at ``path``, and answers at ``/health`` once it is ready. It serves the model under a
    random name; by this name kvaudit notices if another server has taken the port.
    """

    path: ClassVar[str] = ""

    def __init__(self, engine: str, folder: Path, settings: Settings, context: EngineContext) -> None:
        self.name = f"kvaudit-{secrets.token_hex(4)}"
        self._engine, self._spec, self._vocabulary = engine, context.spec, vocabulary_size(context)
        command = [python_of(context.spec.python, engine), *self._command(folder, settings, context)]
        environment = {"OMP_NUM_THREADS": str(context.threads), **_OFFLINE, **self._environment(settings, context)}
        for number in range(1, _PORTS + 1):
            port = free_port()
            full_command = [*command, "--host=127.0.0.1", f"--port={port}", f"--served-model-name={self.name}"]
            self._process = Process(
                full_command, engine=engine, log=context.log, environment=environment, is_piped=False
            )
            endpoint = Endpoint(f"http://127.0.0.1:{port}", timeout=self._spec.answer, tries=_TRIES)
            self._client = endpoint.client("engine", partial(over_http, longest=_LONGEST_REPLY))
            try:
                self._wait_until_up(port)
                facts = self._facts().items()
                self.described = {name: inline(clip_distinct(" ".join(text.split()), 200)) for name, text in facts}
                return
            except EngineFailed as error:
                # another program took the port between free_port and the server's start: try another port
                if number == _PORTS or not any(text in str(error) for text in _PORT_IN_USE):
                    raise
            except BaseException:
                self.stop()
                raise

    @abstractmethod
    def _command(self, folder: Path, settings: Settings, context: EngineContext) -> list[str]:
        """Return Python's arguments for starting the server on a checkpoint's folder."""

    def _environment(self, settings: Settings, context: EngineContext) -> Mapping[str, str]:  # noqa: ARG002
        return environment_variables(settings)

    @abstractmethod
    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the JSON body of a request."""

    @abstractmethod
    def _row(self, reply: Mapping[str, Any], request: GenerationRequest) -> dict[str, Any]:
        """Return a server's reply as a dict with the answer's ``ids``, ``finish`` (why it ended) and ``logprob``.

        If the reply repeats the ids of the prompt, they are under ``read``. Raises KeyError, IndexError, TypeError or
        ValueError for an invalid reply.
        """

    @abstractmethod
    def _served_name(self) -> Any:
        """Ask the server for the name of its model and return it.

        Raises Unanswered, KeyError, IndexError or TypeError if the server does not name one.
        """

    @abstractmethod
    def _facts(self) -> dict[str, str]:
        """Return facts that the server reports about itself and that are the same at every start."""

    def answer(self, requests: Sequence[GenerationRequest]) -> list[Reply]:
        until = time.monotonic() + self._spec.answer
        try:
            replies = ask_concurrently(
                lambda request: self._client.fetch(self.path, self._body(request), until),
                requests,
                self._spec.at_once,
                until,
            )
        except Unanswered as error:
            # the client's own time limit may expire a moment before ours
            if self._process.is_running and time.monotonic() >= until:
                limit = f"{self._spec.answer:g} s (engines.{self._engine}.answer)"
                raise self._process.failure(f"it did not answer all of {len(requests)} requests in {limit}") from None
            raise self._failure(f"answering {len(requests)} requests", error) from None
        return [self._parse(reply, request) for reply, request in zip(replies, requests, strict=True)]

    def stop(self) -> None:
        self._process.stop()

    def _wait_until_up(self, port: int) -> None:
        until = time.monotonic() + self._spec.start
        while True:
            if not self._process.is_running:
                raise self._process.failure("it ended while starting")
            if time.monotonic() > until:
                raise self._process.failure(
                    f"it was not ready {self._spec.start:g} s (engines.{self._engine}.start) after its start"
                )
            try:
                self._client.fetch_text("health", min(until, time.monotonic() + _PROBE_SECONDS))
                break
            except Unanswered:
                time.sleep(_POLL)
        try:
            is_ours = self._served_name() == self.name
        except (Unanswered, KeyError, IndexError, TypeError):
            is_ours = False
        if not is_ours:
            raise self._process.failure(f"port {port} is in use by another server")

    def _failure(self, doing: str, error: Unanswered) -> EngineFailed:
        """Return the error to raise for a missing answer; its message says whether the server's process has ended.

        A crashed process may take some time to end, so the function first waits for that a moment.
        """
        until = time.monotonic() + _EXIT_SECONDS
        while self._process.is_running and time.monotonic() < until and "Error" in str(error):
            time.sleep(_POLL / 5)
        if self._process.is_running:
            return self._process.failure(f"while {doing}: {error}")
        return self._process.failure(f"it ended while {doing}")

    def _parse(self, body: Mapping[str, Any], request: GenerationRequest) -> Reply:
        try:
            row = self._row(body, request)
        except (KeyError, IndexError, TypeError, ValueError):
            row = {}
        reply = parse_reply(row, request, self._vocabulary)
        if reply is None:
            text = inline(one_line(str(body)))[:100]
            raise self._process.failure(f"it gave an invalid reply (limit {request.max_tokens} tokens): {text}")
        if (index := first_difference(row.get("read", request.ids), request.ids)) is not None:
            raise self._process.failure(f"it read a different prompt than was sent: token {index} differs")
        return reply

    def _fetch_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object that the server has at ``path``; {} if it has none."""
        try:
            return self._client.fetch(path, None, time.monotonic() + _PROBE_SECONDS)
        except Unanswered:
            return {}

    def _fetch_text(self, path: str) -> str:
        """Return the text that the server has at ``path``; "" if it has none."""
        try:
            return self._client.fetch_text(path, time.monotonic() + _PROBE_SECONDS)
        except Unanswered:
            return ""


def first_difference(theirs: Any, ours: Sequence[int]) -> int | None:
    """Return the index of the first token id in which ``theirs`` differs from ``ours``; None if all are equal."""
    if not isinstance(theirs, list | tuple):
        return 0
    for index, (their_id, our_id) in enumerate(zip(theirs, ours, strict=False)):
        if their_id != our_id:
            return index
    return min(len(theirs), len(ours)) if len(theirs) != len(ours) else None


def ask_concurrently(ask: Callable[[_Q], _R], questions: Sequence[_Q], at_once: int, until: float) -> list[_R]:
    """Call ``ask`` with every question, ``at_once`` of them in parallel; return the results in order.

    Raises the first error of ``ask``, or Unanswered if results are missing at ``until``, a time of ``time.monotonic``.
    """
    started = time.monotonic()
    futures = start_all(ask, questions, at_once)
    try:
        done, pending = wait_in_slices(futures, until - started, FIRST_EXCEPTION)
        errors = [error for future in done if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        if pending:
            raise Unanswered(f"no answer to {len(pending)} of {len(futures)} requests in {until - started:.3g} s")
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def command_flags(settings: Settings, *, has_negation: bool = True) -> list[str]:
    """Return settings as command-line flags, ``--NAME=VALUE`` by default.

    NAME=true becomes ``--NAME``, and NAME=false becomes ``--no-NAME``; if the parser has no such flags
    (``has_negation`` is False), NAME=false is left out. A value of several words becomes several arguments.
    """
    flags = list[str]()
    for name, value in settings.items():
        flag, words = name.replace("_", "-"), value.split()
        if not _FLAG.fullmatch(name):
            continue
        if value == "true":
            flags.append(f"--{flag}")
        elif value == "false":
            flags += [f"--no-{flag}"] if has_negation else []
        # JSON is one value even if it holds spaces
        elif len(words) > 1 and value[0] not in "{[" and not any(word.startswith("-") for word in words):
            flags += [f"--{flag}", *words]
        else:
            flags.append(f"--{flag}={value}")
    return flags


def environment_variables(settings: Settings) -> dict[str, str]:
    """Return those settings that are environment variables (names in capitals), {name: value}."""
    return {name: value for name, value in settings.items() if _VARIABLE.fullmatch(name)}
