"""The A/A floor on the page: beside every gated figure of an engine's condition, and unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvaudit.core.text import inline, length_label
from kvaudit.reports.analysis.floor import AgainFlips, FloorCell, FloorUnit, floor_above, floor_at
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.gate.verdict import Decision
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import drift, percent, points, spelled
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Section

_NO_MORE = "no more answers changed than change by asking again in another order"


def floor_section(findings: Findings) -> Section | None:
    """What was asked again, unit by unit; None where nothing was."""
    units = findings.floor
    if not units:
        return None
    same, answers = sum(u.same for u in units), sum(u.answers for u in units)
    return Section(
        "floor",
        "A/A floor",
        "The same engine, the same setting, asked again: in the same order and in another one. What changes here "
        "changes by itself.",
        tables=(floor_table(findings),),
        notes=(*map(inline, floor_sentences(findings)), FLOOR_NOTE),
        finding=f"{same} of {answers} answers, asked again, are the same text.",
    )


FLOOR_NOTE = (
    "The floor decides nothing: flips by themselves go both ways, and what they add to the spread is in the interval "
    "already."
)


def floor_table(findings: Findings) -> Table:
    """One row per unit and way of asking again: texts, and every metric in which an answer changed."""
    several = len({(u.arm, u.seed) for u in findings.floor}) > 1
    rows = [_unit_row(findings.comparison, unit, several=several) for unit in findings.floor]
    headers = ["condition", *(["arm", "seed"] if several else []), "suite", "tokens", "asked", "same text"]
    return table_of([*headers, "lost / gained, net drift in pp"], rows, words=len(headers) + 1)


def _unit_row(sides: Comparison, unit: FloorUnit, *, several: bool) -> list[str]:
    moved = [_flips_words(flips) for flips in unit.flips if flips.lost or flips.gained]
    return [
        sides.label(unit.policy),
        *([unit.arm, str(unit.seed)] if several else []),
        unit.suite,
        length_label(unit.context_tokens),
        unit.way,
        f"{unit.same} of {unit.answers}",
        "; ".join(moved) or "none changed",
    ]


def _flips_words(flips: AgainFlips) -> str:
    return f"{flips.metric} {flips.lost}/{flips.gained} of {flips.answers}, {points(flips.drift)}"


def gate_floor_table(findings: Findings, decisions: Sequence[Decision]) -> Table:
    """Beside every gated figure of an engine: the floor of its condition, and of what that is compared with."""
    sides = findings.comparison
    rows = []
    for d in decisions:
        if not sides.is_engine(d.policy):
            continue
        name = f"{spelled(findings.comparison, d.suite)}, {length_label(d.context_tokens)}"
        moved = f"{d.effect.losses:.3g}/{d.effect.gains:.3g}" if d.effect else "-"
        figures = [f"{d.arm} @ {sides.label(d.policy)}", name, drift(d.effect) if d.effect else "-", moved]
        rows.append([*figures, *(words for _, words in _both_floors(findings, d))])
    headers = ["candidate", "suite", "drift, 95 % interval", "lost / gained"]
    return table_of([*headers, "A/A of the condition", "A/A of what it is compared with"], rows, words=6)


def _both_floors(findings: Findings, d: Decision) -> Iterator[tuple[str, str]]:
    """Name and floor of both sides of a figure."""
    sides = findings.comparison
    plain = sides.uncompressed_of(d.policy)
    other = (d.arm, plain)
    if sides.mode == "training":
        other = sides.reference, plain if d.estimand == "E2" else d.policy
    for arm, policy in ((d.arm, d.policy), other):
        name = sides.label(policy) if arm == other[0] == d.arm else f"{arm} @ {sides.label(policy)}"
        cells = floor_at(findings.floor, arm, policy, d.suite, d.context_tokens)
        yield name, "; ".join(map(_cell_words, cells)) or "not asked again"


def _cell_words(cell: FloorCell) -> str:
    return f"{cell.way} {cell.same} of {cell.answers} texts the same, {cell.lost} lost {cell.gained} gained"


def floor_line(findings: Findings, d: Decision) -> str:
    """The floor of the cell that a banner quotes, or that nobody asked for one; empty for our own cache."""
    if not findings.comparison.is_engine(d.policy):
        return ""
    return f"A/A: {'. '.join(f'{name} {words}' for name, words in _both_floors(findings, d))}."


def floor_sentences(findings: Findings) -> Iterator[str]:
    """The gated figures that are no larger than what the engine does by itself, a plain sentence each."""
    sides = findings.comparison
    for c in findings.contrasts:
        share = floor_above(findings.floor, c) if c.estimand == "E4" and c.policy in findings.rules.primary else None
        if share is not None:
            where = f"{c.arm} @ {sides.label(c.policy)}, {spelled(findings.comparison, c.suite)}"
            yield f"{where}: {_NO_MORE} ({percent(c.churn)}, {percent(share)})."
