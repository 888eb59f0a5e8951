"""The smallest drop that every gated cell would have found with power .8: (critical + t_.80) * error.

That is the quantile of max-T over its cells, and the standard error that a cell's own one-sided bounds imply. Simulated
at .74 to .78; sizes for the next run come from ``kvaudit plan``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from scipy import special

from kvaudit.reports.drift.results import CellName
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.gate.verdict import Verdict
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import held_to, place_name
from kvaudit.reports.sections.base import Inputs, Section

POWER = 0.8


@dataclass(frozen=True)
class Reach:
    """The smallest drop that a gated cell would have found with power .8, and how many more templates would pass it.

    ``larger`` is in words, of an open cell that more templates would help or would not; see ``gate.verdict.Larger``.
    """

    cell: CellName
    margin: float
    n_clusters: int
    detectable: float
    larger: str | None


Reaches = tuple[Reach, ...]


class ReachSection(Section[Reaches]):
    name = "reach"
    title = "What this size can find"
    explain = (
        "The smallest true drop that each gated cell would have found, from its own interval. Where it is above "
        "the margin, a cell that is open was likely to stay open."
    )
    reading = "For the size of a next run: kvaudit plan."
    order = 260
    gated = True
    keys: ClassVar = {"analysis.reach": 38}

    def compute(self, inputs: Inputs) -> Reaches | None:
        return tuple(_reached(inputs.decided.verdict)) or None

    def tables(self, value: Reaches, decided: Decided) -> Iterator[Table]:
        headers = ["cell", "templates", "margin, pp", "smallest drop found with power .8, pp"]
        rows = []
        for r in value:
            numbers = [str(r.n_clusters), _held_to(r, decided.verdict), f"{100 * r.detectable:.1f}"]
            rows.append([place_name(decided.comparison, r.cell), *numbers, r.larger or "-"])
        yield table_of([*headers, "templates that would pass if nothing was lost"], rows)

    def finding(self, value: Reaches, decided: Decided) -> str:
        found = [r.detectable for r in value]
        return f"A drop of {100 * min(found):.1f} to {100 * max(found):.1f} pp, by cell."


def _held_to(reach: Reach, verdict: Verdict) -> str:
    """The margin, or what a ratio comes to in points."""
    own = next((d for d in verdict.gated if d.ratio and d.name == reach.cell), None)
    return f"{100 * reach.margin:g}" if own is None else f"{100 * reach.margin:.1f} ({held_to(own)})"


def _reached(verdict: Verdict) -> Iterator[Reach]:
    for d in verdict.gated:
        if d.effect and d.margin is not None:
            e = d.effect
            df = e.n_clusters - 1
            # each one-sided bound lies a t quantile of errors from the estimate
            error = (e.upper - e.lower) / (2 * float(special.stdtrit(df, 1 - e.alpha)))
            found = error * (verdict.adjustment.critical + float(special.stdtrit(df, POWER)))
            yield Reach(d.name, d.margin, e.n_clusters, found, d.larger)
