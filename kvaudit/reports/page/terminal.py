"""The verdict on a terminal: at most twelve lines, the answers first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvaudit.core.facets import PARITY, suite_of
from kvaudit.core.provenance import ENDED, LOOKS, PLANNED, TIME_SPENT, all_looks, seconds_of, table_of
from kvaudit.core.text import clip, inline
from kvaudit.reports.page.answers import change_text, severity_order, subject_of
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import MEANS, SIGNS, screen_of
from kvaudit.reports.records.load import SHUFFLED
from kvaudit.reports.sections.shared.floor import floor_at
from kvaudit.reports.sections.shared.tables import Example
from kvaudit.reports.sections.shared.words import exceeds_margin, plural
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import Decision, Status

MOST_TERMINAL_LINES = 12
_FLIPS = 2  # lost answers shown
_DOUBTFUL = 3  # lost answers with a doubtful grade that are shown for an undecided cell
_ROWS_DO_NOT_HELP = (ReasonCode.FORM, ReasonCode.IDLE, ReasonCode.NOISE)  # reasons against a PASS


@dataclass(frozen=True)
class TerminalExtras:
    """Facts for the terminal that only the calling command knows.

    ``unseen``: suites that were not asked, in words. ``longer``: the command that continues a run that ran out of time.
    ``questions``: a note on the kind of questions, printed after the verdict. ``fetch``: the command that downloads
    public rows that the run could not ask, if there are such rows.
    """

    unseen: Sequence[str] = ()
    longer: str = ""
    questions: str = ""
    fetch: str = ""


def terminal_lines(findings: Findings, run: Path | None = None, extras: TerminalExtras | None = None) -> list[str]:
    """Return the lines to print: verdict, answers, cells, remarks and the next command; no paths without ``run``."""
    screen, extras = screen_of(findings), extras or TerminalExtras()
    facts = ", ".join(f"{name} {text}" for name, text in screen.facts if name != "items")
    head = [f"NOT BINDING: {screen.alarm}"] if screen.alarm else []
    head += [f"{screen.status.value} (exit {findings.verdict.exit_code}){extras.questions}: {facts}"]
    head += [f"{answer.question}: {answer.line}" for answer in screen.answers if answer.groups]
    head += screen.suggestions
    tail = [*_rounds_lines(findings)]
    if extras.unseen:
        tail.append(f"not asked: {'; '.join(extras.unseen)}")
    if screen.before_relying:
        tail.append(f"read first: {screen.before_relying}")
    if run is not None:
        tail.append(f"report: {run / 'report' / 'report.html'}, card: {run / 'report' / 'card.md'}")
        tail += [f"next: {inline(command)}" for command in _next_command(findings, run, extras)]
    if screen.status in (Status.FAIL, Status.INCONCLUSIVE):
        doubtful = list(_doubtful_lines(findings)) if screen.status is Status.INCONCLUSIVE else []
        flips = [flip for flip in screen.flips[:_FLIPS] if not (doubtful and flip.is_doubtful)]
        tail[-1:-1] = doubtful
        tail[:0] = map(_flip_line, flips)
    room = MOST_TERMINAL_LINES - len(head) - len(tail)
    cells = [f"  {_cell_line(findings, d)}" for d in _cells_shown(findings)]
    if len(cells) > room:
        cells = [*cells[: room - 1], f"  and {len(cells) - room + 1} more in the report"]
    return [inline(line) for line in (*head, *cells[: max(room, 0)], *tail)]


def _doubtful_lines(findings: Findings) -> Iterator[str]:
    """Yield a line on the grades that the judge is unsure of, then a few lost answers with such a grade.

    All are about one metric: the worst that is undecided and has such grades.
    """
    sides = findings.comparison
    for d in sorted(findings.verdict.gated, key=severity_order(sides)):
        suite = suite_of(d.suite) if d.suite in sides.facets else d.suite
        place = d.arm, d.policy, suite, d.context_tokens
        cells = [c for c in findings.drift.cells if (c.arm, c.policy, c.suite, c.context_tokens) == place and c.unsure]
        if d.status is Status.INCONCLUSIVE and cells:
            count = f"{cells[0].unsure} of {cells[0].n_samples} answers"
            yield f"the judge is unsure of {count} of {suite}; people can decide"
            cell = d.arm, d.policy, d.suite, d.context_tokens
            examples = [
                e
                for e in findings.values.get("examples", ())
                if e.is_doubtful and (e.arm, e.policy, e.suite, e.context_tokens) == cell
            ]
            yield from map(_flip_line, examples[:_DOUBTFUL])
            return


def _flip_line(flip: Example) -> str:
    word = "doubtful loss" if flip.is_doubtful else "lost, for example"
    texts = (flip.asked, 70), (flip.reference_answer, 60), (flip.answer, 90)
    question, before, after = (clip(inline(text), length) for text, length in texts)
    return f"{word}: {question} | before: {before} | after: {after}"


def _cells_shown(findings: Findings) -> list[Decision]:
    """Return the gated decisions to print, the worst first.

    A suite with gated facets (yes-or-no properties of answers) has a decision for each facet and one for its score. The
    decision on the score is printed only if it is a FAIL.
    """
    sides, gated = findings.comparison, findings.verdict.gated
    facet_suites = {suite_of(d.suite) for d in gated if d.suite in sides.facets}
    cells = [d for d in gated if d.suite not in facet_suites or d.standing is Status.FAIL]
    return sorted(cells, key=severity_order(sides))


def _cell_line(findings: Findings, d: Decision) -> str:
    sides = findings.comparison
    who = f"{SIGNS[d.standing]} {subject_of(sides, d)}"
    if d.effect is None or d.status is Status.NOT_MEASURABLE:
        return f"{who}, {d.suite}: {d.reasons[0].text if d.reasons else 'no number'}"
    items = f"lost {d.effect.losses:.0f}, gained {d.effect.gains:.0f}{_shuffled_changes(findings, d)}"
    return f"{who}: {change_text(sides, d)} ({items}): {_status_text(d)}"


def _status_text(d: Decision) -> str:
    if d.status is Status.INCONCLUSIVE and not d.waiver and d.reasons and d.reasons[0].code in _ROWS_DO_NOT_HELP:
        return f"{MEANS[d.standing]}, {d.reasons[0].text}"
    if d.status is not Status.FAIL or d.waiver:
        return MEANS[d.standing]
    word = "changed" if d.estimand == PARITY else "worse"  # parity may fail by a gain
    return f"{word}, by more than the limit" if d.effect and exceeds_margin(d) else f"{word}, size open"


def _shuffled_changes(findings: Findings, d: Decision) -> str:
    """Return how many answers change if only the order of the batch changes, under a setting and uncompressed.

    The setting is that of the decision. An example is "; in another order 12 of 400 change, 3 uncompressed". Empty
    unless both numbers were measured.
    """
    policies = (d.policy, findings.comparison.uncompressed_of(d.policy))
    floors = [floor_at(findings.values.get("floor", ()), d.arm, name, d.suite, d.context_tokens) for name in policies]
    shuffled = [cell for cells in floors for cell in cells if cell.way == SHUFFLED]
    if len(shuffled) != len(policies):
        return ""
    compressed, plain = shuffled
    changed = f"{compressed.lost + compressed.gained} of {compressed.read} change"
    return f"; in another order {changed}, {plain.lost + plain.gained} uncompressed"


def _rounds_lines(findings: Findings) -> Iterator[str]:
    """Yield how long a run in rounds took, why it ended, and the suites that it left out."""
    looks = all_looks(findings.provenance)
    if looks:
        table = table_of(findings.provenance, LOOKS)
        counts = ", ".join(f"{rows} of {suite}" for suite, rows in table_of(looks[-1], "items").items())
        minutes = seconds_of(looks) / 60
        why = table.get(ENDED, "it was stopped")
        yield f"asked: {counts} on each side, {plural(len(looks), 'look')}, {minutes:.1f} minutes; {why}"
        for suite, reason in table_of(table_of(table, PLANNED), "left_out").items():
            yield f"not asked of this model: {suite} ({reason})"


def _next_command(findings: Findings, run: Path, extras: TerminalExtras) -> Iterator[str]:
    """Yield the command to type next; none if the setting may be served."""
    status, folder = findings.verdict.status, shlex.quote(str(run))
    ended = table_of(findings.provenance, LOOKS).get(ENDED)
    blocked = any(d.reasons and d.reasons[0].code in _ROWS_DO_NOT_HELP for d in findings.verdict.gated)
    if status is Status.INCONCLUSIVE and ended == TIME_SPENT and extras.longer and not blocked:
        yield extras.longer
    elif status is Status.INCONCLUSIVE and extras.fetch and not blocked:
        yield extras.fetch
    elif status in (Status.FAIL, Status.INCONCLUSIVE, Status.INVALID):
        yield f"kvaudit view {folder}"
    elif status is Status.NOT_MEASURABLE:
        yield "kvaudit init audit"
