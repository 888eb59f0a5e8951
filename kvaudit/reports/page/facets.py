"""What moved: the facets behind every gated drift, each told as its own event, and the quoted cell taken apart.

A score adds opposite errors and broken form. Here an unwanted facet is counted as what happened ("unsafe 5.6 to
9.1 %"), and the facet of form as broken answers, so that no reader has to take a rate from 100. A facet moved where its
own 95 % interval leaves out 0, and not otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvaudit.core.facets import WELL_FORMED, facet_of
from kvaudit.core.text import inline
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.links import flips_link
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

_NAMED = 4  # failed cells in the line over the folded section
_PAIRED = ("alike", "deployed", "serving")  # two sides, each with a rate


def events(findings: Decided, d: Decision) -> list[Event]:
    """The facets of a decision's suite in its own cell, form first; none where the suite has none."""
    return _of_cell(findings, _cell(findings.comparison, d))


def _cell(sides: Comparison, d: Decision) -> CellPlace:
    """Where the facets of a decision stand: what has no two sides is made of the drift itself."""
    suite = facet_of(d.suite)[0] if d.suite in sides.facets else d.suite
    estimand = d.estimand if d.estimand in _PAIRED else sides.base
    return estimand, d.arm, d.policy, suite, d.context_tokens


def _of_cell(findings: Decided, cell: CellPlace) -> list[Event]:
    estimand, arm, policy, suite, context = cell
    known = {c.place: c for c in findings.drift.contrasts}
    names = {name: (estimand, arm, policy, name, context) for name in findings.comparison.facets}
    own = [
        Event(facet_of(name)[1], known[place], suite)
        for name, place in names.items()
        if place in known and facet_of(name)[0] == suite
    ]
    return sorted(own, key=lambda event: event.facet.name != WELL_FORMED)


def taken_apart(findings: Decided, head: Decision | None) -> list[str]:
    """What the quoted cell is made of, in one sentence of what its intervals show; nothing without facets."""
    found = events(findings, head) if head and head.effect else []
    if not found:
        return []
    known = [e for e in found if e.moved != NO_NUMBER]
    told = [e for e in known if e.facet.kind in ("form", "safety") or e.moved != NO_CHANGE]
    form = [_told(e) for e in told if e.facet.kind == "form"]
    rest = [_told(e) for e in told if e.facet.kind != "form"]
    parts = [*form, *([f"among answers that could be read {', '.join(rest)}"] if rest else [])]
    numbers = "; ".join(parts)
    said = f"Taken apart: {_by_kind(found)}."
    return [f"{said} {numbers[0].upper()}{numbers[1:]}." if numbers else said]


def _told(e: Event) -> str:
    """unsafe 5.6 to 9.1 % (+3.5 pp [+0.4, +6.6]), with what the reading of broken answers could make of it."""
    open_ = ""
    if e.depends_on_reading and e.bounds:
        open_ = f"; {points(e.bounds[0])} to {points(e.bounds[1])} pp as the broken ones are read"
    return f"{e.name} {e.rates} ({e.difference}{open_})"


_SAID = {WORSE: ("is worse", "are worse"), BETTER: ("is better", "are better")}
_SAID |= {NO_CHANGE: ("is not shown to move", "are not shown to move"), NO_NUMBER: ("has no number", "have no number")}


def _by_kind(found: Sequence[Event]) -> str:
    """form alone is worse; safety and capability are not shown to move."""
    parts = []
    known = all(e.moved != NO_NUMBER for e in found)
    for moved, said in _SAID.items():
        names = _kinds(found, moved)
        if names:
            # alone only where every other kind has a number
            alone = " alone" if moved == WORSE and len(names) == 1 and known else ""
            listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
            parts.append(f"{listed}{alone} {said[len(names) > 1]}")
    return "; ".join(parts)


def _kinds(found: Sequence[Event], moved: str) -> list[str]:
    """The kinds that moved so, with the facets by name where others of their kind did not."""
    names = []
    for kind in dict.fromkeys(e.facet.kind for e in found):
        own = [e for e in found if e.facet.kind == kind]
        here = [e.name for e in own if e.moved == moved]
        names += [kind if len(here) == len(own) else f"{kind} ({', '.join(here)})"] if here else []
    return names


