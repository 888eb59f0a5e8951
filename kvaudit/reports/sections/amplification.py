"""Whether training under a policy cost more than serving under it."""

from __future__ import annotations

from kvaudit.reports.sections.base import ContrastsSection, Inputs, contrasts_of
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.drift import AMPLIFICATION


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
