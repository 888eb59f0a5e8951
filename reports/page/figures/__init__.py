"""Figures of a report as inline SVG: one file per figure."""

from __future__ import annotations

from reports.drift.report import Report
from reports.gate.decide import Verdict
from reports.page.figures import cache, churn, concentration, dose, forest, heatmap, quadrant, seeds, training
from reports.page.figures.canvas import Drawing, style


def figures(report: Report, verdict: Verdict) -> dict[str, Drawing]:
    """Every figure that has something to show, by name."""
    with style():
        drawn = (
            forest.draw(report, verdict),
            quadrant.draw(report),
            heatmap.draw(report, verdict),
            dose.budget(report),
            dose.length(report),
            churn.draw(report),
            concentration.draw(report),
            seeds.draw(report),
            training.draw(report),
            cache.draw(report),
        )
    return {drawing.name: drawing for drawing in drawn if drawing}
