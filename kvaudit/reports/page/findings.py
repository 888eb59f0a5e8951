"""Everything that is known of a run once it is decided: what a page is written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvaudit.reports.records.load import Evidence
from kvaudit.reports.sections.base import Values
from kvaudit.reports.verdict.error_rates import ErrorRates
from kvaudit.reports.verdict.verdict import Decided


@dataclass(frozen=True)
class Findings(Decided):
    """A decided drift, what sections found beside its verdict, and what is told of the run."""

    values: Values = field(default_factory=dict)
    calibration: ErrorRates | None = None  # how often the gate is wrong
    problems: tuple[str, ...] = ()  # in the files
    linked_contrasts: frozenset[str] | None = (
        None  # contrasts whose flips lie beside as pages; None: this is no report of a run
    )
    evidence: Evidence = field(default_factory=Evidence)
    checkpoints: Mapping[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)  # what each says of itself
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model as the spec names it, or, where that is a variable, as the run found it."""
        return str(self.provenance.get("model") or self.comparison.model)
