"""Whether training changed how much serving compression hurts."""

from __future__ import annotations

from dataclasses import replace

from kvaudit.reports.sections.base import ContrastsSection, Inputs, contrasts_of
from kvaudit.reports.sections.shared.tables import Passage
from kvaudit.reports.sections.shared.words import uncompressed_label
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.verdict import Decided


class InteractionSection(ContrastsSection):
    name = "interaction"
    title = "Interaction"
    reading = "Shown for the gated policies; drift.json holds all."
    order = 130

    def compute(self, inputs: Inputs) -> tuple[Contrast, ...] | None:
        if inputs.decided.comparison.mode == "serving":  # a single checkpoint has no interaction
            return None
        return tuple(contrasts_of(inputs.decided, "interaction", gated_only=True))

    def passage(self, value: tuple[Contrast, ...], decided: Decided) -> Passage:
        explain = (
            "Did training change how much serving compression hurts? The candidate's change from "
            f"{uncompressed_label(decided.comparison)} minus the reference's own: below zero, training made the model "
            "more fragile to compression."
        )
        return replace(super().passage(value, decided), explain=explain)
