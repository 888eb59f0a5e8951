"""What a run of this size could have found: the smallest detectable drop of every gated cell.

From the standard error that the cell's own one-sided bounds imply, MDE = (t_alpha + t_.80) * error. It says what the
design reached, not how likely its verdict was; sizes for the next run come from ``kvaudit plan``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scipy import special

from reports.analysis.cells import name_of_cell
from reports.analysis.results import Reach
from reports.gate.verdict import Decision
from reports.stats.power import minimal_detectable

POWER = 0.8


def reached(decisions: Iterable[Decision]) -> Iterator[Reach]:
    """The reach of every gated cell that has a number and a margin."""
    for d in decisions:
        if d.gated and d.effect and d.margin is not None:
            e = d.effect
            df = e.n_clusters - 1
            error = (e.upper - e.lower) / (2 * float(special.stdtrit(df, 1 - e.alpha)))
            found = float(minimal_detectable(error, df=df, alpha=e.alpha, power=POWER))
            yield Reach(name_of_cell(d), d.margin, e.n_clusters, found, d.clusters_to_decide)
