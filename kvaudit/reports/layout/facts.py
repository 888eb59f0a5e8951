"""What a disclosure says: every fact is there as known, unknown or not applicable, so that what is missing shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Fact(NamedTuple):
    """One thing that a disclosure owes its reader. ``value`` is plain JSON, None unless ``state`` is known."""

    state: Literal["known", "unknown", "not applicable"]
    value: Any = None


UNKNOWN, NOT_APPLICABLE = Fact("unknown"), Fact("not applicable")
Facts = Mapping[str, Fact]


def known(value: Any) -> Fact:
    """The value, or unknown where there is none."""
    return UNKNOWN if value is None or value == "" else Fact("known", value)


@dataclass(frozen=True)
class Owed:
    """Several things of one kind that a disclosure tells alike, with a table of details of each.

    ``key`` is their place in disclosure.json, ``one`` what a single one is called in a bill of materials. The details
    are the rows under the fact ``details``; ``columns`` are their headings on a card, and under which names they stand.
    """

    key: str
    one: str
    title: str
    rows: tuple[Facts, ...]
    details: str
    columns: Mapping[str, str]

    @property
    def heads(self) -> list[Facts]:
        """Each without its details."""
        return [{name: fact for name, fact in row.items() if name != self.details} for row in self.rows]
