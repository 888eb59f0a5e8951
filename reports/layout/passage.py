"""What stands on a page under one heading, as plain values that every format prints."""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.reports.analysis.examples import Example
from kvaudit.reports.layout.tables import Table


@dataclass(frozen=True)
class Passage:
    """A heading, one sentence for a stranger, then figures, tables and notes.

    It stands on the ``first`` page, under the banner, or is folded: then ``finding`` says in a line what it found.
    """

    anchor: str
    title: str
    explain: str
    figures: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    examples: tuple[Example, ...] = ()
    first: bool = False
    finding: str = ""

    @property
    def says_something(self) -> bool:
        """Whether there is more than a heading."""
        return any(self.tables) or bool(self.figures or self.notes or self.examples)
