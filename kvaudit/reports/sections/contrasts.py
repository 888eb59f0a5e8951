"""The contrasts besides the drift of candidate from reference, a section each.

Amplification: did training under a policy cost more than serving under it? Interaction: did training change how much
serving under a policy costs? Sensitivity: what does serving under a policy cost each checkpoint?
"""

from __future__ import annotations

from dataclasses import replace

from kvaudit.reports.sections.base import ContrastsSection, Inputs, contrasts_of
from kvaudit.reports.sections.shared.tables import Passage
from kvaudit.reports.sections.shared.words import uncompressed_label
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.drift import AMPLIFICATION
from kvaudit.reports.verdict.verdict import Decided


class AmplificationSection(ContrastsSection):
    name = "amplification"
    title = "Amplification"
    explain = (
        "Did training under a policy cost more than serving under it? Candidate uncompressed minus the reference "
        "served under the policy that the candidate was trained under: below zero, training cost more."
    )
    order = 140

    def compute(self, inputs: Inputs) -> tuple[Contrast, ...] | None:
        return tuple(contrasts_of(inputs.decided, AMPLIFICATION)) or None


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


class SensitivitySection(ContrastsSection):
    name = "sensitivity"
    title = "Serving sensitivity"
    explain = "Each checkpoint served under a policy minus itself uncompressed."
    order = 150

    def compute(self, inputs: Inputs) -> tuple[Contrast, ...] | None:
        if inputs.decided.comparison.mode == "serving":  # there it is the drift itself
            return None
        return tuple(contrasts_of(inputs.decided, "serving")) or None
