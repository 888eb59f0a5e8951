"""A page as plain values: every format prints the same banner and the same sections."""

from __future__ import annotations

from dataclasses import dataclass

from reports.gate.verdict import Status
from reports.page.findings import Findings
from reports.page.tables import Table


@dataclass(frozen=True)
class Banner:
    """The top of a page. ``alarm`` must be seen before anything else; it is empty where all is as declared."""

    title: str
    status: Status
    sentence: str
    number: str  # of the cell that decides; empty without one
    about: str
    asides: tuple[str, ...]
    alarm: str = ""


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


@dataclass(frozen=True)
class Page:
    """What a format renders, and what it was written from. No format decides anything."""

    findings: Findings
    banner: Banner
    sections: tuple[Section, ...]
    remarks: tuple[str, ...] = ()  # that must stand wherever the verdict does
