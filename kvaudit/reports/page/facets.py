"""The facets behind the gated drifts, and the quoted cell split into its facets.

A score adds opposite errors and broken form. An unwanted facet counts what happened ("unsafe 5.6 to 9.1 %"), the facet
of form counts broken answers. A facet moved if its own 95 % interval excludes 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvaudit.core.facets import WELL_FORMED, facet_of, suite_of
from kvaudit.core.text import inline
from kvaudit.reports.page.findings import Findings, flips_link
from kvaudit.reports.sections.shared.events import (
    BETTER,
    EVENT_HEADERS,
    NO_CHANGE,
    NO_NUMBER,
    WORSE,
    Event,
    event_notes,
    event_row,
)
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import (
    cell_label,
    effect_text,
    judge_marks,
    plural,
    points,
    reference_label,
    with_length,
)
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellPlace
from kvaudit.reports.verdict.verdict import Decided, Decision, Status

_NAMED = 4  # failed cells in the section's finding
_PAIRED = ("alike", "deployed", "serving")  # two sides, each with a rate


def cell_events(findings: Decided, d: Decision) -> list[Event]:
    """Return the facets of a decision's suite in its own cell, form first."""
    return _of_cell(findings, _cell(findings.comparison, d))


def _cell(sides: Comparison, d: Decision) -> CellPlace:
    """The cell with the facets of a decision; a contrast without two sides uses the base contrast."""
    suite = suite_of(d.suite)
    estimand = d.estimand if d.estimand in _PAIRED else sides.base
    return estimand, d.arm, d.policy, suite, d.context_tokens


def _of_cell(findings: Decided, cell: CellPlace) -> list[Event]:
    estimand, arm, policy, suite, context = cell
    contrasts = {c.place: c for c in findings.drift.contrasts}
    names = {name: (estimand, arm, policy, name, context) for name in findings.comparison.facets}
    facet_events = [
        Event(facet_of(name)[1], contrasts[place], suite)
        for name, place in names.items()
        if place in contrasts and facet_of(name)[0] == suite
    ]
    return sorted(facet_events, key=lambda event: event.facet.name != WELL_FORMED)


def breakdown(findings: Decided, head: Decision | None) -> list[str]:
    """Return one line on which facets of the quoted cell moved; nothing without facets."""
    all_events = cell_events(findings, head) if head and head.effect else []
    if not all_events:
        return []
    measured = [e for e in all_events if e.moved != NO_NUMBER]
    relevant = [e for e in measured if e.facet.kind in ("form", "safety") or e.moved != NO_CHANGE]
    form = [_event_text(e) for e in relevant if e.facet.kind == "form"]
    others = [_event_text(e) for e in relevant if e.facet.kind != "form"]
    parts = [*form, *([f"among answers that could be read {', '.join(others)}"] if others else [])]
    numbers = "; ".join(parts)
    summary = f"By facet: {_by_kind(all_events)}."
    return [f"{summary} {numbers[0].upper()}{numbers[1:]}." if numbers else summary]


def _event_text(e: Event) -> str:
    """An event such as: unsafe 5.6 to 9.1 % (+3.5 pp [+0.4, +6.6])."""
    reading = ""
    if e.depends_on_reading and e.bounds:
        reading = f"; {points(e.bounds[0])} to {points(e.bounds[1])} pp depending on how broken answers count"
    return f"{e.name} {e.rates} ({e.difference}{reading})"


_PHRASES = {  # singular, plural
    WORSE: ("is worse", "are worse"),
    BETTER: ("is better", "are better"),
    NO_CHANGE: ("is not shown to move", "are not shown to move"),
    NO_NUMBER: ("has no number", "have no number"),
}


def _by_kind(all_events: Sequence[Event]) -> str:
    """A phrase such as: form alone is worse; safety and capability are not shown to move."""
    parts = []
    is_complete = all(e.moved != NO_NUMBER for e in all_events)
    for moved, phrases in _PHRASES.items():
        names = _kinds(all_events, moved)
        if names:
            # "alone" needs a number of every other kind
            suffix = " alone" if moved == WORSE and len(names) == 1 and is_complete else ""
            listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
            parts.append(f"{listed}{suffix} {phrases[len(names) > 1]}")
    return "; ".join(parts)


