"""What serving under a policy does to each checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.reports.drift.results import Contrast
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.layout.contrasts import contrasts_of, contrasts_table, lowest
from kvaudit.reports.layout.tables import Table
from kvaudit.reports.sections.base import Inputs, Section


class SensitivitySection(Section[tuple[Contrast, ...]]):
    """Each checkpoint against itself uncompressed, where there are several."""

    name = "sensitivity"
    title = "Serving sensitivity"
    explain = "Each checkpoint served under a policy minus itself uncompressed."
    order = 150

    def compute(self, inputs: Inputs) -> tuple[Contrast, ...] | None:
        if inputs.decided.comparison.mode == "serving":  # there it is the drift itself
            return None
        return tuple(contrasts_of(inputs.decided, "serving")) or None

    def tables(self, value: tuple[Contrast, ...], decided: Decided) -> Iterator[Table]:
        yield contrasts_table(decided.comparison, value)

    def finding(self, value: tuple[Contrast, ...], decided: Decided) -> str:
        return lowest(decided.comparison, value)
