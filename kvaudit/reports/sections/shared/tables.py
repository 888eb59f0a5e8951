"""Tables, examples and passages (parts of a page) as plain strings.

Control characters are made visible here; markup is escaped later, by each format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvaudit.core.records import Role
from kvaudit.core.text import clip, inline


@dataclass(frozen=True)
class Table:
    """Headers and rows of text; an empty table is not shown. ``words`` is the number of leading text columns.

    ``footnotes`` are numbered from 1; the last column refers to them. ``links`` are the addresses, one per row, of
    pages with the row's answers, for a format that can link.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = field(default=())
    words: int = 1
    footnotes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)


def table_of(headers: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """Return a table of one-line texts: long cells are clipped and control characters made visible.

    ``words`` is the number of leading columns that hold text.
    """
    first, *clean = (tuple(inline(clip(cell, 300)) for cell in row) for row in (headers, *rows))
    assert all(len(row) == len(first) for row in clean), headers
    return Table(first, tuple(clean), words)


def footnoted(headers: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """Return a table whose last column refers to footnotes by number, in place of its long, repeated texts.

    ``words`` is the number of leading columns that hold text.
    """
    long_rows = [list(row) for row in rows]
    texts = list(dict.fromkeys(row[-1] for row in long_rows if row[-1]))
    short = [[*row[:-1], str(texts.index(row[-1]) + 1) if row[-1] else ""] for row in long_rows]
    return replace(table_of(headers, short, words), footnotes=tuple(inline(clip(text, 300)) for text in texts))


@dataclass(frozen=True)
class ExampleTurn:
    """One message of an example; ``text`` comes from the model or the suite and must be escaped."""

    role: str
    text: str


@dataclass(frozen=True)
class Example:
    """An example of a loss: an item that the reference got right and the candidate wrong.

    ``kept`` is the share of the prompt's entries that the candidate's cache still held when its last answer began, by
    role; empty if the engine does not show its cache. ``is_doubtful`` is whether the judge was unsure of one of the two
    answers, or one is hardly coherent.
    """

    estimand: str
    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    item_id: str
    cluster_id: str
    loss: float
    outcome: str
    candidate: tuple[ExampleTurn, ...]
    reference_answer: str
    kept: tuple[tuple[str, float], ...] = ()
    is_doubtful: bool = False

    @property
    def asked(self) -> str:
        """The last message to the candidate before its last answer."""
        return next((t.text for t in reversed(self.candidate) if t.role != Role.ASSISTANT.value), "")

    @property
    def answer(self) -> str:
        """The candidate's last answer."""
        return next((t.text for t in reversed(self.candidate) if t.role == Role.ASSISTANT.value), "")


@dataclass(frozen=True)
class Passage:
    """A heading and one explaining sentence, then figures, tables, notes and examples.

    If ``first``, it is shown in full below the banner. Otherwise it is folded, and its ``finding`` is the visible line.
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
