"""Where losses sit: a drop spread over all templates and one template that broke are different failures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from reports.analysis.cells import BothSides, name_of_cell, sides, two_sided
from reports.analysis.results import CellConcentration, CellName, ItemLoss, TemplateLoss
from reports.drift.comparison import Comparison
from reports.gate.verdict import Decision
from reports.records.panel import Panel
from reports.stats.concentration import concentration

MOST_ITEMS = 20
MOST_TEMPLATES = 20


def cell_concentration(
    comparison: Comparison, tables: Mapping[tuple[str, int], Panel], decisions: Iterable[Decision]
) -> Iterator[CellConcentration]:
    """Losses by template and by item of every gated cell that lost anything."""
    for d in decisions:
        found = sides(tables[d.suite, d.context_tokens], comparison, name_of_cell(d)) if two_sided(d) else None
        if found is not None and (found.difference < 0).any():
            yield _cell(found, name_of_cell(d))


def _cell(found: BothSides, name: CellName) -> CellConcentration:
    z = found.difference
    by_template = concentration(z, np.array(found.templates, dtype=object).astype(str))
    worst = [i for i in np.argsort(z, kind="stable") if z[i] < 0][:MOST_ITEMS]
    lost = [entry for entry in by_template.clusters if entry.losses > 0]
    return CellConcentration(
        cell=name,
        losses=by_template.losses,
        gini=by_template.gini,
        carrying_half=by_template.carrying_half,
        n_templates=len(by_template.clusters),
        n_losing=len(lost),
        templates=tuple(
            TemplateLoss(str(t.label), int(t.items), t.losses, t.gains, t.share) for t in lost[:MOST_TEMPLATES]
        ),
        dominant=tuple(str(label) for label in by_template.dominant),
        items=tuple(ItemLoss(found.items[i], found.templates[i], float(-z[i])) for i in worst),
    )
