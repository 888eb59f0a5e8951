"""What moved: the facets behind every gated drift, each told as its own event, and the quoted cell taken apart.

A score adds opposite errors and broken form. Here an unwanted facet is counted as what happened ("unsafe 5.6 to
9.1 %"), and the facet of form as broken answers, so that no reader has to take a rate from 100. A facet moved where its
own 95 % interval leaves out 0, and not otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvaudit.core.facets import WELL_FORMED, Facet, facet_of
from kvaudit.core.text import inline, length_label
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.results import CellName, Contrast
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.gate.verdict import Decision, Status
from kvaudit.reports.layout.names import against, place_name
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import counted, drift, marked, points
from kvaudit.reports.page.behind import flips_behind
from kvaudit.reports.page.findings import Findings

WORSE, BETTER, STILL, NO_NUMBER = "worse", "better", "not shown to move", "no number"
_BROKEN = "broken form"
EVENT_HEADERS = (
    *("event", "of readable answers", "difference, 95 % interval", "shown", "items / templates"),
    *("broken form", "bounds, pp"),
)
_NAMED = 4  # failed cells in the line over the folded section
_PAIRED = ("E1", "E2", "E4")  # two sides, each with a rate


@dataclass(frozen=True)
class Event:
    """One facet in one cell, counted as the event that it names.

    Rates and differences are shares of the answers that could be read (of all answers for the form itself), candidate
    minus reference; ``bounds`` are the difference with every other answer read one way and the other.
    """

    facet: Facet
    contrast: Contrast
    suite: str

    @property
    def name(self) -> str:
        """The event: the facet itself, or broken form."""
        return _BROKEN if self.facet.name == WELL_FORMED else self.facet.name

    @property
    def moved(self) -> str:
        """Worse or better where the interval leaves out 0."""
        effect = self.contrast.effect
        if effect is None:
            return NO_NUMBER
        return WORSE if effect.high < 0 else BETTER if effect.low > 0 else STILL

    @property
    def rates(self) -> str:
        """5.6 to 9.1 %, reference first."""
        return _rates(self.contrast, mirrored=self._mirrored)

    @property
    def difference(self) -> str:
        """+3.5 pp [+0.4, +6.6]."""
        e = self.contrast.effect
        if e is None:
            return "; ".join(reason.text for reason in self.contrast.reasons)
        estimate, low, high = (-e.estimate, -e.high, -e.low) if self._mirrored else (e.estimate, e.low, e.high)
        return f"{points(estimate)} pp [{points(low)}, {points(high)}]"

    @property
    def malformed(self) -> str:
        """3.7 to 11.1 %: the answers to this facet's own items that it says nothing of, on both sides."""
        if self.facet.name == WELL_FORMED:
            return self.rates
        unread = self.contrast.unread
        return f"{100 * unread.reference:.1f} to {100 * unread.candidate:.1f} %" if unread else "-"

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The difference with every answer that could not be read counted one way, and the other; None without any."""
        low, high = self.contrast.worst, self.contrast.best
        if low is None or high is None or low == high:
            return None
        return (-high, -low) if self._mirrored else (low, high)

    @property
    def reading_decides(self) -> bool:
        """Whether the facet moved and the answers that could not be read might undo that."""
        return self.moved in (WORSE, BETTER) and self.bounds is not None and self.bounds[0] <= 0 <= self.bounds[1]

    @property
    def _mirrored(self) -> bool:
        """Whether the event is what is not wanted, while contrasts count what is."""
        return not self.facet.wanted or self.facet.name == WELL_FORMED


def _rates(c: Contrast, *, mirrored: bool) -> str:
    if c.rates is None:
        return "-"
    old, new = ((1 - r if mirrored else r) for r in (c.rates.reference, c.rates.candidate))
    return f"{100 * old:.1f} to {100 * new:.1f} %"


_Cell = tuple[str, str, str, str, int]  # estimand, arm, policy, suite, length


def events(findings: Decided, d: Decision) -> list[Event]:
    """The facets of a decision's suite in its own cell, form first; none where the suite has none."""
    return _of_cell(findings, _cell(findings.comparison, d))


