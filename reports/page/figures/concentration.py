"""Concentration: the losses of every gated cell stacked by template, so one broken template is seen at once."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from kvaudit.core.text import clip, inline
from kvaudit.reports.analysis.results import CellConcentration
from kvaudit.reports.layout.canvas import INK, LOSS, UNDECIDED, Drawing, blank, quiet, save
from kvaudit.reports.layout.names import place_name
from kvaudit.reports.page.detail_tables import FEWEST_LOST
from kvaudit.reports.page.findings import Findings

_MOST = 20
_ONE_BY_ONE = 12  # templates drawn one by one


def draw(findings: Findings) -> Drawing | None:
    """A stacked bar per cell, the largest losses first; None where nothing was lost."""
    found = sorted(findings.analysis.concentration, key=lambda c: -c.losses)[:_MOST]
    if not found:
        return None
    figure = blank(7.6, 1.0 + 0.27 * len(found))
    panel = figure.subplots()
    for y, c in enumerate(found):
        _bar(panel, y, c)
    panel.set_yticks(range(len(found)), [inline(place_name(findings.comparison, c.cell)) for c in found])
    panel.set_ylim(len(found) - 0.5, -0.5)
    panel.set_xlim(0, 1.12 * max(c.losses for c in found))
    panel.set_xlabel("items lost, by template")
    quiet(panel)
    key = [
        Patch(facecolor=LOSS, alpha=0.8, label="one template each"),
        Patch(facecolor=LOSS, hatch="///", edgecolor=INK, label="template with over half of the losses"),
        Patch(facecolor=UNDECIDED, alpha=0.6, label="all others"),
    ]
    figure.legend(handles=key, loc="outside upper center", ncols=3)
    return save(figure, "concentration", "Losses of each gated cell stacked by template, worst template first.")


def _bar(panel: Axes, y: int, c: CellConcentration) -> None:
    start = 0.0
    dominant = c.dominant if c.losses >= FEWEST_LOST else ()
    for place, t in enumerate(c.templates[:_ONE_BY_ONE]):
        look: dict[str, Any] = {"facecolor": LOSS, "alpha": 0.9 if place % 2 == 0 else 0.55, "linewidth": 0}
        if t.template in dominant:
            look |= {"hatch": "///", "edgecolor": INK, "linewidth": 0.4}
        panel.barh(y, t.losses, left=start, height=0.68, **look)
        start += t.losses
    panel.barh(y, c.losses - start, left=start, height=0.68, color=UNDECIDED, alpha=0.6, linewidth=0)
    if dominant:
        name = inline(clip(dominant[0], 40))
        panel.text(c.losses, y, f" {name}", va="center", fontsize=7)
