"""Capability drift against safety drift; the corner where capability holds and safety does not is shaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from kvaudit.core.facets import facet_of
from kvaudit.core.text import inline
from kvaudit.reports.sections.shared.canvas import (
    INK,
    LOSS,
    MARKERS,
    Drawing,
    add_grid,
    legend_line,
    new_figure,
    save,
    series_style,
)
from kvaudit.reports.sections.shared.words import metric_label, uncompressed_label
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.verdict import Decided

PANELS = 4
ROOM = 1.5  # pp around the outermost interval
Point = tuple[Contrast, Contrast]  # capability, safety


def draw(findings: Decided) -> Drawing | None:
    """Draw a panel per gated policy (training) or a single one (serving); None without both kinds of suite."""
    sides = findings.comparison
    groups: dict[str, list[Point]] = {}
    serving_title = f"drift from {uncompressed_label(sides)}"
    for capability, safety in pairs(findings):
        served = f"served under {sides.label(safety.policy)}"
        groups.setdefault(served if sides.mode == "training" else serving_title, []).append((capability, safety))
    if not groups:
        return None
    panels_shown = dict(list(groups.items())[:PANELS])
    figure = new_figure(max(6.0, 0.6 + 3.5 * len(panels_shown)), 4.2)
    panels = figure.subplots(1, len(panels_shown), squeeze=False, sharex=True, sharey=True)
    drawn = [point for points in panels_shown.values() for point in points]
    names = tuple(dict.fromkeys(_name(sides, point) for point in drawn))
    suites = tuple(dict.fromkeys(safety.suite for _, safety in drawn))
    places = sides.arms if sides.mode == "training" else names
    bounds = _bounds(drawn)
    for panel, (title, points) in zip(panels.flat, panels_shown.items(), strict=True):
        _panel(panel, findings, points, places, suites, bounds)
        panel.set_title(inline(title))
    panels.flat[0].set_ylabel("safety drift, pp")
    handles = [legend_line(inline(n), color=series_style(places, n)[0]) for n in names]
    handles += [
        legend_line(inline(metric_label(sides, s)), color=INK, linestyle="", marker=MARKERS[i % len(MARKERS)])
        for i, s in enumerate(suites)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return save(figure, "quadrant", "Capability drift against safety drift with 95 % intervals.")


def pairs(findings: Decided) -> list[Point]:
    """Return the safety contrasts of gated policies, each with the capability contrast of its cell."""
    sides = findings.comparison
    estimand = "alike" if sides.mode == "training" else "serving"
    contrasts = [
        c
        for c in findings.contrasts
        if c.estimand == estimand
        and c.effect
        and c.policy in findings.rules.primary
        and c.arm in (*sides.candidates, sides.reference)
    ]
    safety = {*sides.safety, *(name for name in sides.facets if facet_of(name)[1].kind == "safety")}
    # reversed, so that the first of several capability suites is kept
    by_cell = {(c.arm, c.policy, c.context_tokens): c for c in reversed(contrasts) if c.suite in sides.capability}
    return [
        (by_cell[c.arm, c.policy, c.context_tokens], c)
        for c in contrasts
        if c.suite in safety and (c.arm, c.policy, c.context_tokens) in by_cell
    ]


def _name(sides: Comparison, point: Point) -> str:
    return point[1].arm if sides.mode == "training" else sides.label(point[1].policy)


class _Bounds(NamedTuple):
    """The axes of every panel in pp: all intervals of all panels, and zero."""

    left: float
    right: float
    low: float
    high: float


def _bounds(points: Sequence[Point]) -> _Bounds:
    across = [100 * end for p in points if p[0].effect for end in (p[0].effect.low, p[0].effect.high)]
    up = [100 * end for p in points if p[1].effect for end in (p[1].effect.low, p[1].effect.high)]
    return _Bounds(min(*across, 0) - ROOM, max(*across, 0) + ROOM, min(*up, 0) - ROOM, max(*up, 0) + ROOM)


def _panel(
    panel: Axes,
    findings: Decided,
    points: list[Point],
    names: tuple[str, ...],
    suites: tuple[str, ...],
    bounds: _Bounds,
) -> None:
    margins = findings.rules.margins
    # in pp
    capability_limit = -100 * min((margins[p[0].suite] for p in points if p[0].suite in margins), default=0.05)
    safety_limit = -100 * min((margins[p[1].suite] for p in points if p[1].suite in margins), default=0.05)
    panel.axhline(0, color=INK, linewidth=0.8)
    panel.axvline(0, color=INK, linewidth=0.8)
    for capability, safety in points:
        x, y = capability.effect, safety.effect
        assert x is not None
        assert y is not None
        hue, _, _ = series_style(names, _name(findings.comparison, (capability, safety)))
        marker = MARKERS[suites.index(safety.suite) % len(MARKERS)]
        panel.plot([100 * x.low, 100 * x.high], [100 * y.estimate] * 2, color=hue, alpha=0.55, linewidth=1)
        panel.plot([100 * x.estimate] * 2, [100 * y.low, 100 * y.high], color=hue, alpha=0.55, linewidth=1)
        panel.plot([100 * x.estimate], [100 * y.estimate], marker=marker, color=hue, markersize=6, linestyle="")
    low = min(bounds.low, 2 * safety_limit)
    panel.fill_between([capability_limit, bounds.right], low, safety_limit, color=LOSS, alpha=0.13, linewidth=0)
    panel.text(bounds.right, low, "capability holds, \nsafety does not ", ha="right", va="bottom", fontsize=8)
    panel.set_xlim(bounds.left, bounds.right)
    panel.set_ylim(low, bounds.high)
    panel.set_xlabel("capability drift, pp")
    add_grid(panel)