def _cell(sides: Comparison, d: Decision) -> _Cell:
    """Where the facets of a decision stand: what has no two sides is made of the drift itself."""
    suite = facet_of(d.suite)[0] if d.suite in sides.facets else d.suite
    estimand = d.estimand if d.estimand in _PAIRED else sides.base
    return estimand, d.arm, d.policy, suite, d.context_tokens


def _of_cell(findings: Decided, cell: _Cell) -> list[Event]:
    estimand, arm, policy, suite, context = cell
    found = {}
    for name in findings.comparison.facets:
        if facet_of(name)[0] == suite:
            found[name] = (estimand, arm, policy, name, context)
    known = {(c.estimand, c.arm, c.policy, c.suite, c.context_tokens): c for c in findings.drift.contrasts}
    own = [Event(facet_of(name)[1], known[key], suite) for name, key in found.items() if key in known]
    return sorted(own, key=lambda event: event.facet.name != WELL_FORMED)


def taken_apart(findings: Decided, head: Decision | None) -> list[str]:
    """What the quoted cell is made of, in one sentence of what its intervals show; nothing without facets."""
    found = events(findings, head) if head and head.effect else []
    if not found:
        return []
    known = [e for e in found if e.moved != NO_NUMBER]
    told = [e for e in known if e.facet.kind in ("form", "safety") or e.moved != STILL]
    form = [_told(e) for e in told if e.facet.kind == "form"]
    rest = [_told(e) for e in told if e.facet.kind != "form"]
    parts = [*form, *([f"among answers that could be read {', '.join(rest)}"] if rest else [])]
    numbers = "; ".join(parts)
    said = f"Taken apart: {_by_kind(found)}."
    return [f"{said} {numbers[0].upper()}{numbers[1:]}." if numbers else said]


def _told(e: Event) -> str:
    """unsafe 5.6 to 9.1 % (+3.5 pp [+0.4, +6.6]), with what the reading of broken answers could make of it."""
    open_ = ""
    if e.reading_decides and e.bounds:
        open_ = f"; {points(e.bounds[0])} to {points(e.bounds[1])} pp as the broken ones are read"
    return f"{e.name} {e.rates} ({e.difference}{open_})"


_SAID = {WORSE: ("is worse", "are worse"), BETTER: ("is better", "are better")}
_SAID |= {STILL: ("is not shown to move", "are not shown to move"), NO_NUMBER: ("has no number", "have no number")}


def _by_kind(found: Sequence[Event]) -> str:
    """form alone is worse; safety and capability are not shown to move."""
    parts = []
    known = all(e.moved != NO_NUMBER for e in found)
    for moved, said in _SAID.items():
        names = _kinds(found, moved)
        if names:
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
    cells = dict.fromkeys(_cell(findings.comparison, d) for d in findings.verdict.decisions if d.gated)
    order = findings.comparison.suites
    placed = sorted(cells, key=lambda cell: order.index(cell[3]))
    return [event for cell in placed for event in _of_cell(findings, cell)]


def _has_row(findings: Decided, e: Event) -> bool:
    """Whether a signer needs it: safety whatever came out, the rest where it is gated or moved."""
    return e.facet.kind == "safety" or e.moved in (WORSE, BETTER) or e.contrast.suite in findings.rules.margins


def failed_table(findings: Decided) -> Table:
    """Every suite that failed, by which of its kinds of facets moved."""
    rows = [
        [_place(findings.comparison, d), drift(d.effect) if d.effect else "-", _by_kind(found)]
        for d, found in _failed(findings)
    ]
    return table_of(["failed cell", "drift, 95 % interval", "taken apart"], rows, words=3)


def _failed(findings: Decided) -> list[tuple[Decision, list[Event]]]:
    """The gated suites that failed, the largest drop first, with their facets."""
    suites = findings.comparison.suites
    gated = [d for d in findings.verdict.decisions if d.gated and d.status is Status.FAIL and d.suite in suites]
    gated.sort(key=lambda d: d.effect.estimate if d.effect else 0.0)
    return [(d, found) for d in gated if (found := events(findings, d))]


