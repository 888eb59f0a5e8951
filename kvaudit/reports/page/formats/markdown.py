"""report.md: the answers, the grid and the finding of every section; all text from records is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from kvaudit.core.text import clip, inline
from kvaudit.reports.page.page import Grid, Page, Screen, grid_table
from kvaudit.reports.sections.shared.tables import Passage, Table

_FINDING, _LIMITS = 400, 8  # characters of a section's finding; number of limits
_LEADING = re.compile(r"^(\s*)(?:([-+=])(?=[-+=]|\s+\S)|(\d+)([.)])(?=\s|$))")  # starts a list, a rule or a heading
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&$!])")


def render(page: Page) -> str:
    """Return the page as GitHub Markdown."""
    if page.screen is None:
        return _without_screen(page)
    screen, sections = page.screen, {section.anchor: section for section in page.sections}
    parts = [*screen_parts(screen), *(f"* {escape(line)}" for line in page.remarks)]
    parts += _section(sections["compared"]) if "compared" in sections else []
    parts += ["## Other findings", "The tables, figures and answers of these sections are in report.html."]
    others = [section for section in page.sections if section.finding and section.anchor != "limits"]
    parts.append(
        "\n".join(f"* **{escape(section.title)}**: {escape(clip(section.finding, _FINDING))}" for section in others)
    )
    if "limits" in sections:
        notes = sections["limits"].notes
        parts += ["## Limits", "\n".join(f"* {escape(note)}" for note in notes[:_LIMITS])]
    return "\n\n".join(part for part in parts if part) + "\n"


def screen_parts(screen: Screen, words: int = 900) -> Iterator[str]:
    """Yield the paragraphs of the first screen.

    A large grid is cut to about ``words`` words, but never to less than one row.
    """
    yield f"# {escape(screen.title)}: {escape(screen.status.value)}"
    if screen.alarm:
        yield f"> **{escape(screen.alarm)}**"
    yield " · ".join(f"{escape(name)} **{escape(text)}**" for name, text in screen.facts)
    yield "\n".join(f"* **{escape(answer.asks)}** {escape(answer.line)}" for answer in screen.answers)
    yield "\n".join(f"* {escape(line)}" for line in screen.suggestions)
    yield from grid_parts(
        screen.grid, max(1, words // (4 * (len(screen.grid.columns) + 2)))
    )  # a cell has about 4 words


def grid_parts(grid: Grid, n_rows: int) -> Iterator[str]:
    """Yield the ``n_rows`` worst rows of the grid as a table, then the legend of its signs.

    Yields nothing if the grid has no rows.
    """
    if grid.rows:
        n_omitted = grid.left_out + max(0, len(grid.rows) - n_rows)
        yield markdown_table(grid_table(grid, n_rows))
        yield escape(f"{grid.signs}." + (f" {n_omitted} more rows are in contrasts.csv." if n_omitted else ""))


def _without_screen(page: Page) -> str:
    """Return as Markdown a page that has no first screen, such as a comparison of two files: every section in full."""
    top = page.banner
    parts = [f"# {escape(top.title)}", f"**{escape(top.status.value)}**: {escape(top.sentence)}"]
    if top.alarm:
        parts.insert(1, f"> **{escape(top.alarm)}**")
    if top.number:
        parts.append(f"**{escape(top.number)}** {escape(top.about)}")
    parts.append("\n".join(f"* {escape(line)}" for line in top.lines))
    for section in page.sections:
        parts += _section(section)
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    """Return the text as one line without markup: pipes, backticks, HTML, links and newlines are escaped."""
    escaped = _SPECIAL.sub(r"\\\1", inline(text)).replace("\\&", "&amp;")
    # a zero-width space, so that no address becomes a link
    escaped = re.sub(r"(?i)(https?|ftp|www)(?=[:.])", r"\1&#8203;", escaped)
    escaped = re.sub(r"@(?=\w)", "@&#8203;", escaped)  # an address or a mention
    return _LEADING.sub(lambda m: f"{m[1]}\\{m[2]}" if m[2] else f"{m[1]}{m[3]}\\{m[4]}", escaped)


def _section(section: Passage) -> Iterator[str]:
    yield f"## {escape(section.title)}"
    if section.finding:
        yield f"**{escape(section.finding)}**"
    yield escape(section.explain)
    if section.figures:
        yield "(The figure is in the HTML page.)"
    for table in section.tables:
        if table:
            yield markdown_table(table)
        if table.footnotes:
            yield "\n".join(f"* Note {i}: {escape(text)}" for i, text in enumerate(table.footnotes, 1))
    if section.notes:
        yield "\n".join(f"* {escape(note)}" for note in section.notes)


def markdown_table(table: Table) -> str:
    """Return a table as Markdown."""
    headers, *rows = ([escape(cell) for cell in row] for row in (table.headers, *table.rows))
    return pipe_table(headers, rows, words=table.words)


def pipe_table(headers: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """Return a Markdown table; the texts of its cells must be Markdown already.

    The first ``words`` columns are aligned left, the others right.
    """
    marks = ["---" if i < words else "---:" for i in range(len(headers))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headers, marks, *rows))


FORMATS = {"report.md": render}
