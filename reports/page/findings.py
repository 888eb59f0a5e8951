"""Everything that is known of a run once it is decided: what a page is written from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvaudit.reports.analysis.curves import Curve
from kvaudit.reports.analysis.displacement import Displacement
from kvaudit.reports.analysis.examples import Example
from kvaudit.reports.analysis.floor import FloorUnit
from kvaudit.reports.analysis.guarded import GuardEffect
from kvaudit.reports.analysis.mechanism import Mechanism
from kvaudit.reports.analysis.remedies import Remedies
from kvaudit.reports.analysis.results import Analysis
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.results import Contrast, Drift
from kvaudit.reports.gate.error_rates import ErrorRates
from kvaudit.reports.gate.rules import Rules
from kvaudit.reports.gate.verdict import Verdict
from kvaudit.reports.gate.waivers import Waiver
from kvaudit.reports.labels.second import SecondJudge
from kvaudit.reports.records.load import Evidence


@dataclass(frozen=True)
class Findings:
    """A decided drift, and what stands beside its verdict; empty where it was not asked for."""

    drift: Drift
    rules: Rules
    verdict: Verdict
    waivers: tuple[Waiver, ...] = ()
    analysis: Analysis = field(default_factory=Analysis)
    mechanism: Mechanism = field(default_factory=Mechanism)  # what goes with spans that the cache lost
    curves: tuple[Curve, ...] = ()
    examples: tuple[Example, ...] = ()
    displacement: tuple[Displacement, ...] = ()
    guards: tuple[GuardEffect, ...] = ()  # what stood before the model, and what it hides
    floor: tuple[FloorUnit, ...] = ()  # what changes when an engine is asked the same again
    remedies: Remedies | None = None  # what else a failing arm could be served under
    calibration: ErrorRates | None = None  # how often the gate is wrong
    second: SecondJudge | None = None  # of a run that was judged again
    problems: tuple[str, ...] = ()  # in the files
    viewed: frozenset[str] | None = None  # contrasts whose flips lie beside as pages; None: this is no report of a run
    evidence: Evidence = field(default_factory=Evidence)
    checkpoints: Mapping[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)  # what each says of itself
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def comparison(self) -> Comparison:
        """The two sides of every difference."""
        return self.drift.comparison

    @property
    def contrasts(self) -> Iterator[Contrast]:
        """Those of whole suites and of the facets that the gate names; the others stand in their own section."""
        facets = self.comparison.facets
        return (c for c in self.drift.contrasts if c.suite not in facets or c.suite in self.rules.margins)
