"""The effect of serving under a policy on each checkpoint."""

from __future__ import annotations

from kvaudit.reports.sections.base import ContrastsSection, Inputs, contrasts_of
from kvaudit.reports.verdict.contrast import Contrast


class SensitivitySection(ContrastsSection):
    name = "sensitivity"
    title = "Serving sensitivity"
    explain = "Each checkpoint served under a policy minus itself uncompressed."
    order = 150

    def compute(self, inputs: Inputs) -> tuple[Contrast, ...] | None:
        if inputs.decided.comparison.mode == "serving":  # there it is the drift itself
            return None
        return tuple(contrasts_of(inputs.decided, "serving")) or None
