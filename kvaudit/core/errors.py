"""The exceptions that users see; each message is one line: what is wrong, got, expected, and what to do.

AuditError
├── SpecError       the user's specification or option is wrong            exit 2
│   ├── UnknownName a name that no plug-in has, with a suggestion          exit 2
│   └── CannotPass  too few items or templates for a margin                exit 2
├── DataError       a checkpoint, record, ledger or data file is missing or corrupt   exit 2
│   └── OffScale    a score on another scale than [0, 1]                               exit 2
├── RunError        the run cannot go on here (folder of another spec, full disk)     exit 2
└── NotMeasurable   the reference lacks, in some suites, the behaviour that could be lost exit 6
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar


class AuditError(Exception):
    """The base of errors that the user can fix; the command line prints it as one line and exits with 2.

    ``lines`` are details, printed below that line.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str = "", lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


class SpecError(AuditError):
    """A specification, option or policy string is invalid."""


class UnknownName(SpecError):
    """A name that no plug-in or option has; the message lists the known names."""

    def __init__(self, kind: str, name: str, names: Iterable[str]) -> None:
        names = sorted(names)
        hint = did_you_mean(name, names, cutoff=0.5)
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}")


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a sentence that suggests the closest name, empty if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


class CannotPass(SpecError):
    """The gate cannot pass: some metrics have so few items or templates that they would be INCONCLUSIVE in any case.

    ``lines`` name these metrics, one each.
    """


class NotMeasurable(AuditError):
    """The reference already fails in some suites, as trial answers showed, so that no loss could be measured there."""

    exit_code = 6


class DataError(AuditError):
    """A data file is missing, truncated, changed or of another format."""


class OffScale(DataError):
    """A finite score outside [0, 1], on another scale such as 0 to 100; the file is not damaged."""

    def __init__(self, score: float) -> None:
        super().__init__(f"score {score:g} is outside [0, 1]")
        self.score = score


class RunError(AuditError):
    """The run cannot continue: the folder of another spec, no disk space, a model that cannot be served."""
