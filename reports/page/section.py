"""A part of the report, as every format prints it."""

from __future__ import annotations

from dataclasses import dataclass

from reports.page.tables import Table


@dataclass(frozen=True)
class Section:
    """A heading, one sentence for a stranger, then figures, tables and notes. ``folded`` starts closed on screen."""

    anchor: str
    title: str
    explain: str
    figures: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    examples: bool = False
    folded: bool = False