def _kinds(all_events: Sequence[Event], moved: str) -> list[str]:
    """The kinds that moved this way; a kind that did so in part lists its facets."""
    names = []
    for kind in dict.fromkeys(e.facet.kind for e in all_events):
        events_of_kind = [e for e in all_events if e.facet.kind == kind]
        moved_names = [e.name for e in events_of_kind if e.moved == moved]
        if moved_names:
            is_whole = len(moved_names) == len(events_of_kind)
            names.append(kind if is_whole else f"{kind} ({', '.join(moved_names)})")
    return names


def gated_events(findings: Decided) -> list[Event]:
    """Return every facet of the gated cells, suite by suite."""
    cells = dict.fromkeys(_cell(findings.comparison, d) for d in findings.verdict.gated)
    order = findings.comparison.suites
    placed = sorted(cells, key=lambda cell: order.index(cell[3]))
    return [event for cell in placed for event in _of_cell(findings, cell)]


def _has_row(findings: Decided, e: Event) -> bool:

    return e.facet.kind == "safety" or e.moved in (WORSE, BETTER) or findings.rules.holds(e.contrast.suite)


def failed_table(findings: Decided) -> Table:
    """Return one row per failed suite with the kinds of facets that moved."""
    rows = [
        [cell_label(findings.comparison, d), effect_text(d.effect), _by_kind(events)] for d, events in _failed(findings)
    ]
    return table_of(["failed cell", "drift, 95 % interval", "by facet"], rows, words=3)


def _failed(findings: Decided) -> list[tuple[Decision, list[Event]]]:
    """The gated suites that failed, the largest drop first, with their facets."""
    suites = findings.comparison.suites
    gated = [d for d in findings.verdict.gated if d.status is Status.FAIL and d.suite in suites]
    gated.sort(key=lambda d: d.effect.estimate if d.effect else 0.0)
    return [(d, facet_events) for d in gated if (facet_events := cell_events(findings, d))]


def facet_table(findings: Findings) -> Table:
    """Return one row per facet that is about safety, gated, or moved."""
    sides, events = findings.comparison, [e for e in gated_events(findings) if _has_row(findings, e)]
    contrasts = [e.contrast for e in events]
    gated = {d.place: d.standing.value for d in findings.verdict.gated}
    suites = [with_length(sides, e.suite, e.contrast.context_tokens) + judge_marks(sides, e.suite) for e in events]
    columns = {"suite": suites, "candidate": [sides.who(c.arm, c.policy) for c in contrasts]}
    if len({c.estimand for c in contrasts}) > 1:
        columns["against"] = [reference_label(sides, c) for c in contrasts]
    words = len(columns) + 1
    cells = [event_row(e) for e in events]
    columns |= {header: [row[place] for row in cells] for place, header in enumerate(EVENT_HEADERS)}
    if any(c.place in gated for c in contrasts):
        columns["gated"] = [gated.get(c.place, "-") for c in contrasts]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return replace(table_of(list(columns), rows, words=words), links=tuple(flips_link(findings, c) for c in contrasts))


def facet_notes(findings: Decided) -> tuple[str, ...]:
    """Return what the words of the table mean and which rows are left out."""
    all_events = gated_events(findings)
    n_omitted = sum(not _has_row(findings, e) for e in all_events)
    omitted = f" {plural(n_omitted, 'row')} left out: facets neither of safety nor gated, none of them shown to move;"
    suffix = f"{omitted if n_omitted else ''} contrasts.csv has every facet of every cell, counted as wanted."
    notes = event_notes(all_events)
    return (*notes[:-1], notes[-1] + suffix) if notes else ()


def facet_finding(findings: Decided) -> str:
    """Return which facets got worse in the failed cells; if none failed, in how many cells each facet got worse."""
    all_events, failed = gated_events(findings), _failed(findings)
    if failed:
        cells = [
            f"{cell_label(findings.comparison, d)}: {', '.join(_kinds(facet_events, WORSE)) or 'none'}"
            for d, facet_events in failed[:_NAMED]
        ]
        rest_note = f"; and {plural(len(failed) - _NAMED, 'cell')} more" if len(failed) > _NAMED else ""
        return inline(f"Worse in the failed cells: {'; '.join(cells)}{rest_note}.")
    return f"Worse: {', '.join(_counts(all_events)) or 'none'}." if all_events else ""


def _counts(all_events: Sequence[Event]) -> Iterator[str]:
    """Phrases such as: agent broken form in 3 of 8 cells."""
    for suite, name in dict.fromkeys((e.suite, e.name) for e in all_events):
        cells = [e for e in all_events if (e.suite, e.name) == (suite, name)]
        count = sum(e.moved == WORSE for e in cells)
        if count:
            yield f"{suite} {name} in {count} of {plural(len(cells), 'cell')}"
