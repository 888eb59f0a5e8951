"""Tables and passages as plain strings; text from records is not escaped yet, only made visible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvaudit.core.text import clip, inline
from kvaudit.reports.sections.shared.tables import Example


@dataclass(frozen=True)
class Table:
    """Headers and rows of text; an empty table is left out. ``words`` are the leading columns that hold words.

    ``footnotes`` stand under the table, the first of them under number 1: what its last column refers to. ``links``
    are the addresses of the answers behind each row, for a page that can link.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = field(default=())
    words: int = 1
    footnotes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)


def table_of(headers: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """A table of clipped, visible text on one line, headers too: a suite's name may stand there."""
    first, *clean = (tuple(inline(clip(cell, 300)) for cell in row) for row in (headers, *rows))
    assert all(len(row) == len(first) for row in clean), headers
    return Table(first, tuple(clean), words)


def footnoted(headers: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """A table whose last column, long texts that repeat, becomes numbers of footnotes."""
    found = [list(row) for row in rows]
    texts = list(dict.fromkeys(row[-1] for row in found if row[-1]))
    short = [[*row[:-1], str(texts.index(row[-1]) + 1) if row[-1] else ""] for row in found]
    return replace(table_of(headers, short, words), footnotes=tuple(inline(clip(text, 300)) for text in texts))


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
    def has_content(self) -> bool:
        """Whether there is more than a heading."""
        return any(self.tables) or bool(self.figures or self.notes or self.examples)
