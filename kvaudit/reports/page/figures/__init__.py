"""Figures of a report as inline SVG: those of the verdict, one file each, and those of its sections."""

from __future__ import annotations

from kvaudit.reports.page.figures import forest, heatmap, quadrant
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.canvas import Drawing, figure_style


def figures(findings: Findings) -> dict[str, Drawing]:
    """Every figure that has something to show, by name."""
    with figure_style():
        drawn = [
            forest.draw(findings),
            quadrant.draw(findings),
            heatmap.draw(findings),
            *(drawing for section, value in sections_in(findings.values) for drawing in section.draw(value, findings)),
        ]
    return {drawing.name: drawing for drawing in drawn if drawing}
