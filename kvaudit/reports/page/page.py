"""A page as plain values: the first screen with its answers and grid, the banner and the sections.

The grid can be read without colour: every cell has a sign such as ✓ or ✗, and a legend names what each means.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvaudit.core.facets import SERVING
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.core.text import inline, join_names
from kvaudit.reports.page.answers import (
    QUESTIONS,
    Answer,
    answers,
    before_and_after,
    change_text,
    limit_text,
    metric_text,
    question_of,
    severity_order,
)
from kvaudit.reports.page.findings import Findings, flips_link
from kvaudit.reports.page.remarks import late_rules_alarm, remarks
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.tables import Example, Passage, Table, table_of
from kvaudit.reports.sections.shared.words import MOST_OF_NAME, shorten
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import PRECEDENCE, Decision, Status

MOST_GRID_ROWS = 40  # contrasts.csv holds every row
MOST_WORDS = 120  # of the first screen, without grid and flips
_FLIPS, _SUGGESTIONS = 3, 2
_LISTED = 4  # suites or settings that a line names
_LOOKS = {  # status -> its sign, and the sign's meaning
    Status.PASS: ("✓", "holds"),
    Status.PASS_NOTED: ("✓", "a little worse, within the limit"),
    Status.FAIL: ("✗", "worse"),
    Status.NOT_MEASURABLE: ("∅", "not measurable"),
    Status.INCONCLUSIVE: ("?", "undecided"),
    Status.INVALID: ("!", "no valid number"),
    Status.WAIVED: ("w", "let through by a waiver"),
}
SIGNS, MEANS = ({status: look[place] for status, look in _LOOKS.items()} for place in (0, 1))


@dataclass(frozen=True)
class GridCell:
    """A gated cell as shown in the grid. ``says`` is its tooltip.

    ``bound``, a text with the deciding confidence bound, is shown where there are no tooltips.
    """

    status: Status
    text: str
    says: str
    bound: str = ""
    link: str = ""  # to its flips

    @property
    def sign(self) -> str:
        """The character that shows the cell's status, such as ✗."""
        return SIGNS[self.status]

    @property
    def means(self) -> str:
        """The meaning of the cell's sign in words, such as "worse" for ✗."""
        return MEANS[self.status]


@dataclass(frozen=True)
class GridRow:
    """One row of the grid: a serving setting, or an arm with its setting; ``cells`` has None where nothing is gated."""

    question: str
    name: str
    cells: tuple[GridCell | None, ...]


@dataclass(frozen=True)
class Grid:
    """The gated cells as a table of settings by metrics; ``left_out`` counts the rows that only contrasts.csv holds."""

    columns: tuple[str, ...]
    rows: tuple[GridRow, ...]
    left_out: int = 0

    @property
    def signs(self) -> str:
        """The legend of the signs in the grid."""
        statuses = {cell.status for row in self.rows for cell in row.cells if cell}
        return ", ".join(f"{SIGNS[status]} {MEANS[status]}" for status in Status if status in statuses)


@dataclass(frozen=True)
class Screen:
    """The first screen of a run's report. ``facts`` are names and values, such as the model and the date.

    ``alarm`` is shown before anything else.
    """

    title: str
    status: Status
    facts: tuple[tuple[str, str], ...]
    answers: tuple[Answer, ...]
    grid: Grid
    alarm: str = ""
    flips: tuple[Example, ...] = ()  # the gravest lost answers, each of another cell
    suggestions: tuple[str, ...] = ()  # settings that pass where another does not
    before_relying: str = ""  # the names of the remarks to read with the verdict

    @property
    def words(self) -> int:
        """The number of words on the screen, without grid and flips."""
        texts = [self.title, self.status.value, self.alarm, *(word for fact in self.facts for word in fact)]
        texts += [*(f"{answer.asks} {answer.line}" for answer in self.answers), *self.suggestions]
        if self.before_relying:
            texts.append(f"Read first: {self.before_relying}")
        return sum(len(text.split()) for text in texts)


