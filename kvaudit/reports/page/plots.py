"""Figures of a report as inline SVG: forest plot, heatmap and quadrant plot of drifts, and the figures of the sections.

In the heatmap outline, star and hatching show the status, so colour is not needed. The quadrant plot shades the corner
in which capability holds and safety does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from kvaudit.core.facets import facet_of
from kvaudit.core.text import inline, length_label, length_of
from kvaudit.reports.page.findings import Findings, flips_link
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.canvas import (
    GAIN,
    INK,
    LOSS,
    MARKERS,
    UNDECIDED,
    Drawing,
    add_grid,
    figure_style,
    label_rows,
    legend_line,
    new_figure,
    save,
    series_style,
)
from kvaudit.reports.sections.shared.words import held_to, metric_label, points, shorten, uncompressed_label
from kvaudit.reports.verdict.cell import unadjusted_status
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.controls import Controls
from kvaudit.reports.verdict.verdict import Decided, Decision, Status


def figures(findings: Findings) -> dict[str, Drawing]:
    """Return the figures that have data, by name."""
    with figure_style():
        drawings = [
            draw_forest(findings),
            draw_quadrant(findings),
            draw_heatmap(findings),
            *(drawing for section, value in sections_in(findings.values) for drawing in section.draw(value, findings)),
        ]
    return {drawing.name: drawing for drawing in drawings if drawing}


# --- forest plot: every gated drift with its interval, and the margin as a shaded band -------------------------------


LOOK = {  # colour, marker, filled
    Status.PASS: (GAIN, "o", True),
    Status.PASS_NOTED: (GAIN, "o", False),
    Status.FAIL: (LOSS, "X", True),
    Status.INCONCLUSIVE: (UNDECIDED, "D", False),
    Status.NOT_MEASURABLE: (UNDECIDED, "s", False),
    Status.INVALID: (UNDECIDED, "v", True),  # a number without a margin
}
_FOREST_COLUMNS = 3
_MOST_COLUMNS = 4  # if that avoids a second line
_ROW_LETTER, _LEAST_NAMES, _MOST_NAMES = 0.07, 2.1, 8.0  # inches: of a letter, and of the row names
_ENDS = {"deployed": ", end to end", "worst": ", worst policy"}
_DRAWN = ("alike", "deployed", "worst", "serving")  # contrasts that share a margin
_ForestRow = tuple[str, str, str]  # policy, arm, estimand
_ForestGroup = tuple[str, int]  # suite, length


def draw_forest(findings: Decided) -> Drawing | None:
    """Draw the forest plot, with a panel per suite and length; return None if no cell has a number.

    If every panel would have one row, all rows are in one panel.
    """
    cells = [d for d in findings.verdict.gated if d.effect and d.estimand in _DRAWN]
    if not cells:
        return None
    groups = list(dict.fromkeys(_forest_group(d) for d in cells))
    rows = list(dict.fromkeys(_forest_row(d) for d in cells))
    if len(rows) == 1 and len({d.margin for d in cells}) == 1:
        figure = new_figure(7.5, 1.2 + 0.27 * len(groups))
        names = [_panel_title(findings.comparison, *group) for group in groups]
        _forest_panel(figure.subplots(), cells, [_forest_group(d) for d in cells], names)
    else:
        figure = _forest_panels(findings.comparison, cells, groups, rows)
    figure.legend(handles=_forest_legend({d.status for d in cells}), loc="outside upper center", ncols=4)
    return save(figure, "forest", "Drift of every gated cell with its 95 % interval and the margin band.")


def _forest_group(d: Decision) -> _ForestGroup:
    return d.suite, d.context_tokens


def _forest_row(d: Decision) -> _ForestRow:
    return d.policy, d.arm, d.estimand


def _panel_title(sides: Comparison, suite: str, tokens: int) -> str:
    suite = metric_label(sides, suite)
    return f"{suite}, {tokens} tokens" if tokens else suite


def _forest_panels(
    sides: Comparison, cells: list[Decision], groups: list[_ForestGroup], rows: list[_ForestRow]
) -> Figure:
    columns = len(groups) if len(groups) <= _MOST_COLUMNS else _FOREST_COLUMNS
    lines = -(-len(groups) // columns)  # rounded up
    pitch = 0.27 if lines == 1 else 0.2  # keeps the verdict on one printed page
    names = _forest_names(sides, rows)
    names_width = min(max(_LEAST_NAMES, _ROW_LETTER * max(map(len, names)) - 0.4), _MOST_NAMES)
    figure = new_figure(names_width + 2.7 * columns, lines * (1.1 + pitch * len(rows)))
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, group in zip(panels.flat, groups, strict=False):
        panel_cells = [d for d in cells if _forest_group(d) == group]
        _forest_panel(panel, panel_cells, [_forest_row(d) for d in panel_cells], names, rows)
        panel.set_title(inline(_panel_title(sides, *group)))
    return figure


def _forest_names(sides: Comparison, rows: list[_ForestRow]) -> list[str]:
    if sides.mode == "serving":
        return [sides.label(policy) for policy, *_ in rows]
    return [f"{sides.who(arm, policy)}{_ENDS.get(name, '')}" for policy, arm, name in rows]


def _forest_panel(
    panel: Axes,
    decisions: Sequence[Decision],
    row_keys: Sequence[Hashable],
    names: list[str],
    rows: Sequence[Hashable] = (),
) -> None:
    """Draw each decision as an interval in a panel of the forest plot.

    ``row_keys`` holds a key for each decision: decisions with the same key share a row. ``rows`` lists all keys from
    the top row down; if it is empty, the rows are in the order of ``row_keys``. ``names`` are the labels of the rows.
    """
    margin = 100 * min(d.margin or 0 for d in decisions)  # a ratio has another margin in every cell
    panel.axvspan(-margin, margin, color=GAIN, alpha=0.13, linewidth=0)
    panel.axvline(-margin, color=LOSS, linestyle="--", linewidth=1)
    panel.axvline(0, color=INK, linewidth=0.8)
    places = {row: y for y, row in enumerate(rows or dict.fromkeys(row_keys))}
    for d, row in zip(decisions, row_keys, strict=True):
        assert d.effect is not None
        y = places[row]
        hue, marker, filled = LOOK[d.status]
        panel.plot([100 * d.effect.low, 100 * d.effect.high], [y, y], color=hue, linewidth=1.6)
        panel.plot([100 * d.effect.lower], [y], marker="|", color=hue, markersize=8)
        face = hue if filled else "none"
        panel.plot([100 * d.effect.estimate], [y], marker=marker, color=hue, markerfacecolor=face, markersize=6)
    label_rows(panel, list(names))
    limit = f"limit {held_to(decisions[0])}" if decisions[0].ratio else f"margin {margin:g}"
    panel.set_xlabel(f"drift, pp ({limit})")
    add_grid(panel)


def _forest_legend(statuses: set[Status]) -> list[Line2D]:
    return [
        legend_line(status.value, color=hue, marker=marker, markerfacecolor=hue if filled else "none")
        for status, (hue, marker, filled) in LOOK.items()
        if status in statuses
    ]


# --- heatmap of drift by policy and arm ------------------------------------------------------------------------------


_FULL = 0.20  # drift with the strongest colour
_HEATMAP_COLUMNS = 2
OUTLINE = 1.4
_LONGEST, _USUAL = 28, 12  # letters of a policy's name below its column, at most and without extra height
_LEAST_WIDTH, _LETTER = 4.5, 0.085  # inches: of the figure with its key, and of a letter


def draw_heatmap(findings: Findings) -> Drawing | None:
    """Draw the heatmap of drift, a panel for each suite; return None if no drift could be computed.

    In a panel, rows are arms and columns are policies; arm and reference are both served under the column's policy. If
    nothing was trained, rows are suites instead, and each policy is compared with uncompressed serving.
    """
    sides = findings.comparison
    estimand = "alike" if sides.mode == "training" else "serving"
    contrasts = [c for c in findings.contrasts if c.estimand == estimand and (c.effect or c.reasons)]
    if sides.mode == "serving":
        contrasts = [c for c in contrasts if c.arm == sides.reference]
    if not any(c.effect for c in contrasts):
        return None
    policies = [p for p in sides.policies if any(c.policy == p for c in contrasts)]
    groups: dict[str, list[Contrast]] = {}
    for c in contrasts:
        title = f"{metric_label(sides, c.suite)}, {length_of(c.context_tokens)}"
        if sides.mode == "serving":
            title = f"{c.arm}, drift from {uncompressed_label(sides).removeprefix('policy ')}"
        groups.setdefault(title, []).append(c)
    rows = [_heatmap_rows(sides, group) for group in groups.values()]
    columns = min(_HEATMAP_COLUMNS, len(groups)) if len(policies) <= 5 else 1
    lines = -(-len(groups) // columns)  # rounded up
    longest_name = max(len(row) for panel_rows in rows for row in panel_rows)
    width = 0.4 + (0.9 + 0.8 * len(policies)) * columns
    # long row names need more width than a few columns have
    width = max(width, _LEAST_WIDTH, _LETTER * longest_name * columns + 0.8 * len(policies) * columns)
    names = [shorten(inline(sides.label(policy)), _LONGEST) for policy in policies]
    below = max(map(len, names))  # drawn aslant under the last row
    figure = new_figure(width, 1.1 + lines * (0.35 + 0.36 * max(map(len, rows))) + _LETTER * max(0, below - _USUAL))
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for place, (panel, (title, group)) in enumerate(zip(panels.flat, groups.items(), strict=False)):
        _heatmap_panel(panel, findings, group, dict(zip(policies, names, strict=True)))
        panel.tick_params(labelbottom=place + columns >= len(groups))
        panel.set_title(inline(title))
    key = [
        Patch(facecolor=(*_rgb(LOSS), 0.8), label="worse"),
        Patch(facecolor=(*_rgb(GAIN), 0.8), label="better"),
        Patch(facecolor="none", edgecolor=INK, hatch="///", label="undecided"),
        Patch(facecolor="none", edgecolor=INK, linewidth=OUTLINE, label="FAIL"),
        Patch(facecolor="none", edgecolor="none", label="* PASS*, a drop within the margin"),
    ]
    figure.legend(handles=key, loc="outside upper center", ncols=3)
    alt = "Drift of every arm under every serving policy"
    return save(figure, "heatmap", f"{alt}; outlined cells FAIL, starred ones PASS*, hatched are undecided.")


def ungated_status(c: Contrast, margin: float | None, *, is_measurable: bool = True) -> Status:
    """Return the status of a contrast by the gate's rule, without adjustment for multiple testing.

    ``is_measurable`` is False if the reference has nothing to lose.
    """
    if c.effect is None or margin is None:
        return Status.INCONCLUSIVE
    return unadjusted_status(c, margin, is_measurable=is_measurable)


def suite_margin(findings: Decided, c: Contrast) -> float | None:
    """Return the margin of a drift's suite; None if it is the drift of a facet.

    A facet's status cannot be shown by its margin alone: its PASS also needs answers in a readable form, which only the
    gate checks.
    """
    return None if c.suite in findings.comparison.facets else findings.rules.margins.get(c.suite)


def _heatmap_rows(sides: Comparison, group: list[Contrast]) -> list[str]:
    return list(dict.fromkeys(_heatmap_row(sides, c) for c in group))


def _heatmap_row(sides: Comparison, c: Contrast) -> str:
    return c.arm if sides.mode == "training" else f"{metric_label(sides, c.suite)}, {length_label(c.context_tokens)}"


def _heatmap_panel(panel: Axes, findings: Findings, group: list[Contrast], names: Mapping[str, str]) -> None:
    """Draw the drifts of one panel of the heatmap; ``names`` maps policies to column names, in the columns' order."""
    statuses = {d.place: d.status for d in findings.verdict.decisions}
    rules, rows = findings.rules, _heatmap_rows(findings.comparison, group)
    controls = Controls(findings.drift, rules.margins, rules.ratios)
    for c in group:
        x, y = list(names).index(c.policy), rows.index(_heatmap_row(findings.comparison, c))
        value = c.effect.estimate if c.effect else 0.0
        status = statuses.get(c.place) or ungated_status(
            c, suite_margin(findings, c), is_measurable=controls.against(c) is None
        )
        # the greater the drift, the stronger the colour
        face = (*_rgb(LOSS if value < 0 else GAIN), min(abs(value) / _FULL, 1.0) * 0.85)
        panel.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, facecolor=face, edgecolor="none"))
        if status in (Status.INCONCLUSIVE, Status.NOT_MEASURABLE):
            box = {"facecolor": "none", "edgecolor": INK, "alpha": 0.6, "linewidth": 0}
            panel.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, hatch="///", **box))
        if status is Status.FAIL:
            panel.add_patch(
                Rectangle((x - 0.45, y - 0.42), 0.9, 0.84, facecolor="none", edgecolor=INK, linewidth=OUTLINE)
            )
        text = points(value) + ("*" if status is Status.PASS_NOTED else "")
        number = panel.text(x, y, text if c.effect else "invalid", ha="center", va="center", fontsize=8)
        number.set_url(flips_link(findings, c) or None)
    panel.set_xticks(range(len(names)), list(names.values()), rotation=35, ha="right")
    label_rows(panel, list(rows))
    panel.set_xlim(-0.5, len(names) - 0.5)
    panel.tick_params(length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)


