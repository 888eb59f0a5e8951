"""Engines that are a server: begun on a free port of the loopback and asked over HTTP, token ids both ways.

A server that dies, hangs, or says nothing of use is ``EngineFailed``: every wait has its time limit, and a batch has
one for all of its requests. It is asked directly, whatever proxies the environment names, and knows no network.
"""

from __future__ import annotations

import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kvaudit.audit.engines.base import GenerationRequest, Engine, EngineFailed, Reply, Session, Settings, EngineContext
from kvaudit.audit.engines.process import Process, free_port
from kvaudit.audit.engines.weights import safetensors_folder
from kvaudit.audit.engines.worker_client import parse_reply, python_with, vocabulary_size
from kvaudit.core.endpoint import Endpoint, Unanswered, over_http
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import clipped, inline, one_line
from kvaudit.core.threads import begun

_PORTS = 3  # tried, where somebody takes one before the engine does
_TAKEN = ("already in use", "EADDRINUSE", "is in use")
_LOOK, _KNOCK = 0.25, 5.0  # seconds between two looks at a server that starts, and for one of them
_TRIES = 2  # of one request: a server of ours has no reason to refuse one
_LONGEST = 32 << 20  # bytes of a reply: a long prompt comes back with it
_SETTLED = 3.0  # seconds in which a process whose line broke has ended, if it is to
_FLAG, _VARIABLE = re.compile(r"[a-z][a-z0-9_.]*"), re.compile(r"[A-Z][A-Z0-9_]*")
_WORD = re.compile(r"\w[\w.-]*", re.ASCII)  # a cache's dtype, by whatever name
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}

_Q = TypeVar("_Q")
_R = TypeVar("_R")


class ServedEngine(Engine):
    """An engine that is a server of its own environment: its settings are flags of its command line, and variables.

    It is known by its module, which has its ``name``. ``ours`` are the flags that are kvaudit's own to say.
    """

    ours: ClassVar[Collection[str]] = ()

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """See ``Engine.filled``; flags in one spelling."""
        spelled = one_spelling(settings)
        if len(spelled) < len(settings):
            twice = [name for name in settings if name not in spelled]
            raise SpecError(f"engine {cls.name} has a setting twice, in two spellings: {clipped(twice[0])!r}")
        check_flags(cls.name, spelled, cls.ours)
        return super().filled(spelled)

    @classmethod
    def kv(cls, text: str) -> Settings:
        """``kv_cache_dtype``, which the server's own parser knows."""
        # the server would load for a minute before it says so
        if not _WORD.fullmatch(text):
            raise SpecError(
                f"engine {cls.name}: --kv is {text[:80]!r}, wanted what stands behind kv_cache_dtype= alone, such as "
                "fp8_e5m2; give other settings by --set NAME=VALUE"
            )
        return {"kv_cache_dtype": text}

    @classmethod
    def check(cls, settings: Settings, part: EngineSpec) -> None:  # noqa: ARG003
        """Raise SpecError where it is not installed."""
        python_with((cls.name,), part, cls.name, cls.install)

    @classmethod
    def start(cls, settings: Settings, work: EngineContext) -> Session:
        weights = safetensors_folder(work, cls.name)
        session = cls.served_from(weights.path, settings, work)
        session.described = {**session.described, **weights.described}
        return session

    @classmethod
    def served_from(cls, folder: Path, settings: Settings, work: EngineContext) -> ServedSession:
        """The server at work on a checkpoint's folder."""
        raise NotImplementedError


