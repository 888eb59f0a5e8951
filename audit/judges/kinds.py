"""The kinds of graders, and one way to read a grader of any kind."""

from __future__ import annotations

from typing import Any

from kvaudit.audit.judges.base import JUDGES
from kvaudit.audit.judges.grader import Grader
from kvaudit.audit.judges.guards.base import GUARDS
from kvaudit.core.options import parse_named
from kvaudit.core.registry import Registry

KINDS: dict[str, Registry[Any]] = {"judge": JUDGES, "guard": GUARDS}


def parse_grader(kind: str, text: str) -> Grader[Any, Any]:
    """The grader of ``NAME`` or ``NAME:field=value,field=value``; raises SpecError for what its kind does not know."""
    found: Grader[Any, Any] = parse_named(KINDS[kind], text)
    return found
