"""Figures of a report as inline SVG: one file per figure."""

from __future__ import annotations

from kvaudit.reports.layout.canvas import Drawing, style
from kvaudit.reports.page.figures import cache, churn, concentration, dose, forest, heatmap, quadrant, seeds, training
from kvaudit.reports.page.findings import Findings


def figures(findings: Findings) -> dict[str, Drawing]:
    """Every figure that has something to show, by name."""
    with style():
        drawn = (
            forest.draw(findings),
            quadrant.draw(findings),
            heatmap.draw(findings),
            dose.budget(findings),
            dose.length(findings),
            churn.draw(findings),
            concentration.draw(findings),
            seeds.draw(findings),
            training.draw(findings),
            cache.draw(findings),
        )
    return {drawing.name: drawing for drawing in drawn if drawing}
