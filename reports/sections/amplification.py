"""Whether training under a policy cost more than serving under it."""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.reports.drift.drift import AMPLIFICATION
from kvaudit.reports.drift.results import Contrast
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.layout.contrasts import contrasts_of, contrasts_table, lowest
from kvaudit.reports.layout.tables import Table
from kvaudit.reports.sections.base import Inputs, Section


class AmplificationSection(Section[tuple[Contrast, ...]]):
    """Training under a policy against serving under it."""

    name = "amplification"
    title = "Amplification"
    explain = (
        "Did training under a policy cost more than serving under it? Candidate uncompressed minus the reference "
        "served under the policy that the candidate was trained under: below zero, training cost more."
    )
    order = 140

    def compute(self, inputs: Inputs) -> tuple[Contrast, ...] | None:
        return tuple(contrasts_of(inputs.decided, AMPLIFICATION)) or None

    def tables(self, value: tuple[Contrast, ...], decided: Decided) -> Iterator[Table]:
        yield contrasts_table(decided.comparison, value)

    def finding(self, value: tuple[Contrast, ...], decided: Decided) -> str:
        return lowest(decided.comparison, value)
