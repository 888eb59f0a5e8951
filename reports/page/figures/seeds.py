"""Seeds: the drift of every gated cell training run by training run, and how far the runs lie apart."""

from __future__ import annotations

from matplotlib.lines import Line2D

from kvaudit.core.text import inline
from kvaudit.reports.layout.canvas import INK, UNDECIDED, Drawing, blank, colour, quiet, save
from kvaudit.reports.layout.names import place_name
from kvaudit.reports.page.findings import Findings

_MOST = 40


def draw(findings: Findings) -> Drawing | None:
    """Dots per seed with their mean; None without a training run."""
    found = [s for s in findings.analysis.seeds if findings.comparison.mode == "training"][:_MOST]
    if not found:
        return None
    figure = blank(7.6, 1.0 + 0.25 * len(found))
    panel = figure.subplots()
    left = min(0.0, *(100 * v for s in found for v in s.estimates))
    right = max(0.0, *(100 * v for s in found for v in s.estimates))
    room = max(2.0, right - left)
    for y, s in enumerate(found):
        hue, marker, _ = colour(findings.comparison.arms, s.cell.arm)
        values = [100 * v for v in s.estimates]
        panel.plot([min(values), max(values)], [y, y], color=hue, alpha=0.4, linewidth=1)
        panel.plot(values, [y] * len(values), marker=marker, color=hue, linestyle="", markersize=4.5)
        panel.plot([sum(values) / len(values)], [y], marker="|", color=INK, markersize=10)
        panel.text(right + 0.06 * room, y, _spread(s.sd, s.low, s.high), va="center", fontsize=7.5)
    panel.axvline(0, color=UNDECIDED, linewidth=0.8)
    panel.set_yticks(range(len(found)), [inline(place_name(findings.comparison, s.cell)) for s in found])
    panel.set_ylim(len(found) - 0.5, -0.5)
    panel.set_xlim(left - 0.05 * room, right + 0.55 * room)
    panel.set_xlabel("drift, pp, a mark per training seed; right: SD, 95 % interval")
    quiet(panel)
    mean = Line2D([], [], color=INK, marker="|", markersize=10, linestyle="", label="mean over seeds")
    figure.legend(handles=[mean], loc="outside upper center")
    return save(figure, "seeds", "Drift of each gated cell by training seed, with the standard deviation over seeds.")


def _spread(sd: float | None, low: float | None, high: float | None) -> str:
    if sd is None or low is None or high is None:
        return "recipe claim not supported"
    return f"SD {100 * sd:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
