"""What a terminal says of a verdict: at most ten lines, the answers first, for somebody who read no page of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvaudit.core.text import inline
from kvaudit.reports.analysis.floor import floor_at
from kvaudit.reports.gate.verdict import Decision, Larger, Status
from kvaudit.reports.page.answers import gravest, moved, subject_of
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.grid import MEANS, SIGNS
from kvaudit.reports.page.screen import screen_of
from kvaudit.reports.records.floor import SHUFFLED

MOST_TERMINAL_LINES = 10
_TIMES = {Larger.TWICE: 2, Larger.TEN_TIMES: 10}


@dataclass(frozen=True)
class BesideFindings:
    """What a command knows beside the findings.

    ``seconds``: by suite, what one more item takes on both sides. ``unseen``: what nobody asked, in words.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    unseen: Sequence[str] = ()


def terminal_lines(findings: Findings, run: Path | None = None, cost: BesideFindings | None = None) -> list[str]:
    """The verdict, the answers, the cells that decide them, what to read with it, and where the rest lies.

    Without a ``run`` no path is named.
    """
    screen, cost = screen_of(findings), cost or BesideFindings()
    facts = ", ".join(f"{name} {text}" for name, text in screen.facts if name != "asked")
    first = [f"NOT THE GATE: {screen.alarm}"] if screen.alarm else []
    first += [f"{screen.status.value} (exit {findings.verdict.exit_code}): {facts}"]
    first += [f"{answer.question}: {answer.line}" for answer in screen.answers if answer.groups]
    first += screen.instead
    last = list(_last_lines(findings, screen.before_relying, cost))
    if run is not None:
        last.append(f"report: {run / 'report' / 'report.html'}, card: {run / 'report' / 'card.md'}")
    room = MOST_TERMINAL_LINES - len(first) - len(last)
    cells = [f"  {_cell(findings, d)}" for d in _worth_a_line(findings)]
    # the last line that there is room for says how many have none
    if len(cells) > room:
        cells = [*cells[: room - 1], f"  and {len(cells) - room + 1} more in the report"]
    return [inline(line) for line in (*first, *cells[: max(room, 0)], *last)]


def _worth_a_line(findings: Findings) -> list[Decision]:
    """What does not hold, the worst first, and after it what holds: facets where a suite has them, else its score."""
    sides, gated = findings.comparison, findings.verdict.gated
    own = {d.suite.rpartition(".")[0] for d in gated if d.suite in sides.facets}
    shown = [d for d in gated if d.suite not in own or d.standing is Status.FAIL]
    return sorted(shown, key=gravest(sides))


def _cell(findings: Findings, d: Decision) -> str:
    sides = findings.comparison
    who = f"{SIGNS[d.standing]} {subject_of(sides, d)}"
    if d.effect is None or d.status is Status.NOT_MEASURABLE:
        return f"{who}, {d.suite}: {d.reasons[0].text if d.reasons else 'no number'}"
    items = f"lost {d.effect.losses:.0f}, gained {d.effect.gains:.0f}{_by_itself(findings, d)}"
    return f"{who}: {moved(sides, d)} ({items}): {_means(d)}"


def _means(d: Decision) -> str:
    if d.status is not Status.FAIL or d.waiver:
        return MEANS[d.standing]
    beyond = d.effect is not None and d.margin is not None and d.effect.upper < -d.margin
    if d.ratio:
        beyond = d.ratio.times.lower > d.ratio.limit
    return "worse, by more than the limit" if beyond else "worse, how much is open"


def _by_itself(findings: Findings, d: Decision) -> str:
    """How many answers another order changes under the setting and uncompressed, where that was asked."""
    ways = (d.policy, findings.comparison.uncompressed_of(d.policy))
    both = [floor_at(findings.values.get("floor", ()), d.arm, policy, d.suite, d.context_tokens) for policy in ways]
    found = [cell for cells in both for cell in cells if cell.way == SHUFFLED]
    if len(found) != len(ways):
        return ""
    own, plain = found
    changed = f"{own.lost + own.gained} of {own.read} change"
    return f"; in another order {changed}, {plain.lost + plain.gained} uncompressed"


def _last_lines(findings: Findings, before_relying: str, cost: BesideFindings) -> Iterator[str]:
    if more := list(_more(findings, cost)):
        yield f"would decide what is open, where nothing is lost: {'; '.join(more)}"
    if cost.unseen:
        yield f"not asked: {'; '.join(cost.unseen)}"
    if before_relying:
        yield f"read first: {before_relying}"


def _more(findings: Findings, cost: BesideFindings) -> Iterator[str]:
    """By suite, how many rows more and how many minutes; nothing of what nobody timed."""
    gated = findings.verdict.gated
    for suite, seconds in cost.seconds.items():
        own = [d for d in gated if suite in (d.suite, d.suite.rpartition(".")[0]) and d.effect]
        open_ = [d for d in own if d.status is Status.INCONCLUSIVE]
        if not open_:
            continue
        times = [_TIMES[d.larger] for d in open_ if d.larger in _TIMES]
        if len(times) < len(open_):
            yield f"{suite}: more rows are unlikely to"
            continue
        # what is asked now is there already
        rows = (max(times) - 1) * max(d.effect.n_items for d in own if d.effect)
        minutes = max(1, round(rows * seconds / 60))
        yield f"{suite}: {rows} rows more, about {minutes} minute{'s' * (minutes > 1)}"