@dataclass(frozen=True)
class Banner:
    """The verdict at the top of a page. ``alarm`` is shown before anything else and usually empty.

    ``lines`` say what to do, what the claim is about, and what is wrong.
    """

    title: str
    status: Status
    sentence: str
    number: str  # of the cell that decides, with interval and margin; empty without one
    about: str
    lines: tuple[str, ...]
    alarm: str = ""


@dataclass(frozen=True)
class Page:
    """All that a report shows, already computed; every format (HTML, Markdown, JSON, ...) renders the same page."""

    findings: Findings
    banner: Banner
    sections: tuple[Passage, ...]
    remarks: tuple[str, ...] = ()  # shown wherever the verdict is shown
    screen: Screen | None = None  # None for a comparison of two files


def grid_of(findings: Findings) -> Grid:
    """Return the gated cells as a grid, its rows sorted by question; if rows are too many, only the worst are kept."""
    sides = findings.comparison
    gated = findings.verdict.gated
    columns = list(dict.fromkeys(metric_text(sides, d) for d in gated))
    by_row: dict[tuple[str, str], dict[str, Decision]] = {}
    for d in gated:
        by_row.setdefault((question_of(sides, d), _row_name(sides, d)), {})[metric_text(sides, d)] = d
    keys = sorted(by_row, key=lambda key: QUESTIONS.index(key[0]))
    shown_keys = keys
    if len(keys) > MOST_GRID_ROWS:
        rank = severity_order(sides)
        worst_first = sorted(keys, key=lambda key: min(map(rank, by_row[key].values())))
        shown_keys = [key for key in keys if key in set(worst_first[:MOST_GRID_ROWS])]
    rows = tuple(
        GridRow(key[0], key[1], tuple(_cell(findings, by_row[key].get(c)) for c in columns)) for key in shown_keys
    )
    return Grid(tuple(columns), rows, len(keys) - len(shown_keys))


def _row_name(sides: Comparison, d: Decision) -> str:
    setting = f"worst of {len(d.policies)}" if len(d.policies) > 1 else sides.label(d.policy)
    return inline(setting if question_of(sides, d) == SERVING else f"{d.arm} @ {setting}")


def _cell(findings: Findings, d: Decision | None) -> GridCell | None:
    if d is None:
        return None
    sides = findings.comparison
    text = change_text(sides, d) if d.effect else metric_text(sides, d)
    why = "; ".join(reason.text for reason in d.reasons)
    status = Status.INVALID if findings.verdict.reasons else d.standing
    return GridCell(
        status,
        before_and_after(sides, d) if d.effect else "no number",
        inline(f"{MEANS[status]}: {text}" + (f". {why}" if why else "")),
        limit_text(sides, d) if d.effect else "",
        flips_link(findings, d),
    )


def grid_table(grid: Grid, n_rows: int) -> Table:
    """Return the ``n_rows`` worst rows of the grid as plain text, in the order of the grid."""

    def severity(place: int) -> int:
        statuses = [cell.status for cell in grid.rows[place].cells if cell]
        return min(map(PRECEDENCE.index, statuses), default=len(PRECEDENCE))

    headers = ["question", "before → after", *grid.columns]
    worst_first = sorted(range(len(grid.rows)), key=severity)
    shown_rows = [grid.rows[place] for place in sorted(worst_first[:n_rows])]
    rows = [[row.question, row.name, *(f"{c.sign} {c.text}" if c else "-" for c in row.cells)] for row in shown_rows]
    return table_of(headers, rows, words=2)


def screen_of(findings: Findings) -> Screen:
    """Return the first screen of a run, cut to MOST_WORDS words if possible."""
    suggestions = (
        line for section, value in sections_in(findings.values) for line in section.suggestions(value, findings)
    )
    screen = Screen(
        title=f"May it ship? {inline(shorten(findings.drift.run))}",
        status=findings.verdict.status,
        facts=tuple((name, inline(text)) for name, text in _screen_facts(findings) if text),
        answers=answers(findings),
        grid=grid_of(findings),
        alarm=inline(late_rules_alarm(findings.rules)),
        flips=tuple(_lost_answers(findings)),
        suggestions=tuple(suggestions)[:_SUGGESTIONS],
        before_relying=inline(_remark_names(findings)),
    )
    return _shorten(screen)


