"""Other ways to analyse the gated cells, and whether any of them would have said something else of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from kvaudit.reports.analysis.sensitivity import CellSensitivity, MethodVerdict, Variant, sensitivity
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.gate.verdict import Decision
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import place_name, points, pvalue
from kvaudit.reports.sections.base import Inputs, Section


@dataclass(frozen=True)
class OtherWays:
    """Every gated cell under every method, and what each method would make of the run."""

    cells: tuple[CellSensitivity, ...]
    methods: tuple[MethodVerdict, ...]


class MethodsSection(Section[OtherWays]):
    name = "methods"
    title = "Other ways to analyse"
    explain = "Would another analysis of the same cells have said something else?"
    order = 270
    gated = True
    keys: ClassVar = {"analysis.sensitivity": 35, "analysis.methods": 36}
    asides_at = 90

    def compute(self, inputs: Inputs) -> OtherWays | None:
        cells, methods = sensitivity(inputs.decided.drift, inputs.data.panels, inputs.decided.verdict)
        return OtherWays(cells, methods) if cells else None

    def facts(self, value: OtherWays | None) -> Mapping[str, Any]:
        found = value or OtherWays((), ())
        return {
            "analysis.sensitivity": [asdict(cell) for cell in found.cells],
            "analysis.methods": [asdict(method) for method in found.methods],
        }

    def tables(self, value: OtherWays, decided: Decided) -> Iterator[Table]:
        rows = [
            (m.method, m.status, "FLIPS the verdict" if m.flips else "same verdict", m.cells) for m in value.methods
        ]
        headers = ["analysis", "verdict", "against the declared one", "cells that differ"]
        yield table_of(headers, [list(map(str, row)) for row in rows], words=3)
        yield _cells_table(value.cells, decided.comparison)

    def notes(self, value: OtherWays, decided: Decided) -> Iterator[str]:
        yield self.finding(value, decided) + " It stays the pre-declared one; the t interval passes too easily."

    def finding(self, value: OtherWays, decided: Decided) -> str:
        flips = [m.method for m in value.methods if m.flips]
        return (
            f"The verdict would be another one by: {', '.join(flips)}." if flips else "No other way flips the verdict."
        )

    def asides(self, value: OtherWays, decided: Decided, head: Decision | None) -> Iterator[str]:
        flips = [f"{m.method} ({m.status})" for m in value.methods if m.flips]
        of = ", of the judge's labels," if decided.verdict.judged else ""
        if flips:
            yield f"Another analysis{of} would flip this verdict: {', '.join(flips)}. The declared one stands."


def _cells_table(cells: Sequence[CellSensitivity], sides: Comparison) -> Table:
    names = [v.method for v in cells[0].variants] if cells else []
    rows = []
    for c in cells:
        declared = c.variants[0].status.rstrip("*")
        row = [place_name(sides, c.cell)]
        for v in c.variants:
            mark = "" if v.status.rstrip("*") == declared else " (differs)"
            row.append(f"{v.status}{mark} {_numbers(v)}")
        rows.append(row)
    return table_of(["cell", *names], rows, words=1 + len(names))


def _numbers(v: Variant) -> str:
    if v.low is not None and v.high is not None:
        return f"{points(v.estimate)} [{points(v.low)}, {points(v.high)}]"
    return f"{points(v.estimate)}, p {pvalue(v.pvalue_drop)}" if v.pvalue_drop is not None else ""
