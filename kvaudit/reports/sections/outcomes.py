"""The rate of the desired outcome in each cell, and how many answers were degenerate, truncated or unscored."""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.core.records import Outcome
from kvaudit.core.text import length_label
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import percent
from kvaudit.reports.verdict.contrast import Cell
from kvaudit.reports.verdict.verdict import Decided


class OutcomesSection(Section[tuple[Cell, ...]]):
    name = "outcomes"
    title = "Rates and outcomes"
    explain = (
        "How often each cell did the desired thing; degenerate (empty, looping), truncated and unscored answers "
        "count as 0."
    )
    order = 280

    def compute(self, inputs: Inputs) -> tuple[Cell, ...] | None:
        return tuple(inputs.decided.drift.cells) or None

    def tables(self, value: tuple[Cell, ...], decided: Decided) -> Iterator[Table]:
        headers = ["arm", "policy", "suite", "tokens", "rate", "if unscored were desired", *Outcome]
        rows = []
        for c in value:
            row = [c.arm, decided.comparison.label(c.policy), c.suite, length_label(c.context_tokens)]
            row += [percent(c.rate), percent(c.rate_if_desired)]
            rows.append([*row, *(str(c.outcomes[name]) for name in Outcome)])
        yield table_of(headers, rows, words=3)

    def finding(self, value: tuple[Cell, ...], decided: Decided) -> str:
        lost = [f"{sum(c.outcomes[name] for c in value)} {name}" for name in ("degenerate", "truncated", "unscored")]
        low, high = (percent(end(c.rate for c in value)) for end in (min, max))
        return f"Rates from {low} to {high}; answers: {', '.join(lost)}."
