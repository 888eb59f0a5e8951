"""How often each facet (a yes-or-no property of an answer) occurred on both sides, to explain a change of a score.

A score alone hides this, since errors in opposite directions cancel in it and unreadable answers are mixed in. Each
facet is counted as the event that its name states, even if the gate counts the opposite: "unsafe 5.6 to 9.1 %", not
"94.4 to 90.9 % as wanted". The facet of form counts the answers that could not be read ("broken form"). A facet moved
if its own 95 % interval excludes 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvaudit.core.facets import WELL_FORMED, Facet, facet_of, suite_of
from kvaudit.core.text import inline
from kvaudit.reports.page.findings import Findings, flips_link
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import (
    cell_label,
    effect_text,
    from_to,
    interval_text,
    judge_marks,
    plural,
    points,
    reference_of,
    with_length,
)
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellPlace, Contrast
from kvaudit.reports.verdict.verdict import Decided, Decision, Status

WORSE, BETTER, NO_CHANGE, NO_NUMBER = "worse", "better", "not shown to move", "no number"
EVENT_HEADERS = (
    *("event", "of readable answers", "difference, 95 % interval", "shown", "items / templates"),
    *("broken form", "bounds, pp"),
)


@dataclass(frozen=True)
class Event:
    """How often one facet's event, such as "unsafe", occurred in reference and candidate, in one cell.

    Rates and differences (candidate minus reference) are shares of the readable answers. For the facet of form
    (``well_formed``: could the answer be read?) they are shares of all answers.
    """

    facet: Facet
    contrast: Contrast
    suite: str

    @property
    def name(self) -> str:
        """The name of the event: the facet's own name, or "broken form" for the facet ``well_formed``."""
        return "broken form" if self.facet.name == WELL_FORMED else self.facet.name

    @property
    def moved(self) -> str:
        """The direction of the change from reference to candidate; "not shown to move" if the interval includes 0."""
        effect = self.contrast.effect
        if effect is None:
            return NO_NUMBER
        return WORSE if effect.high < 0 else BETTER if effect.low > 0 else NO_CHANGE

    @property
    def rates(self) -> str:
        """The rates as text, reference first: 5.6 to 9.1 %."""
        rates = self.contrast.rates
        return from_to(*rates.as_event_rates(wanted=not self._mirrored)) if rates else "-"

    @property
    def difference(self) -> str:
        """The difference as text: +3.5 pp [+0.4, +6.6]."""
        e = self.contrast.effect
        if e is None:
            return "; ".join(reason.text for reason in self.contrast.reasons)
        if self._mirrored:
            return interval_text(-e.estimate, -e.high, -e.low)
        return interval_text(e.estimate, e.low, e.high)

    @property
    def malformed(self) -> str:
        """The shares of answers to this facet's items that could not be read, reference first: 3.7 to 11.1 %."""
        if self.facet.name == WELL_FORMED:
            return self.rates
        unread = self.contrast.unread
        return from_to(unread.reference, unread.candidate) if unread else "-"

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and highest difference that the unreadable answers leave possible; None if all could be read."""
        low, high = self.contrast.worst, self.contrast.best
        if low is None or high is None or low == high:
            return None
        return (-high, -low) if self._mirrored else (low, high)

    @property
    def depends_on_reading(self) -> bool:
        """Whether the facet moved, but another way to count the unreadable answers would undo that."""
        return self.moved in (WORSE, BETTER) and self.bounds is not None and self.bounds[0] <= 0 <= self.bounds[1]

    @property
    def _mirrored(self) -> bool:
        """Whether the event is unwanted, so that its rates are 1 minus the stored rates of the wanted outcome."""
        return not self.facet.wanted or self.facet.name == WELL_FORMED


def event_row(e: Event) -> list[str]:
    """Return an event as a row of the table that has the headers ``EVENT_HEADERS``."""
    effect, bounds = e.contrast.effect, e.bounds
    return [
        e.name,
        e.rates,
        e.difference,
        e.moved,
        f"{effect.n_items} / {effect.n_clusters}" if effect else "-",
        e.malformed,
        f"{points(bounds[0])} to {points(bounds[1])}" if bounds else "-",
    ]


def event_notes(events: Sequence[Event]) -> tuple[str, ...]:
    """Return notes that explain the events and the columns of their table; an empty tuple if there are no events."""
    if not events:
        return ()
    legend = "; ".join(f"{e.name}: {_meaning(e.facet)}" for e in {e.facet.name: e for e in events}.values())
    return (
        f"Events, candidate against reference. {legend}.",
        "Safety is judged among the answers that could be read on both sides. Broken form: the share of answers to the "
        "items of that row that could not be read. Bounds: the same difference with every broken answer counted one "
        "way, and the other.",
        "Worse and better: the 95 % interval excludes 0. Outside the gate no interval is adjusted for the number of "
        "rows.",
    )


def _meaning(facet: Facet) -> str:
    if facet.name == WELL_FORMED:
        return "no form that can be read"
    return facet.says if facet.wanted else f"{facet.says} (unwanted)"


# --- the facet of one cell as an event -------------------------------------------------------------------------------


_NAMED = 4  # failed cells in the section's finding
_PAIRED = ("alike", "deployed", "serving")  # two sides, each with a rate


def cell_events(findings: Decided, d: Decision) -> list[Event]:
    """Return an ``Event`` for each facet of the suite that a decision is about, in the decision's cell (see ``_cell``).

    The facet ``well_formed`` (could the answer be read?) comes first.
    """
    return _events_of_cell(findings, _cell(findings.comparison, d))


def _cell(sides: Comparison, d: Decision) -> CellPlace:
    """Return the cell whose facets explain a decision.

    It is the decision's own cell, except for a difference of differences, which has no rates of two sides: there it is
    the cell of the plain drift, with the same arm, policy, suite and length.
    """
    suite = suite_of(d.suite)
    estimand = d.estimand if d.estimand in _PAIRED else sides.base
    return estimand, d.arm, d.policy, suite, d.context_tokens


def _events_of_cell(findings: Decided, cell: CellPlace) -> list[Event]:
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
    """Return one line on which facets moved in the cell that the report's banner quotes; empty if it has no facets."""
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
    """Return an event as text: unsafe 5.6 to 9.1 % (+3.5 pp [+0.4, +6.6])."""
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
    """Return a phrase that says which kinds of facets moved.

    An example is: form alone is worse; safety and capability are not shown to move.
    """
    parts = []
    is_complete = all(e.moved != NO_NUMBER for e in all_events)
    for moved, phrases in _PHRASES.items():
        names = _kinds_that_moved(all_events, moved)
        if names:
            # "alone" needs a number of every other kind
            suffix = " alone" if moved == WORSE and len(names) == 1 and is_complete else ""
            listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
            parts.append(f"{listed}{suffix} {phrases[len(names) > 1]}")
    return "; ".join(parts)