def _rgb(text: str) -> tuple[float, float, float]:
    red, green, blue = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))  # of #rrggbb
    return red, green, blue


# --- capability drift against safety drift ---------------------------------------------------------------------------


QUADRANT_PANELS = 4
_ROOM = 1.5  # pp around the outermost interval
Point = tuple[Contrast, Contrast]  # capability, safety


def draw_quadrant(findings: Decided) -> Drawing | None:
    """Draw capability drift against safety drift, with a panel for each gated policy.

    If nothing was trained there is one panel. Returns None unless both kinds of suite were asked.
    """
    sides = findings.comparison
    groups: dict[str, list[Point]] = {}
    serving_title = f"drift from {uncompressed_label(sides)}"
    for capability, safety in pairs(findings):
        served = f"served under {sides.label(safety.policy)}"
        groups.setdefault(served if sides.mode == "training" else serving_title, []).append((capability, safety))
    if not groups:
        return None
    panels_shown = dict(list(groups.items())[:QUADRANT_PANELS])
    figure = new_figure(max(6.0, 0.6 + 3.5 * len(panels_shown)), 4.2)
    panels = figure.subplots(1, len(panels_shown), squeeze=False, sharex=True, sharey=True)
    points_shown = [point for group in panels_shown.values() for point in group]
    names = tuple(dict.fromkeys(_quadrant_name(sides, point) for point in points_shown))
    suites = tuple(dict.fromkeys(safety.suite for _, safety in points_shown))
    places = sides.arms if sides.mode == "training" else names
    bounds = _bounds(points_shown)
    for panel, (title, group) in zip(panels.flat, panels_shown.items(), strict=True):
        _quadrant_panel(panel, findings, group, places, suites, bounds)
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
    """Return the points of the quadrant plot, each the (capability contrast, safety contrast) of one cell.

    The two contrasts share arm, gated policy and length.
    """
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


