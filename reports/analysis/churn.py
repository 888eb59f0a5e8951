"""E7: the churn behind a net drift. Losses and gains cancel in the drift; a user meets both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from reports.analysis.cells import BothSides, name_of_cell, sides, two_sided
from reports.analysis.results import CellChurn
from reports.drift.comparison import Comparison
from reports.gate.verdict import Decision
from reports.records.panel import Panel
from reports.stats.churn import churn, flips


def cell_churn(
    comparison: Comparison, tables: Mapping[tuple[str, int], Panel], decisions: Iterable[Decision]
) -> Iterator[CellChurn]:
    """The churn of every gated cell that has a number."""
    for d in decisions:
        found = sides(tables[d.suite, d.context_tokens], comparison, name_of_cell(d)) if two_sided(d) else None
        if found is not None:
            moved = flips(found.reference_pairs, found.candidate_pairs, samples=found.samples)
            any_seed = churn(found.reference, found.candidate, samples=found.draws)
            yield CellChurn(
                cell=name_of_cell(d),
                drift=_drift(found, d),
                losses=moved.lost,
                gains=moved.won,
                churn=moved.churn,
                draws=any_seed.draw_churn,
                rerun=any_seed.rerun_churn,
            )


def _drift(found: BothSides, d: Decision) -> float:
    """The gate's own number to the last bit, so that no tie is rounded two ways; not where people gave that number."""
    own = float(found.difference.mean())
    return d.effect.estimate if d.effect and math.isclose(own, d.effect.estimate, abs_tol=1e-9) else own