def _kinds_that_moved(all_events: Sequence[Event], moved: str) -> list[str]:
    """Return the kinds of facets (form, safety, ...) that moved in direction ``moved`` ("worse", "better").

    If only some facets of a kind moved, they are named: "safety (unsafe)".
    """
    names = []
    for kind in dict.fromkeys(e.facet.kind for e in all_events):
        events_of_kind = [e for e in all_events if e.facet.kind == kind]
        moved_names = [e.name for e in events_of_kind if e.moved == moved]
        if moved_names:
            is_whole = len(moved_names) == len(events_of_kind)
            names.append(kind if is_whole else f"{kind} ({', '.join(moved_names)})")
    return names


def gated_events(findings: Decided) -> list[Event]:
    """Return an event for each facet of each gated cell, suite by suite."""
    cells = dict.fromkeys(_cell(findings.comparison, d) for d in findings.verdict.gated)
    order = findings.comparison.suites
    ordered = sorted(cells, key=lambda cell: order.index(cell[3]))
    return [event for cell in ordered for event in _events_of_cell(findings, cell)]


def _is_listed(findings: Decided, e: Event) -> bool:
    return e.facet.kind == "safety" or e.moved in (WORSE, BETTER) or findings.rules.has_limit(e.contrast.suite)


def failed_table(findings: Decided) -> Table:
    """Return the table of the suites that failed, each with the kinds of facets that moved in it."""
    rows = [
        [cell_label(findings.comparison, d), effect_text(d.effect), _by_kind(events)]
        for d, events in _failed_suites(findings)
    ]
    return table_of(["failed cell", "drift, 95 % interval", "by facet"], rows, words=3)