def _quadrant_name(sides: Comparison, point: Point) -> str:
    return point[1].arm if sides.mode == "training" else sides.label(point[1].policy)


class _Bounds(NamedTuple):
    """The limits of the axes in pp, common to all panels: they include every interval and zero."""

    left: float
    right: float
    low: float
    high: float


def _bounds(pairs: Sequence[Point]) -> _Bounds:
    across = [100 * end for p in pairs if p[0].effect for end in (p[0].effect.low, p[0].effect.high)]
    up = [100 * end for p in pairs if p[1].effect for end in (p[1].effect.low, p[1].effect.high)]
    return _Bounds(min(*across, 0) - _ROOM, max(*across, 0) + _ROOM, min(*up, 0) - _ROOM, max(*up, 0) + _ROOM)


def _quadrant_panel(
    panel: Axes,
    findings: Decided,
    pairs: list[Point],
    names: tuple[str, ...],
    suites: tuple[str, ...],
    bounds: _Bounds,
) -> None:
    margins = findings.rules.margins
    panel.axhline(0, color=INK, linewidth=0.8)
    panel.axvline(0, color=INK, linewidth=0.8)
    for capability, safety in pairs:
        x, y = capability.effect, safety.effect
        assert x is not None
        assert y is not None
        hue, _, _ = series_style(names, _quadrant_name(findings.comparison, (capability, safety)))
        marker = MARKERS[suites.index(safety.suite) % len(MARKERS)]
        panel.plot([100 * x.low, 100 * x.high], [100 * y.estimate] * 2, color=hue, alpha=0.55, linewidth=1)
        panel.plot([100 * x.estimate] * 2, [100 * y.low, 100 * y.high], color=hue, alpha=0.55, linewidth=1)
        panel.plot([100 * x.estimate], [100 * y.estimate], marker=marker, color=hue, markersize=6, linestyle="")
    low = bounds.low
    # for each axis the margins of its suites in pp; none for a suite that is held to a ratio
    limits = [[-100 * margins[pair[axis].suite] for pair in pairs if pair[axis].suite in margins] for axis in (0, 1)]
    if all(limits):
        capability_limit, safety_limit = map(max, limits)
        low = min(low, 2 * safety_limit)
        panel.fill_between([capability_limit, bounds.right], low, safety_limit, color=LOSS, alpha=0.13, linewidth=0)
        panel.text(bounds.right, low, "capability holds, \nsafety does not ", ha="right", va="bottom", fontsize=8)
    panel.set_xlim(bounds.left, bounds.right)
    panel.set_ylim(low, bounds.high)
    panel.set_xlabel("capability drift, pp")
    add_grid(panel)
