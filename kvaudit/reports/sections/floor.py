"""The A/A floor on the page: with every gated figure of an engine's condition, and unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvaudit.core.errors import DataError
from kvaudit.core.text import inline, length_label
from kvaudit.reports.records.load import FLOOR_FOLDER
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.floor import FloorUnit, covering_floor, floor_at, floor_of
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, metric_label, percent, points
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import Decided, Decision

Units = tuple[FloorUnit, ...]


class FloorSection(Section[Units]):
    name = "floor"
    title = "A/A floor"
    explain = (
        "The same engine and setting, asked again in the same order and in another one: these changes are not caused "
        "by the setting."
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
        except DataError:  # reported by ``problems``; the figures then say "not asked again"
            return ()

    def problems(self, inputs: Inputs) -> Iterator[str]:
        if not inputs.decided.comparison.references:
            return
        try:
            floor = inputs.data.floor
        except DataError as error:
            yield str(error)
            return
        yield from (f"{FLOOR_FOLDER}/{row.file}:{row.line}: {row.reason}" for row in floor.problems)
        yield from (f"{FLOOR_FOLDER}/{name}: not finished (no seal); resume the run" for name in floor.unfinished)

    def tables(self, value: Units, decided: Decided) -> Iterator[Table]:
        """Yield a row per unit and way of asking: equal texts, and every metric in which an answer changed."""
        several = len({(u.arm, u.seed) for u in value}) > 1
        rows = [_unit_row(decided.comparison, unit, several=several) for unit in value]
        headers = ["condition", *(["arm", "seed"] if several else []), "suite", "tokens", "asked", "same text"]
        yield table_of([*headers, "lost / gained, net drift in pp"], rows, words=len(headers) + 1)

    def notes(self, value: Units, decided: Decided) -> Iterator[str]:
        if value:
            yield from _sentences(value, decided)
            yield (
                "The floor decides nothing: A/A flips go both ways, and the spread that they add is already in the "
                "interval."
            )

    def finding(self, value: Units, decided: Decided) -> str:
        same, answers = sum(u.same for u in value), sum(u.answers for u in value)
        return f"{same} of {answers} answers have the same text when asked again."

    def banner_lines(self, value: Units, decided: Decided, head: Decision | None) -> Iterator[str]:
        """Yield the floor of the cell that the banner quotes, if an engine served it."""
        if head and decided.comparison.is_engine(head.policy):
            yield f"A/A: {'. '.join(f'{name} {text}' for name, text in _both_floors(value, decided.comparison, head))}."

    def beside_gate(self, value: Units, decided: Decided, gated: Sequence[Decision]) -> Iterator[Table | str]:
        yield _gate_table(value, decided.comparison, gated)
        yield from _sentences(value, decided)


def _unit_row(sides: Comparison, unit: FloorUnit, *, several: bool) -> list[str]:
    changes = [f"{f.metric} {f.lost}/{f.gained} of {f.answers}, {points(f.drift)}" for f in unit.flips if f.share]
    row = [sides.label(unit.policy), *([unit.arm, str(unit.seed)] if several else []), unit.suite]
    row += [length_label(unit.context_tokens), unit.way, f"{unit.same} of {unit.answers}"]
    return [*row, "; ".join(changes) or "none changed"]


def _gate_table(units: Units, sides: Comparison, decisions: Sequence[Decision]) -> Table:
    """Return a row per gated figure of an engine, with the floors of its condition and of the reference."""
    rows = []
    for d in decisions:
        if not sides.is_engine(d.policy):
            continue
        metric = f"{metric_label(sides, d.suite)}, {length_label(d.context_tokens)}"
        flips = f"{d.effect.losses:.3g}/{d.effect.gains:.3g}" if d.effect else "-"
        figures = [sides.who(d.arm, d.policy), metric, effect_text(d.effect), flips]
        rows.append([*figures, *(text for _, text in _both_floors(units, sides, d))])
    headers = ["candidate", "suite", "drift, 95 % interval", "lost / gained"]
    return table_of([*headers, "A/A of the condition", "A/A of what it is compared with"], rows, words=6)


def _both_floors(units: Units, sides: Comparison, d: Decision) -> Iterator[tuple[str, str]]:
    """Yield name and floor of the condition, then of its reference."""
    uncompressed = sides.uncompressed_of(d.policy)
    reference = (d.arm, uncompressed)
    if sides.mode == "training":
        reference = sides.reference, uncompressed if d.estimand == "deployed" else d.policy
    for arm, policy in ((d.arm, d.policy), reference):
        name = sides.label(policy) if arm == reference[0] == d.arm else f"{arm} @ {sides.label(policy)}"
        cells = floor_at(units, arm, policy, d.suite, d.context_tokens)
        texts = [f"{c.way} {c.same} of {c.answers} texts the same, {c.lost} lost {c.gained} gained" for c in cells]
        yield name, "; ".join(texts) or "not asked again"


def _sentences(units: Units, decided: Decided) -> Iterator[str]:
    """Yield a sentence for each gated figure that does not exceed the floor."""
    sides = decided.comparison
    for c in decided.contrasts:
        share = covering_floor(units, c) if c.estimand == "serving" and c.policy in decided.rules.primary else None
        if share is not None:
            cell = f"{sides.who(c.arm, c.policy)}, {metric_label(decided.comparison, c.suite)}"
            yield inline(
                f"{cell}: no more answers changed than change by asking again in another order ({percent(c.churn)}, "
                f"{percent(share)})."
            )
