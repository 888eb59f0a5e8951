"""The items that cost the most, in full."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Example, largest_losses
from kvaudit.reports.sections.shared.tables import Passage
from kvaudit.reports.verdict.verdict import Decided


class ExamplesSection(Section[tuple[Example, ...]]):
    name = "examples"
    title = "Largest losses"
    explain = (
        "Items the reference got right and the candidate lost; model output is shown as it was, control characters "
        "made visible."
    )
    order = 310
    gated = True
    keys: ClassVar = {"examples": 120}

    def compute(self, inputs: Inputs) -> tuple[Example, ...] | None:
        return largest_losses(inputs.data, inputs.decided.drift, inputs.decided.verdict) or None

    def passage(self, value: tuple[Example, ...], decided: Decided) -> Passage:
        return replace(super().passage(value, decided), examples=value)

    def finding(self, value: tuple[Example, ...], decided: Decided) -> str:
        return f"{len(value)} answers in full."
