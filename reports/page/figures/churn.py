"""Churn: what every gated cell lost and gained, with the net drift that is left of it."""

from __future__ import annotations

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvaudit.core.text import inline
from kvaudit.reports.layout.canvas import GAIN, INK, LOSS, Drawing, blank, quiet, save
from kvaudit.reports.layout.names import place_name
from kvaudit.reports.page.findings import Findings

_MOST = 40


def draw(findings: Findings) -> Drawing | None:
    """A bar to each side per cell, the most churn first where there are too many; None without a gated number."""
    found = list(findings.analysis.churn)
    if not found:
        return None
    if len(found) > _MOST:
        found = sorted(found, key=lambda c: -c.churn)[:_MOST]
    figure = blank(7.6, 1.0 + 0.23 * len(found))
    panel = figure.subplots()
    for y, c in enumerate(found):
        panel.barh(y, -100 * c.losses, height=0.68, color=LOSS, alpha=0.75)
        panel.barh(y, 100 * c.gains, height=0.68, color=GAIN, alpha=0.75)
        panel.plot([100 * c.drift], [y], marker="D", color=INK, markersize=4)
    panel.axvline(0, color=INK, linewidth=0.8)
    panel.set_yticks(range(len(found)), [inline(place_name(findings.comparison, c.cell)) for c in found])
    panel.set_ylim(len(found) - 0.5, -0.5)
    panel.set_xlabel("pp of all items")
    quiet(panel)
    key = [
        Patch(facecolor=LOSS, alpha=0.75, label="lost"),
        Patch(facecolor=GAIN, alpha=0.75, label="gained"),
        Line2D([], [], color=INK, marker="D", markersize=4, linestyle="", label="net drift"),
    ]
    figure.legend(handles=key, loc="outside upper center", ncols=3)
    return save(figure, "churn", "What each gated cell lost and gained, in pp of all items, and its net drift.")
