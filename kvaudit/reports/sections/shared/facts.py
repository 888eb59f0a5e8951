"""What a disclosure says: every fact is there as known, unknown or not applicable, so that what is missing shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Fact(NamedTuple):
    """One thing that a disclosure owes its reader. ``value`` is plain JSON, None unless ``state`` is known."""

    state: Literal["known", "unknown", "not applicable"]
    value: Any = None


UNKNOWN, NOT_APPLICABLE = Fact("unknown"), Fact("not applicable")
Facts = Mapping[str, Fact]


def fact_of(value: Any) -> Fact:
    """The value, or unknown where there is none."""
    return UNKNOWN if value is None or value == "" else Fact("known", value)
