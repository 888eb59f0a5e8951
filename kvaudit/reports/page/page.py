"""A page as plain values: every format prints the same banner and the same sections."""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.screen import Screen
from kvaudit.reports.sections.shared.tables import Passage
from kvaudit.reports.verdict.verdict import Status


@dataclass(frozen=True)
class Banner:
    """The top of a page, to be read by whoever signs it.

    ``alarm`` must be seen before anything else; it is empty where all is as declared. ``banner_lines`` are what to
    do, what is deployed, what the claim is about, and whatever is not as it should be.
    """

    title: str
    status: Status
    sentence: str
    number: str  # of the cell that decides, with its interval and margin; empty without one
    about: str
    banner_lines: tuple[str, ...]
    alarm: str = ""


@dataclass(frozen=True)
class Page:
    """What a format renders, and what it was written from. No format decides anything."""

    findings: Findings
    banner: Banner
    sections: tuple[Passage, ...]  # those of the first page first
    remarks: tuple[str, ...] = ()  # that must stand wherever the verdict does
    screen: Screen | None = None  # the answers; None of what compares two files
