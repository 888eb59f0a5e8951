"""Engines that are a library: a worker process of ours holds them, in whatever environment they are installed."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvaudit.audit.engines.base import GenerationRequest, EngineFailed, Reply, Session, EngineContext
from kvaudit.audit.engines.process import Process
from kvaudit.audit.engines.weights import EngineCheckpoint
from kvaudit.core.completions import finish_of
from kvaudit.core.errors import SpecError
from kvaudit.core.spec import expand
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import clip, inline, is_text, one_line, shown

T = TypeVar("T")
# characters of an engine's own refusal: what matters stands at its end as often as at its beginning
_LONGEST_REFUSAL = 600
_INSIDE = Path(__file__).with_name("inside")


class WorkedSession(Session):
    """A session whose engine is in a worker. ``inside`` names its file there; ``setup`` is what it is started with.

    ``weights`` are those that it serves.
    """

    def __init__(
        self,
        who: str,
        inside: str,
        setup: Mapping[str, Any],
        work: EngineContext,
        python: str,
        weights: EngineCheckpoint | None = None,
    ) -> None:
        self._who, self._part, self._tokens = who, work.part, vocabulary_of(work)
        command = [python, str(_INSIDE / "worker.py"), str(_INSIDE / inside)]
        self._lines = 0  # that it was sent
        threads = {"OMP_NUM_THREADS": str(work.threads)}
        self._process = Process(command, who=who, log=work.log, environment=threads)
        try:
            line = {"start": {**setup, "threads": work.threads, "at_once": work.part.at_once}}
            found = self._exchange(line, "start", "it started", "about", dict)
            own = {str(name): inline(one_line(str(value)))[:300] for name, value in found.items()}
            self.described = own | (weights.described if weights else {})
        except BaseException:
            self.stop()
            raise

    def answer(self, asked: Sequence[GenerationRequest]) -> list[Reply]:
        # conversations are for engines that take no tokens
        rows = [{name: value for name, value in one._asdict().items() if name != "messages"} for one in asked]
        found = self.ask(rows, f"it had {len(asked)} requests")
        return [self.read(row, one) for row, one in zip(found, asked, strict=True)]

    def ask(self, rows: Sequence[Mapping[str, Any]], doing: str) -> list[Any]:
        """What the worker replies to each of some rows; raises EngineFailed."""
        found = self._exchange({"ask": rows}, "answer", doing, "replies", list)
        if len(found) != len(rows):
            raise self._process.failure(f"it gave another number of replies than the {len(rows)} that were asked for")
        return found

    def stop(self) -> None:
        self._process.stop()

    def _exchange(self, row: Mapping[str, Any], patience: str, doing: str, name: str, kind: type[T]) -> T:
        """What the worker says under ``name`` to a row; raises EngineFailed for what is nothing of the kind.

        ``patience`` is the field of the spec that says for how long it is waited for.
        """
        self._lines += 1
        seconds = float(getattr(self._part, patience))
        self._process.say(json.dumps(row), seconds)
        line = self._process.hear(seconds, doing, f"engines.{self._who}.{patience}")
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            raise self._process.failure("it says what is no JSON") from None
        if isinstance(said, dict) and said.get("to") != self._lines:
            raise self._process.failure("it spoke out of turn")
        if isinstance(said, dict) and "error" in said:
            self.stop()
            why = str(said["error"])
            why = " ".join((why if is_text(why) else repr(why)).split())
            raise EngineFailed(f"engine {self._who} refuses: {inline(clip(why, _LONGEST_REFUSAL))}")
        found = said.get(name) if isinstance(said, dict) else None
        if not isinstance(found, kind):
            raise self._process.failure(f"it says {shown(said)}, wanted {name}")
        return found

    def read(self, row: Any, asked: GenerationRequest) -> Reply:
        """A reply that can be one to what was asked; raises EngineFailed."""
        found = as_reply(row, asked, self._tokens)
        if found is None:
            raise self._process.failure(f"it gave a reply that cannot be one to {asked.most} tokens: {shown(row)}")
        return found


def as_reply(row: Any, asked: GenerationRequest, tokens: int) -> Reply | None:
    """A reply that can be one to what was asked of a model of so many ``tokens``; None for any other."""
    try:
        ids, finish, logprob = row["ids"], finish_of(row["finish"]), row["logprob"]
        good = isinstance(ids, list) and len(ids) <= asked.most and finish is not None
        # no truth values, which are whole numbers to Python
        good = good and all(type(token) is int and 0 <= token < tokens for token in ids)
        good = good and (logprob is None or math.isfinite(logprob))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None
    if not good or finish is None:
        return None
    return Reply(tuple(ids), finish, None if logprob is None else float(logprob))


def vocabulary_of(work: EngineContext) -> int:
    """How many tokens the model knows."""
    return int(work.model.model.get_input_embeddings().weight.shape[0])


def python_of(named: str | None, name: str) -> str:
    """The interpreter that holds an engine: its own environment's, or ours; raises SpecError where there is none."""
    if named is None:
        return sys.executable
    path = Path(expand(f"engines.{name}.python", named)).expanduser()
    if not path.is_file():
        raise SpecError(f"engines.{name}.python is {str(path)!r}, which is no file; give the python of its environment")
    return str(path)


def python_with(modules: Sequence[str], part: EngineSpec, name: str, install: str) -> str:
    """The interpreter that has an engine's modules: its own environment's, or ours.

    Raises SpecError where there is none, or it lacks one of them, with the line that installs the engine.
    """
    python = python_of(part.python, name)
    lacking = [one for one in modules if not _has(one)] if part.python is None else _lacking(python, modules, name)
    if lacking:
        where = f" for {python}" if part.python is not None else ""
        raise SpecError(f"engine {name} is not installed{where}: {install} (no module {lacking[0]})")
    return python


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of what it is a part of
        return False


_LOOK = """
import sys
from importlib.util import find_spec
for module in sys.argv[1:]:
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        print(module)
"""


def _lacking(python: str, modules: Sequence[str], name: str) -> list[str]:
    """The modules that another interpreter does not find."""
    try:
        done = subprocess.run([python, "-c", _LOOK, *modules], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        raise SpecError(
            f"engines.{name}.python is {python!r}, which does not run; give the python of its environment"
        ) from None
    return done.stdout.split()