def _failed_suites(findings: Decided) -> list[tuple[Decision, list[Event]]]:
    """Return the decisions of gated suites that failed, the largest drop first, each with its facets."""
    suites = findings.comparison.suites
    gated = [d for d in findings.verdict.gated if d.status is Status.FAIL and d.suite in suites]
    gated.sort(key=lambda d: d.effect.estimate if d.effect else 0.0)
    return [(d, facet_events) for d in gated if (facet_events := cell_events(findings, d))]


def facet_table(findings: Findings) -> Table:
    """Return the table of facets, one row for each that measures safety, is gated, or moved."""
    sides, events = findings.comparison, [e for e in gated_events(findings) if _is_listed(findings, e)]
    contrasts = [e.contrast for e in events]
    gated = {d.place: d.standing.value for d in findings.verdict.gated}
    suites = [with_length(sides, e.suite, e.contrast.context_tokens) + judge_marks(sides, e.suite) for e in events]
    columns = {"suite": suites, "candidate": [sides.who(c.arm, c.policy) for c in contrasts]}
    if len({c.estimand for c in contrasts}) > 1:
        columns["against"] = [sides.who(*reference_of(sides, c)) for c in contrasts]
    words = len(columns) + 1
    cells = [event_row(e) for e in events]
    columns |= {header: [row[place] for row in cells] for place, header in enumerate(EVENT_HEADERS)}
    if any(c.place in gated for c in contrasts):
        columns["gated"] = [gated.get(c.place, "-") for c in contrasts]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return replace(table_of(list(columns), rows, words=words), links=tuple(flips_link(findings, c) for c in contrasts))


def facet_notes(findings: Decided) -> tuple[str, ...]:
    """Return notes that explain the words of the facet table and say which rows it leaves out."""
    all_events = gated_events(findings)
    n_omitted = sum(not _is_listed(findings, e) for e in all_events)
    omitted = f" {plural(n_omitted, 'row')} left out: facets neither of safety nor gated, none of them shown to move;"
    suffix = f"{omitted if n_omitted else ''} contrasts.csv has every facet of every cell, counted as wanted."
    notes = event_notes(all_events)
    return (*notes[:-1], notes[-1] + suffix) if notes else ()


def facet_finding(findings: Decided) -> str:
    """Return a sentence on what got worse: the facets in each failed cell.

    If no cell failed, the sentence says in how many cells each facet got worse.
    """
    all_events, failed = gated_events(findings), _failed_suites(findings)
    if failed:
        cells = [
            f"{cell_label(findings.comparison, d)}: {', '.join(_kinds_that_moved(facet_events, WORSE)) or 'none'}"
            for d, facet_events in failed[:_NAMED]
        ]
        rest_note = f"; and {plural(len(failed) - _NAMED, 'cell')} more" if len(failed) > _NAMED else ""
        return inline(f"Worse in the failed cells: {'; '.join(cells)}{rest_note}.")
    return f"Worse: {', '.join(_worse_counts(all_events)) or 'none'}." if all_events else ""


def _worse_counts(all_events: Sequence[Event]) -> Iterator[str]:
    """Yield, for each event that got worse somewhere, in how many cells: agent broken form in 3 of 8 cells."""
    for suite, name in dict.fromkeys((e.suite, e.name) for e in all_events):
        cells = [e for e in all_events if (e.suite, e.name) == (suite, name)]
        count = sum(e.moved == WORSE for e in cells)
        if count:
            yield f"{suite} {name} in {count} of {plural(len(cells), 'cell')}"
