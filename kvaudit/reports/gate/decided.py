"""A drift with what was decided of it: what every page about a verdict is written from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast, Drift
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import Verdict
from kvaudit.reports.verdict.waivers import Waiver


@dataclass(frozen=True)
class Decided:
    """A drift, the rules it was held to, and the verdict."""

    drift: Drift
    rules: Rules
    verdict: Verdict
    waivers: tuple[Waiver, ...] = ()

    @property
    def comparison(self) -> Comparison:
        """The two sides of every difference."""
        return self.drift.comparison

    @property
    def contrasts(self) -> Iterator[Contrast]:
        """Those of whole suites and of the facets that the gate names; the others stand in their own section."""
        facets = self.comparison.facets
        return (c for c in self.drift.contrasts if c.suite not in facets or self.rules.holds(c.suite))
