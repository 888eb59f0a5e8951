"""A user's Python function as the reward, given by name.

    def short(rows: Sequence[GradedRow], **options) -> list[float | None]

It gets the rollouts of a step (``kvaudit.audit.sampling.conversations.GradedRow``: item, transcript, the suite's grade,
tokens) and returns one number for each. It must be deterministic, because a resumed run calls it again.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from kvaudit.audit.training.rewards.base import GradedRows, Reward, Scores
from kvaudit.core.errors import AuditError, RunError, SpecError
from kvaudit.core.plugins import sha256_of
from kvaudit.core.text import reason, short_repr
from kvaudit.suites.base import Suite


@dataclass(frozen=True)
class Function(Reward):
    """The reward that a Python function gives; a spec names it as ``module:name``.

    The module must be on Python's path or in the working directory.

    Its identity is the hash of the file that defines it; files which that file imports or opens are not hashed.
    """

    name = "function"
    says = "a function of yours, by module:name"
    takes = ("function", "whatever the function takes")

    function: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, value: Any, options: Mapping[str, Any]) -> Self:
        module, _, name = value.partition(":") if isinstance(value, str) else ("", "", "")
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise SpecError(f"reward function is {short_repr(value)}, wanted package.module:name")
        return cls(value, dict(options))

    @property
    def identity(self) -> str:
        return sha256_of(self.function, self._source, dict(self.options))

    @property
    def inputs(self) -> Mapping[str, str]:
        return {f"source of reward {self.function}": self._source}

    def check(self, suites: Sequence[Suite]) -> None:
        try:
            inspect.signature(self._function).bind([], **self.options)
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"reward function {self.function!r} cannot be called with the rollouts and {sorted(self.options)}: "
                f"{error}"
            ) from None
        super().check(suites)

    def rewards(self, rows: GradedRows) -> Scores:
        try:
            scores: Scores = self._function(list(rows), **self.options)
        except AuditError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything, or call exit
            # the line that failed, not the line that called it
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise RunError(
                f"reward function {self.function!r} fails: {reason(error)} "
                f"({Path(last.filename).name} line {last.lineno})"
            ) from error
        return scores

    @cached_property
    def _function(self) -> Callable[..., Any]:
        module, _, path = self.function.partition(":")
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # last, so that installed packages are found first
        try:
            value: Any = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise SpecError(
                f"reward function {self.function!r}: {module} cannot be imported ({reason(error)}); "
                f"install it, or start in the folder of {module.split('.')[0]}.py"
            ) from error
        for part in path.split("."):
            if not hasattr(value, part):
                raise SpecError(f"reward function {self.function!r}: {module} has no {path}; check the name")
            value = getattr(value, part)
        if not callable(value):
            raise SpecError(f"reward function {self.function!r} is a {type(value).__name__}, wanted a function")
        function: Callable[..., Any] = value
        return function

    @cached_property
    def _source(self) -> str:
        try:
            # unwrapped, because decorators may be defined in other files
            path = inspect.getsourcefile(inspect.unwrap(self._function))
        except TypeError:
            path = None
        if path is None or not Path(path).is_file():
            raise SpecError(
                f"reward function {self.function!r} has no source file to hash; wrap it in a Python function"
            )
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
