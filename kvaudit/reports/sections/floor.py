"""The A/A floor on the page: beside every gated figure of an engine's condition, and unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvaudit.core.errors import DataError
from kvaudit.core.text import inline, length_label
from kvaudit.reports.records.floor import FLOOR_FOLDER
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.floor import FloorCell, FloorUnit, covering_floor, floor_at, floor_of
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, percent, points, metric_label
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import Decided, Decision

_NO_MORE = "no more answers changed than change by asking again in another order"
FLOOR_NOTE = (
    "The floor decides nothing: flips by themselves go both ways, and what they add to the spread is in the interval "
    "already."
)
Units = tuple[FloorUnit, ...]


class FloorSection(Section[Units]):
    name = "floor"
    title = "A/A floor"
    explain = (
        "The same engine, the same setting, asked again: in the same order and in another one. What changes here "
        "changes by itself."
    )
    order = 80
    depth = Depth.VERDICT
    keys: ClassVar = {"floor": 80}
    banner_lines_at = 50

    def compute(self, inputs: Inputs) -> Units | None:
        sides = inputs.decided.comparison
        if not sides.references:
            return None
        try:
            return floor_of(inputs.data.records, inputs.data.floor, sides)
        except DataError:  # among the problems; beside the figures it says that nobody asked
            return ()

    def problems(self, inputs: Inputs) -> Iterator[str]:
        if not inputs.decided.comparison.references:
            return
        try:
            asked = inputs.data.floor
        except DataError as error:
            yield str(error)
            return
        yield from (f"{FLOOR_FOLDER}/{one.file}:{one.line}: {one.reason}" for one in asked.problems)
        yield from (f"{FLOOR_FOLDER}/{name}: not finished (no seal); resume the run" for name in asked.unfinished)

    def tables(self, value: Units, decided: Decided) -> Iterator[Table]:
        """One row per unit and way of asking again: texts, and every metric in which an answer changed."""
        several = len({(u.arm, u.seed) for u in value}) > 1
        rows = [_unit_row(decided.comparison, unit, several=several) for unit in value]
        headers = ["condition", *(["arm", "seed"] if several else []), "suite", "tokens", "asked", "same text"]
        yield table_of([*headers, "lost / gained, net drift in pp"], rows, words=len(headers) + 1)

    def notes(self, value: Units, decided: Decided) -> Iterator[str]:
        if value:
            yield from _sentences(value, decided)
            yield FLOOR_NOTE

    def finding(self, value: Units, decided: Decided) -> str:
        same, answers = sum(u.same for u in value), sum(u.answers for u in value)
        return f"{same} of {answers} answers, asked again, are the same text."

    def banner_lines(self, value: Units, decided: Decided, head: Decision | None) -> Iterator[str]:
        """The floor of the cell that a banner quotes, or that nobody asked for one; nothing for our own cache."""
        if head and decided.comparison.is_engine(head.policy):
            yield f"A/A: {'. '.join(f'{name} {said}' for name, said in _both_floors(value, decided.comparison, head))}."

    def beside_gate(self, value: Units, decided: Decided, gated: Sequence[Decision]) -> Iterator[Table | str]:
        yield _gate_table(value, decided.comparison, gated)
        yield from _sentences(value, decided)


def _unit_row(sides: Comparison, unit: FloorUnit, *, several: bool) -> list[str]:
    moved = [f"{f.metric} {f.lost}/{f.gained} of {f.answers}, {points(f.drift)}" for f in unit.flips if f.share]
    row = [sides.label(unit.policy), *([unit.arm, str(unit.seed)] if several else []), unit.suite]
    row += [length_label(unit.context_tokens), unit.way, f"{unit.same} of {unit.answers}"]
    return [*row, "; ".join(moved) or "none changed"]


def _gate_table(units: Units, sides: Comparison, decisions: Sequence[Decision]) -> Table:
    """Beside every gated figure of an engine: the floor of its condition, and of what that is compared with."""
    rows = []
    for d in decisions:
        if not sides.is_engine(d.policy):
            continue
        name = f"{metric_label(sides, d.suite)}, {length_label(d.context_tokens)}"
        moved = f"{d.effect.losses:.3g}/{d.effect.gains:.3g}" if d.effect else "-"
        figures = [sides.who(d.arm, d.policy), name, effect_text(d.effect), moved]
        rows.append([*figures, *(words for _, words in _both_floors(units, sides, d))])
    headers = ["candidate", "suite", "drift, 95 % interval", "lost / gained"]
    return table_of([*headers, "A/A of the condition", "A/A of what it is compared with"], rows, words=6)


def _both_floors(units: Units, sides: Comparison, d: Decision) -> Iterator[tuple[str, str]]:
    plain = sides.uncompressed_of(d.policy)
    other = (d.arm, plain)
    if sides.mode == "training":
        other = sides.reference, plain if d.estimand == "deployed" else d.policy
    for arm, policy in ((d.arm, d.policy), other):
        name = sides.label(policy) if arm == other[0] == d.arm else f"{arm} @ {sides.label(policy)}"
        cells = floor_at(units, arm, policy, d.suite, d.context_tokens)
        yield name, "; ".join(map(_cell_words, cells)) or "not asked again"


def _cell_words(cell: FloorCell) -> str:
    return f"{cell.way} {cell.same} of {cell.answers} texts the same, {cell.lost} lost {cell.gained} gained"


def _sentences(units: Units, decided: Decided) -> Iterator[str]:
    """The gated figures that are no larger than what the engine does by itself, a plain sentence each."""
    sides = decided.comparison
    for c in decided.contrasts:
        share = covering_floor(units, c) if c.estimand == "serving" and c.policy in decided.rules.primary else None
        if share is not None:
            where = f"{sides.who(c.arm, c.policy)}, {metric_label(decided.comparison, c.suite)}"
            yield inline(f"{where}: {_NO_MORE} ({percent(c.churn)}, {percent(share)}).")
