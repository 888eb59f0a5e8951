"""What a terminal says of a verdict: at most twelve lines, the answers first, for somebody who read no page of ours."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvaudit.core.provenance import ENDED, LOOKS, PLANNED, TIME_SPENT, looks_in, table_of
from kvaudit.core.text import clip, inline
from kvaudit.reports.page.answers import gravest, moved, subject_of
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.grid import MEANS, SIGNS
from kvaudit.reports.page.screen import screen_of
from kvaudit.reports.records.floor import SHUFFLED
from kvaudit.reports.sections.shared.floor import floor_at
from kvaudit.reports.sections.shared.tables import Example
from kvaudit.reports.sections.shared.words import plural
from kvaudit.reports.verdict.verdict import Decision, Status

MOST_TERMINAL_LINES = 12
_FLIPS = 2  # lost answers that are shown


@dataclass(frozen=True)
class BesideFindings:
    """What a command knows beside the findings.

    ``unseen``: what nobody asked, in words. ``longer``: the command that asks on, where time was short. ``questions``:
    what kind they were, behind the verdict, where that must be said.
    """

    unseen: Sequence[str] = ()
    longer: str = ""
    questions: str = ""


def terminal_lines(findings: Findings, run: Path | None = None, beside: BesideFindings | None = None) -> list[str]:
    """The verdict, the answers, the cells that decide them, what to read with it, and where the rest lies.

    Without a ``run`` no path is named.
    """
    screen, beside = screen_of(findings), beside or BesideFindings()
    facts = ", ".join(f"{name} {text}" for name, text in screen.facts if name != "asked")
    first = [f"NOT THE GATE: {screen.alarm}"] if screen.alarm else []
    first += [f"{screen.status.value} (exit {findings.verdict.exit_code}){beside.questions}: {facts}"]
    first += [f"{answer.question}: {answer.line}" for answer in screen.answers if answer.groups]
    first += screen.instead
    last = list(_last_lines(findings, screen.before_relying, beside))
    if run is not None:
        last.append(f"report: {run / 'report' / 'report.html'}, card: {run / 'report' / 'card.md'}")
        last += [f"next: {inline(command)}" for command in _next(findings, run, beside)]
    if screen.status in (Status.FAIL, Status.INCONCLUSIVE):
        last[:0] = [_flip(flip) for flip in screen.flips[:_FLIPS]]
    room = MOST_TERMINAL_LINES - len(first) - len(last)
    cells = [f"  {_cell(findings, d)}" for d in _worth_a_line(findings)]
    # the last line that there is room for says how many have none
    if len(cells) > room:
        cells = [*cells[: room - 1], f"  and {len(cells) - room + 1} more in the report"]
    return [inline(line) for line in (*first, *cells[: max(room, 0)], *last)]


def _flip(flip: Example) -> str:
    """What was asked, the reference's answer, and what the setting made of it."""
    asked, before, after = (
        clip(inline(text), most) for text, most in ((flip.asked, 70), (flip.reference_answer, 60), (flip.answer, 90))
    )
    return f"lost, for example: {asked} | before: {before} | after: {after}"


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


def _last_lines(findings: Findings, before_relying: str, beside: BesideFindings) -> Iterator[str]:
    yield from _rounds(findings)
    if beside.unseen:
        yield f"not asked: {'; '.join(beside.unseen)}"
    if before_relying:
        yield f"read first: {before_relying}"


def _rounds(findings: Findings) -> Iterator[str]:
    """How far a run in rounds went and why it ended there, and what its reference was not asked."""
    looks = looks_in(findings.provenance)
    if looks:
        table = table_of(findings.provenance, LOOKS)
        asked = ", ".join(f"{rows} of {suite}" for suite, rows in table_of(looks[-1], "items").items())
        minutes = sum(float(look.get("seconds", 0.0)) for look in looks) / 60
        why = table.get(ENDED, "it was stopped")
        yield f"asked: {asked} on each side, {plural(len(looks), 'look')}, {minutes:.1f} minutes; {why}"
        for suite, reason in table_of(table_of(table, PLANNED), "left_out").items():
            yield f"not asked of this model: {suite} ({reason})"


def _next(findings: Findings, run: Path, beside: BesideFindings) -> Iterator[str]:
    """The one command to type next; none where the setting may be served."""
    status, folder = findings.verdict.status, shlex.quote(str(run))
    ended = table_of(findings.provenance, LOOKS).get(ENDED)
    if status is Status.INCONCLUSIVE and ended == TIME_SPENT and beside.longer:
        yield beside.longer
    elif status in (Status.FAIL, Status.INCONCLUSIVE, Status.INVALID):
        yield f"kvaudit view {folder}"
    elif status is Status.NOT_MEASURABLE:
        yield "kvaudit init audit"
