"""A function of somebody else's as the reward, by its name.

    def short(played: Sequence[GradedRow], **options) -> list[float | None]

It gets the rollouts of a step (``kvaudit.audit.sampling.conversations.GradedRow``: item, transcript, the suite's grade,
tokens) and gives one number for each. A run that is resumed asks again, so the same rollouts must earn the same.
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
    """``function`` is ``module:name``, found as Python finds modules, or else in the working directory.

    Its hash is that of the whole file that it stands in; what that file imports or opens is not known here.
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
            # as it will be called, with no rollouts yet
            inspect.signature(self._called).bind([], **self.options)
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"reward function {self.function!r} cannot be called with the rollouts and {sorted(self.options)}: "
                f"{error}"
            ) from None
        super().check(suites)

    def rewards(self, played: GradedRows) -> Scores:
        try:
            scores: Scores = self._called(list(played), **self.options)
        except AuditError:
            raise
        except (Exception, SystemExit) as error:  # an outsider's code may raise anything, or end the command
            # where it failed, not where it was called
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise RunError(
                f"reward function {self.function!r} fails: {reason(error)} "
                f"({Path(last.filename).name} line {last.lineno})"
            ) from error
        return scores

    @cached_property
    def _called(self) -> Callable[..., Any]:
        module, _, path = self.function.partition(":")
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # last, so that nothing there stands in for an installed package
        try:
            found: Any = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise SpecError(
                f"reward function {self.function!r}: {module} cannot be imported from here ({reason(error)}); "
                f"install it, or start where {module.split('.')[0]}.py lies"
            ) from error
        for part in path.split("."):
            if not hasattr(found, part):
                raise SpecError(f"reward function {self.function!r}: {module} has no {path}; name one that it has")
            found = getattr(found, part)
        if not callable(found):
            raise SpecError(f"reward function {self.function!r} is a {type(found).__name__}, wanted a function")
        called: Callable[..., Any] = found
        return called

    @cached_property
    def _source(self) -> str:
        try:
            # behind decorators, which may stand in other files
            path = inspect.getsourcefile(inspect.unwrap(self._called))
        except TypeError:
            path = None
        if path is None or not Path(path).is_file():
            raise SpecError(
                f"reward function {self.function!r} has no source file that could be hashed; wrap it in one"
            )
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