class ServedSession(Session):
    """A session whose engine is a server that we start. Subclasses say how it is asked, and what it says it is.

    ``command`` starts it, with ``--port`` and, by the flag ``named``, the name that it is to serve the model under: by
    it we know it from another server that holds the port. ``health`` is a path that answers once it can be asked,
    ``path`` the one that is asked.
    """

    health: ClassVar[str] = "health"
    path: ClassVar[str] = ""

    def __init__(
        self, who: str, command: Sequence[str], named: str, work: EngineContext, environment: Mapping[str, str]
    ) -> None:
        self.name, self._part, self._tokens = f"kvaudit-{secrets.token_hex(4)}", work.part, vocabulary_size(work)
        self._who = who
        environment = {"OMP_NUM_THREADS": str(work.threads), **OFFLINE, **environment}
        for number in range(1, _PORTS + 1):
            port = free_port()
            words = [*command, f"--port={port}", f"{named}={self.name}"]
            self._process = Process(words, who=who, log=work.log, environment=environment, speaks=False)
            endpoint = Endpoint(f"http://127.0.0.1:{port}", timeout=self._part.answer, tries=_TRIES)
            self._client = endpoint.client("engine", partial(over_http, longest=_LONGEST))
            try:
                self._wait_until_up(port)
                self.described = {name: inline(one_line(text)) for name, text in self._described().items()}
                return
            except EngineFailed as error:
                # somebody took the port between our look and its start: try another
                if number == _PORTS or not any(word in str(error) for word in _TAKEN):
                    raise
            except BaseException:
                self.stop()
                raise

    @abstractmethod
    def _body(self, asked: GenerationRequest) -> dict[str, Any]:
        """A request as the engine takes it."""

    @abstractmethod
    def _row(self, said: Mapping[str, Any], asked: GenerationRequest) -> dict[str, Any]:
        """``ids``, ``finish`` and ``logprob`` of what it replied, and ``read`` where it says what prompt it read.

        Raises KeyError, IndexError, TypeError or ValueError for what is no reply.
        """

    @abstractmethod
    def _says_name(self) -> Any:
        """The name under which it serves its model; raises Unanswered, KeyError, IndexError or TypeError for none."""

    @abstractmethod
    def _described(self) -> dict[str, str]:
        """What the engine says it is; what it does not say is left out. The same at every start."""

    def answer(self, asked: Sequence[GenerationRequest]) -> list[Reply]:
        until = time.monotonic() + self._part.answer
        try:
            said = all_at_once(
                lambda one: self._client.fetch(self.path, self._body(one), until), asked, self._part.at_once, until
            )
        except Unanswered as why:
            if self._process.is_running and time.monotonic() >= until:  # whichever of them noticed it first
                limit = f"{self._part.answer:g} s (engines.{self._who}.answer)"
                raise self._process.failure(f"it has not answered all of {len(asked)} requests in {limit}") from None
            raise self._failed(f"it had {len(asked)} requests", why) from None
        return [self._checked(row, one) for row, one in zip(said, asked, strict=True)]

    def stop(self) -> None:
        self._process.stop()

    def _wait_until_up(self, port: int) -> None:
        until = time.monotonic() + self._part.start
        while True:
            if not self._process.is_running:
                raise self._process.failure("it ended while it started")
            if time.monotonic() > until:
                raise self._process.failure(
                    f"it has not answered {self._part.start:g} s (engines.{self._who}.start) after its start"
                )
            try:
                self._client.fetch_text(self.health, min(until, time.monotonic() + _KNOCK))
                break
            except Unanswered:
                time.sleep(_LOOK)
        try:
            known = self._says_name() == self.name
        except (Unanswered, KeyError, IndexError, TypeError):
            known = False
        if not known:
            raise self._process.failure(f"port {port} is in use by another server")

    def _failed(self, doing: str, why: Unanswered) -> EngineFailed:
        """Why there is no answer, once it is clear whether the process has ended."""
        until = time.monotonic() + _SETTLED
        while self._process.is_running and time.monotonic() < until and "Error" in str(why):
            time.sleep(_LOOK / 5)
        ended = not self._process.is_running
        return self._process.failure(f"it ended while {doing}" if ended else f"while {doing} it gave {why}")

    def _checked(self, said: Mapping[str, Any], asked: GenerationRequest) -> Reply:
        try:
            row = self._row(said, asked)
        except (KeyError, IndexError, TypeError, ValueError):
            row = {}
        found = parse_reply(row, asked, self._tokens)
        if found is None:
            shown = inline(one_line(str(said)))[:100]
            raise self._process.failure(f"it gave a reply that cannot be one to {asked.most} tokens: {shown}")
        if (place := first_difference(row.get("read", asked.ids), asked.ids)) is not None:
            raise self._process.failure(f"it read another prompt than it was sent: token {place} differs")
        return found

    def _fetched(self, path: str) -> dict[str, Any]:
        """An object that the engine shows, empty where it shows none."""
        try:
            return self._client.fetch(path, None, time.monotonic() + _KNOCK)
        except Unanswered:
            return {}

    def _shown(self, path: str) -> str:
        """A page that the engine shows, empty where it shows none."""
        try:
            return self._client.fetch_text(path, time.monotonic() + _KNOCK)
        except Unanswered:
            return ""


