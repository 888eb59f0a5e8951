"""report.md: the answers, the grid and what every section found, short; every word from a record is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvaudit.core.text import clip, inline
from kvaudit.reports.page.grid import grid_table
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.screen import Screen
from kvaudit.reports.sections.shared.tables import Passage, Table

FILE = "report.md"
_FINDING, _LIMITS = 400, 8  # characters of what a section found; limits that are told
_LEADING = re.compile(r"^(\s*)(?:([-+=])(?=[-+=]|\s+\S)|(\d+)([.)])(?=\s|$))")  # starts a list, a rule or a heading
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&$!])")


def render(page: Page) -> str:
    """The page as GitHub Markdown: the answers and the grid, and of every section what it found."""
    if page.screen is None:
        return _whole(page)
    screen, sections = page.screen, {section.anchor: section for section in page.sections}
    parts = [*screen_parts(screen), *(f"* {escape(line)}" for line in page.remarks)]
    parts += _section(sections["compared"]) if "compared" in sections else []
    parts += ["## What else was found", "Tables, figures and answers of these sections stand in report.html."]
    found = [section for section in page.sections if section.finding and section.anchor != "limits"]
    parts.append("\n".join(f"* **{escape(one.title)}**: {escape(clip(one.finding, _FINDING))}" for one in found))
    if "limits" in sections:
        notes = sections["limits"].notes
        parts += ["## Limits", "\n".join(f"* {escape(note)}" for note in notes[:_LIMITS])]
    return "\n\n".join(part for part in parts if part) + "\n"


def screen_parts(screen: Screen, words: int = 900) -> Iterator[str]:
    """The first screen; of a large grid as many rows as ``words`` allow, no fewer than one."""
    yield f"# {escape(screen.title)}: {escape(screen.status.value)}"
    if screen.alarm:
        yield f"> **{escape(screen.alarm)}**"
    yield " · ".join(f"{escape(name)} **{escape(text)}**" for name, text in screen.facts)
    yield "\n".join(f"* **{escape(answer.asks)}** {escape(answer.line)}" for answer in screen.answers)
    yield "\n".join(f"* {escape(line)}" for line in screen.instead)
    grid = screen.grid
    if grid.rows:
        # about four words a cell
        most = max(1, words // (4 * (len(grid.columns) + 2)))
        left = grid.left_out + max(0, len(grid.rows) - most)
        yield as_table(grid_table(grid, most))
        more = f" {left} more rows stand in contrasts.csv." if left else ""
        yield escape(f"{grid.signs}.{more}")


def _whole(page: Page) -> str:
    """A page without a first screen, every section of it."""
    top = page.banner
    parts = [f"# {escape(top.title)}", f"**{escape(top.status.value)}**: {escape(top.sentence)}"]
    if top.alarm:
        parts.insert(1, f"> **{escape(top.alarm)}**")
    if top.number:
        parts.append(f"**{escape(top.number)}** {escape(top.about)}")
    parts.append("\n".join(f"* {escape(line)}" for line in top.banner_lines))
    for section in page.sections:
        parts += _section(section)
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    """One line in which nothing is markup: pipes, backticks, HTML, links and newlines included."""
    shown = _SPECIAL.sub(r"\\\1", inline(text)).replace("\\&", "&amp;")
    # a zero-width space, so that nothing becomes a link
    shown = re.sub(r"(?i)(https?|ftp|www)(?=[:.])", r"\1&#8203;", shown)
    shown = re.sub(r"@(?=\w)", "@&#8203;", shown)  # an address or a mention
    return _LEADING.sub(lambda m: f"{m[1]}\\{m[2]}" if m[2] else f"{m[1]}{m[3]}\\{m[4]}", shown)


def _section(section: Passage) -> Iterator[str]:
    yield f"## {escape(section.title)}"
    if section.finding:
        yield f"**{escape(section.finding)}**"
    yield escape(section.explain)
    if section.figures:
        yield "(The figure stands in the HTML page.)"
    for table in section.tables:
        if table:
            yield as_table(table)
        if table.footnotes:
            yield "\n".join(f"* Note {i}: {escape(text)}" for i, text in enumerate(table.footnotes, 1))
    if section.notes:
        yield "\n".join(f"* {escape(note)}" for note in section.notes)


def as_table(table: Table) -> str:
    """A table as Markdown."""
    marks = ["---" if i < table.words else "---:" for i in range(len(table.headers))]
    rows = [table.headers, marks, *table.rows]
    return "\n".join("| " + " | ".join(c if r is marks else escape(c) for c in r) + " |" for r in rows)