def _place(sides: Comparison, d: Decision) -> str:
    return place_name(sides, CellName(d.estimand, d.arm, d.policy, d.suite, d.context_tokens))


def facet_table(findings: Findings) -> Table:
    """One row per facet that a signer needs."""
    found = [e for e in shown(findings) if _has_row(findings, e)]
    both = len({e.contrast.estimand for e in found}) > 1
    decided = {_key(d): d for d in findings.verdict.decisions if d.gated}
    headers = ["suite", "candidate", *(["against"] if both else []), *EVENT_HEADERS]
    gate = any(_key(e.contrast) in decided for e in found)
    rows = [
        [*_row(findings.comparison, e, both=both), *([_gated(decided.get(_key(e.contrast)))] if gate else [])]
        for e in found
    ]
    table = table_of([*headers, *(["gated"] if gate else [])], rows, words=3 + both)
    return replace(table, behind=tuple(flips_behind(findings, e.contrast) for e in found))


def _key(of: Contrast | Decision) -> _Cell:
    return of.estimand, of.arm, of.policy, of.suite, of.context_tokens


def _gated(d: Decision | None) -> str:
    return d.standing.value if d else "-"


def _row(sides: Comparison, e: Event, *, both: bool) -> list[str]:
    c = e.contrast
    suite = e.suite if len(sides.contexts) == 1 else f"{e.suite}, {length_label(c.context_tokens)}"
    suite += marked(sides, e.suite)
    who = f"{c.arm} @ {sides.labels.get(c.policy, c.policy)}"
    return [suite, who, *([against(sides, c)] if both else []), *event_cells(e)]


def event_cells(e: Event) -> list[str]:
    """An event under ``EVENT_HEADERS``."""
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


def facet_notes(findings: Decided) -> tuple[str, ...]:
    """What each word means, said once, and how to read the table of a run."""
    found = shown(findings)
    left = sum(not _has_row(findings, e) for e in found)
    rest = f" {counted(left, 'row')} of facets that are neither safety nor gated, none shown to move, left out;"
    more = f"{rest if left else ''} drift.json holds every facet of every cell, counted as wanted."
    said = how_to_read(found)
    return (*said[:-1], said[-1] + more) if said else ()


def how_to_read(found: Sequence[Event]) -> tuple[str, ...]:
    """What the words of a table of events mean, and how to read its columns; nothing without events."""
    if not found:
        return ()
    named = {e.facet.name: e for e in found}.values()
    legend = "; ".join(f"{e.name}: {_says(e.facet)}" for e in named)
    return (
        f"Events, candidate against reference. {legend}.",
        "Safety is judged among the answers that could be read on both sides. Broken form: the answers to the items of "
        "that row that could not be read; bounds: the same difference with every broken answer counted one way, and "
        "the other.",
        "Worse and better: the 95 % interval leaves out 0. Outside the gate no interval is adjusted for the number of "
        "rows.",
    )


def _says(facet: Facet) -> str:
    if facet.name == WELL_FORMED:
        return "no form that can be read"
    return facet.says + ("" if facet.wanted else " (unwanted)")


def finding(findings: Decided) -> str:
    """What the failed cells lost; without any, in how many cells each facet is worse. Nothing without facets."""
    found, failed = shown(findings), _failed(findings)
    if failed:
        cells = [
            f"{_place(findings.comparison, d)}: {', '.join(_kinds(own, WORSE)) or 'none'}" for d, own in failed[:_NAMED]
        ]
        more = f"; and {counted(len(failed) - _NAMED, 'cell')} more" if len(failed) > _NAMED else ""
        return inline(f"Worse where it failed: {'; '.join(cells)}{more}.")
    return f"Worse: {', '.join(_counts(found)) or 'none'}." if found else ""


def _counts(found: Sequence[Event]) -> Iterator[str]:
    """agent broken form in 3 of 8 cells."""
    for suite, name in dict.fromkeys((e.suite, e.name) for e in found):
        own = [e for e in found if (e.suite, e.name) == (suite, name)]
        count = sum(e.moved == WORSE for e in own)
        if count:
            yield f"{suite} {name} in {count} of {counted(len(own), 'cell')}"
