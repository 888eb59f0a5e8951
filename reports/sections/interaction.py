"""Whether training changed how much serving compression hurts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvaudit.reports.drift.results import Contrast
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.layout.contrasts import contrasts_of, contrasts_table, lowest
from kvaudit.reports.layout.names import plain_words
from kvaudit.reports.layout.passage import Passage
from kvaudit.reports.layout.tables import Table
from kvaudit.reports.sections.base import Inputs, Section


class InteractionSection(Section[tuple[Contrast, ...]]):
    """How much more a candidate is hurt by serving compression than the reference."""

    name = "interaction"
    title = "Interaction"
    explain = ""
    order = 130

    def compute(self, inputs: Inputs) -> tuple[Contrast, ...] | None:
        if inputs.decided.comparison.mode == "serving":  # one checkpoint interacts with nothing
            return None
        return tuple(contrasts_of(inputs.decided, "interaction", gated_only=True))

    def passage(self, value: tuple[Contrast, ...], decided: Decided) -> Passage:
        explain = (
            "Did training change how much serving compression hurts? The candidate's change from "
            f"{plain_words(decided.comparison)} minus the reference's own: below zero, training made the model more "
            "fragile to compression."
        )
        return replace(super().passage(value, decided), explain=explain)

    def tables(self, value: tuple[Contrast, ...], decided: Decided) -> Iterator[Table]:
        yield contrasts_table(decided.comparison, value)

    def notes(self, value: tuple[Contrast, ...], decided: Decided) -> Iterator[str]:
        yield "Shown for the gated policies; drift.json holds all."

    def finding(self, value: tuple[Contrast, ...], decided: Decided) -> str:
        return lowest(decided.comparison, value)
