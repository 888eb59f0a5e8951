"""E7: the churn behind a net drift. Losses and gains cancel in the drift; a user meets both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from reports.analysis.cells import name_of, sides, two_sided
from reports.analysis.results import CellChurn
from reports.panel import Panel
from reports.plan import Plan
from reports.stats.churn import churn
from reports.verdict import Decision


def cell_churn(
    plan: Plan, tables: Mapping[tuple[str, int], Panel], decisions: Iterable[Decision]
) -> Iterator[CellChurn]:
    """The churn of every gated cell that has a number."""
    for d in decisions:
        found = sides(tables[d.suite, d.context_tokens], plan, name_of(d)) if two_sided(d) else None
        if found is not None:
            moved = churn(found.reference, found.candidate, samples=found.draws)
            yield CellChurn(
                cell=name_of(d),
                drift=float(found.difference.mean()),
                losses=moved.losses,
                gains=moved.gains,
                churn=moved.churn,
                draws=moved.draw_churn,
                rerun=moved.rerun_churn,
            )
