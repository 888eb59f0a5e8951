"""Everything that is known of a run once it is decided: what a page is written from."""

from __future__ import annotations

from collections.abc import Mapping
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
from kvaudit.reports.calibration.stamp import Stamp
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.labels.second import SecondJudge
from kvaudit.reports.records.load import Evidence


@dataclass(frozen=True)
class Findings(Decided):
    """A decided drift, and what stands beside its verdict; empty where it was not asked for."""

    analysis: Analysis = field(default_factory=Analysis)
    mechanism: Mechanism = field(default_factory=Mechanism)  # what goes with spans that the cache lost
    curves: tuple[Curve, ...] = ()
    examples: tuple[Example, ...] = ()
    displacement: tuple[Displacement, ...] = ()
    guards: tuple[GuardEffect, ...] = ()  # what stood before the model, and what it hides
    floor: tuple[FloorUnit, ...] = ()  # what changes when an engine is asked the same again
    remedies: Remedies | None = None  # what else a failing arm could be served under
    calibration: Stamp | None = None  # how often the gate is wrong
    second: SecondJudge | None = None  # of a run that was judged again
    problems: tuple[str, ...] = ()  # in the files
    viewed: frozenset[str] | None = None  # contrasts whose flips lie beside as pages; None: this is no report of a run
    evidence: Evidence = field(default_factory=Evidence)
    checkpoints: Mapping[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)  # what each says of itself
    provenance: Mapping[str, Any] = field(default_factory=dict)