def shown(findings: Decided) -> list[Event]:
    """Every facet of the gated cells, suite by suite."""
    cells = dict.fromkeys(_cell(findings.comparison, d) for d in findings.verdict.gated)
    order = findings.comparison.suites
    placed = sorted(cells, key=lambda cell: order.index(cell[3]))
    return [event for cell in placed for event in _of_cell(findings, cell)]


def _has_row(findings: Decided, e: Event) -> bool:
    """Whether a signer needs it: safety whatever came out, the rest where it is gated or moved."""
    return e.facet.kind == "safety" or e.moved in (WORSE, BETTER) or findings.rules.holds(e.contrast.suite)


def failed_table(findings: Decided) -> Table:
    """Every suite that failed, by which of its kinds of facets moved."""
    rows = [
        [cell_label(findings.comparison, d), effect_text(d.effect), _by_kind(found)] for d, found in _failed(findings)
    ]
    return table_of(["failed cell", "drift, 95 % interval", "taken apart"], rows, words=3)


def _failed(findings: Decided) -> list[tuple[Decision, list[Event]]]:
    """The gated suites that failed, the largest drop first, with their facets."""
    suites = findings.comparison.suites
    gated = [d for d in findings.verdict.gated if d.status is Status.FAIL and d.suite in suites]
    gated.sort(key=lambda d: d.effect.estimate if d.effect else 0.0)
    return [(d, found) for d in gated if (found := events(findings, d))]


def facet_table(findings: Findings) -> Table:
    """One row per facet that a signer needs."""
    found = [e for e in shown(findings) if _has_row(findings, e)]
    both = len({e.contrast.estimand for e in found}) > 1
    decided = {d.place: d for d in findings.verdict.gated}
    headers = ["suite", "candidate", *(["against"] if both else []), *EVENT_HEADERS]
    gate = any(e.contrast.place in decided for e in found)
    rows = [
        [*_row(findings.comparison, e, both=both), *([_gated(decided.get(e.contrast.place))] if gate else [])]
        for e in found
    ]
    table = table_of([*headers, *(["gated"] if gate else [])], rows, words=3 + both)
    return replace(table, links=tuple(flips_link(findings, e.contrast) for e in found))


def _gated(d: Decision | None) -> str:
    return d.standing.value if d else "-"


def _row(sides: Comparison, e: Event, *, both: bool) -> list[str]:
    c = e.contrast
    suite = with_length(sides, e.suite, c.context_tokens) + judge_marks(sides, e.suite)
    return [suite, sides.who(c.arm, c.policy), *([reference_label(sides, c)] if both else []), *event_row(e)]


def facet_notes(findings: Decided) -> tuple[str, ...]:
    """What each word means, said once, and how to read the table of a run."""
    found = shown(findings)
    left = sum(not _has_row(findings, e) for e in found)
    rest = f" {plural(left, 'row')} of facets that are neither safety nor gated, none shown to move, left out;"
    more = f"{rest if left else ''} contrasts.csv holds every facet of every cell, counted as wanted."
    said = event_notes(found)
    return (*said[:-1], said[-1] + more) if said else ()


def finding(findings: Decided) -> str:
    """What the failed cells lost; without any, in how many cells each facet is worse. Nothing without facets."""
    found, failed = shown(findings), _failed(findings)
    if failed:
        cells = [
            f"{cell_label(findings.comparison, d)}: {', '.join(_kinds(own, WORSE)) or 'none'}"
            for d, own in failed[:_NAMED]
        ]
        more = f"; and {plural(len(failed) - _NAMED, 'cell')} more" if len(failed) > _NAMED else ""
        return inline(f"Worse where it failed: {'; '.join(cells)}{more}.")
    return f"Worse: {', '.join(_counts(found)) or 'none'}." if found else ""


def _counts(found: Sequence[Event]) -> Iterator[str]:
    """agent broken form in 3 of 8 cells."""
    for suite, name in dict.fromkeys((e.suite, e.name) for e in found):
        own = [e for e in found if (e.suite, e.name) == (suite, name)]
        count = sum(e.moved == WORSE for e in own)
        if count:
            yield f"{suite} {name} in {count} of {plural(len(own), 'cell')}"