def first_difference(theirs: Any, ours: Sequence[int]) -> int | None:
    """The number of the first token that is not the same, None where all are."""
    if not isinstance(theirs, list | tuple):
        return 0
    pairs = zip(theirs, ours, strict=False)
    found = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    return min(len(theirs), len(ours)) if found is None and len(theirs) != len(ours) else found


def all_at_once(ask: Callable[[_Q], _R], asked: Sequence[_Q], at_once: int, until: float) -> list[_R]:
    """What ``ask`` gives for each, in order, ``at_once`` of them at a time.

    Raises the first Unanswered that one raises, and one of its own at the time ``until``.
    """
    began = time.monotonic()
    futures = begun(ask, asked, at_once)
    try:
        done, open_ = wait(futures, max(0.0, until - began), FIRST_EXCEPTION)
        failed = [error for future in done if (error := future.exception()) is not None]
        if failed:
            raise failed[0]
        if open_:
            raise Unanswered(f"nothing for {len(open_)} of {len(futures)} requests in {until - began:.3g} s")
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def one_spelling(settings: Settings) -> Settings:
    """The same settings with flags in one spelling: ``--kv-cache-dtype``, ``kv-cache-dtype`` and ``kv_cache_dtype``."""
    return {
        name if _VARIABLE.fullmatch(name) else name.removeprefix("--").replace("-", "_"): value
        for name, value in settings.items()
    }


def check_flags(engine: str, settings: Settings, ours: Collection[str]) -> None:
    """Raise SpecError for what is neither a flag nor a variable, and for what we say ourselves, shortened or not."""
    for name in settings:
        if any(own.startswith(name) for own in ours):  # parsers take the beginning of a flag for the whole
            raise SpecError(f"engine {engine}: {name} is not yours to set: {', '.join(sorted(ours))} are kvaudit's own")
        if not _FLAG.fullmatch(name) and not _VARIABLE.fullmatch(name):
            raise SpecError(
                f"engine {engine}: setting {clipped(name)!r} is no flag of a command line (kv_cache_dtype) and no "
                "variable of an environment (VLLM_CPU_KVCACHE_SPACE)"
            )


def flags(settings: Settings, *, negated: bool = True) -> list[str]:
    """The words of a command line; ``true`` is the bare flag, several words are a list.

    ``false`` is its ``--no-`` form, or, where the parser has none (not ``negated``), the flag left out.
    """
    named = {name: value for name, value in settings.items() if _FLAG.fullmatch(name)}
    return [word for name, value in named.items() if negated or value != "false" for word in _flag(name, value)]


def _flag(name: str, value: str) -> list[str]:
    flag = name.replace("_", "-")
    if value in ("true", "false"):
        return [f"--{flag}" if value == "true" else f"--no-{flag}"]
    several = value.split()
    # JSON is one value whatever spaces it holds
    if len(several) > 1 and value[0] not in "{[" and not any(word.startswith("-") for word in several):
        return [f"--{flag}", *several]
    return [f"--{flag}={value}"]


def variables(settings: Settings) -> dict[str, str]:
    """Those that go into the environment."""
    return {name: value for name, value in settings.items() if _VARIABLE.fullmatch(name)}
