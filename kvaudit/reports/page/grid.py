"""The grid of a run: who was served how, by what was counted; each cell the rates before and after, and what it means.

It reads without colour: a sign stands in every cell, and its meaning is spelled for whoever cannot see either.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.core.facets import SERVING
from kvaudit.core.text import inline
from kvaudit.reports.page.answers import (
    QUESTIONS,
    rates_text,
    limit_text,
    severity_order,
    change_text,
    question_of,
    metric_text,
)
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.findings import flips_link
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import PRECEDENCE, Decision, Status

MOST_GRID_ROWS = 40  # of a grid on a page; every row stands in contrasts.csv
_LOOKS = {  # of a status: its sign where there is no colour, and the same in a word or two
    Status.PASS: ("✓", "holds"),
    Status.PASS_NOTED: ("✓", "a little worse, within the limit"),
    Status.FAIL: ("✗", "worse"),
    Status.NOT_MEASURABLE: ("∅", "not measurable"),
    Status.INCONCLUSIVE: ("?", "open"),
    Status.INVALID: ("!", "no valid number"),
    Status.WAIVED: ("w", "let through by a waiver"),
}
SIGNS, MEANS = ({status: look[place] for status, look in _LOOKS.items()} for place in (0, 1))


@dataclass(frozen=True)
class GridCell:
    """One gated cell as it is shown; ``says`` is all of it in words, ``link`` where its flips are listed.

    ``limit_text`` stands in it where nothing can be pointed at: a telephone has no place for ``says``.
    """

    status: Status
    text: str
    says: str
    bound: str = ""
    link: str = ""

    @property
    def sign(self) -> str:
        """What stands for its status where there is no colour."""
        return SIGNS[self.status]

    @property
    def means(self) -> str:
        """The same in a word or two."""
        return MEANS[self.status]


@dataclass(frozen=True)
class GridRow:
    """Who was served how, and its cells by column; None where nothing was asked."""

    question: str
    name: str
    cells: tuple[GridCell | None, ...]


@dataclass(frozen=True)
class Grid:
    """``columns`` are what is counted; ``left_out`` rows stand in contrasts.csv alone."""

    columns: tuple[str, ...]
    rows: tuple[GridRow, ...]
    left_out: int = 0

    @property
    def signs(self) -> str:
        """What the signs in it mean."""
        met = {cell.status for row in self.rows for cell in row.cells if cell}
        return ", ".join(f"{SIGNS[status]} {MEANS[status]}" for status in Status if status in met)


def grid_of(findings: Findings) -> Grid:
    """The gated cells of a run: questions in their order, the worst settings first where not all have room."""
    sides = findings.comparison
    gated = findings.verdict.gated
    columns = list(dict.fromkeys(metric_text(sides, d) for d in gated))
    placed: dict[tuple[str, str], dict[str, Decision]] = {}
    for d in gated:
        placed.setdefault((question_of(sides, d), _row_name(sides, d)), {})[metric_text(sides, d)] = d
    order = sorted(placed, key=lambda key: QUESTIONS.index(key[0]))
    kept = order
    if len(order) > MOST_GRID_ROWS:
        rank = severity_order(sides)
        worst_first = sorted(order, key=lambda key: min(map(rank, placed[key].values())))
        # in the order of the questions again
        kept = [key for key in order if key in set(worst_first[:MOST_GRID_ROWS])]
    rows = tuple(GridRow(key[0], key[1], tuple(_cell(findings, placed[key].get(c)) for c in columns)) for key in kept)
    return Grid(tuple(columns), rows, len(order) - len(kept))


def grid_table(grid: Grid, most: int = MOST_GRID_ROWS) -> Table:
    """The grid as plain text; the ``most`` worst of its rows, in its own order."""
    headers = ["question", "before → after", *grid.columns]
    worst_first = sorted(range(len(grid.rows)), key=lambda place: _grave(grid.rows[place]))
    kept = [grid.rows[place] for place in sorted(worst_first[:most])]
    rows = [[row.question, row.name, *(f"{c.sign} {c.text}" if c else "-" for c in row.cells)] for row in kept]
    return table_of(headers, rows, words=2)


def _grave(row: GridRow) -> int:
    """The place of its worst cell in the order of statuses, the gravest first."""
    return min((PRECEDENCE.index(cell.status) for cell in row.cells if cell), default=len(PRECEDENCE))


def _row_name(sides: Comparison, d: Decision) -> str:
    """int8, of the reference; naive @ snapkv 112, of an arm."""
    setting = f"worst of {len(d.policies)}" if len(d.policies) > 1 else sides.label(d.policy)
    return inline(setting if question_of(sides, d) == SERVING else f"{d.arm} @ {setting}")


def _cell(findings: Findings, d: Decision | None) -> GridCell | None:
    if d is None:
        return None
    sides = findings.comparison
    says = change_text(sides, d) if d.effect else metric_text(sides, d)
    why = "; ".join(reason.text for reason in d.reasons)
    standing = Status.INVALID if findings.verdict.reasons else d.standing
    return GridCell(
        standing,
        rates_text(sides, d) if d.effect else "no number",
        inline(f"{MEANS[standing]}: {says}" + (f". {why}" if why else "")),
        limit_text(sides, d) if d.effect else "",
        flips_link(findings, d),
    )