def _shorten(screen: Screen) -> Screen:
    """Return the screen, cut to MOST_WORDS if possible by shortening, then dropping, the reasons of its answers.

    The reasons of the least severe groups are cut first, those of the worst group of each question last.
    """
    by_question = [list(answer.groups) for answer in screen.answers]
    # every question's gravest, then every question's second, and so on; shortened from the end
    depth = max(map(len, by_question), default=0)
    places = [(n, i) for i in range(depth) for n, groups in enumerate(by_question) if i < len(groups)]

    def with_groups() -> Screen:
        pairs = zip(screen.answers, by_question, strict=True)
        return replace(screen, answers=tuple(replace(answer, groups=tuple(groups)) for answer, groups in pairs))

    for is_brief in (True, False):
        for n, i in reversed(places):
            if with_groups().words <= MOST_WORDS:
                return with_groups()
            group = by_question[n][i]
            by_question[n][i] = replace(group, why=group.brief if is_brief else "")
    return with_groups()


def _lost_answers(findings: Findings) -> Iterator[Example]:
    """Yield examples of answers that got worse from reference to candidate, one from each of the most severe cells."""
    places = set[tuple[str, str, str]]()
    order = severity_order(findings.comparison)
    cells = {(d.arm, d.policy, d.suite): order(d) for d in sorted(findings.verdict.gated, key=order, reverse=True)}
    least = max(cells.values(), default=(0, 0, 0.0))
    examples = findings.values.get("examples", ())
    for example in sorted(examples, key=lambda e: cells.get((e.arm, e.policy, e.suite), least)):
        place = example.arm, example.policy, example.suite
        if place not in places and len(places) < _FLIPS:
            places.add(place)
            yield example


def _remark_names(findings: Findings) -> str:
    """Return the first words of every remark, except NOT MEASURABLE ones, which the answers state already."""
    statuses = {d.status.value for d in findings.verdict.decisions}
    names = [re.split(r"[:.;](?: |$)", line)[0] for line in remarks(findings)]
    return "; ".join(dict.fromkeys(_first_words(name) for name in names if name not in statuses))


def _first_words(line: str) -> str:
    """Return a line cut at a word to MOST_OF_NAME characters, with … at its end if something was cut."""
    return line if len(line) <= MOST_OF_NAME else f"{line[:MOST_OF_NAME].rpartition(' ')[0] or line[:MOST_OF_NAME]} …"


def _screen_facts(findings: Findings) -> list[tuple[str, str]]:
    sides, provenance = findings.comparison, findings.provenance
    weights = str(provenance.get("base_sha256") or "")[:8]
    plain = sides.label(sides.uncompressed[0]) if sides.uncompressed else "none"
    who = "itself" if sides.reference == BASE_ARM else shorten(sides.reference)
    engines = [sides.label(policy) for policy in sides.uncompressed if sides.is_engine(policy)]
    if not engines or any(not sides.is_engine(policy) and policy != DENSE_POLICY for policy in sides.policies):
        engines.append("kvaudit's cache")
    items = Counter[str]()  # of each suite's largest cell
    for cell in findings.drift.cells:
        items[cell.suite] = max(items[cell.suite], cell.n_items)
    item_counts = [f"{shorten(suite)} {items[suite]}" for suite in sides.suites]
    seeds = f", {len(sides.seeds)} seeds" if len(sides.seeds) > 1 else ""
    day = str(provenance.get("finished") or provenance.get("started") or "")[:10]
    return [
        ("model", f"{shorten(findings.model)}{f' ({weights})' if weights else ''}"),
        ("date", day),
        ("reference", f"{who} @ {shorten(plain)}"),
        ("engine", ", ".join(map(shorten, engines[:_LISTED]))),
        ("items", join_names(item_counts, _LISTED) + seeds),
    ]
