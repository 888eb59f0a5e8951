"""Forest plot: every gated drift with its interval, and the margin as a shaded band."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvaudit.core.text import inline
from kvaudit.reports.sections.shared.canvas import (
    GAIN,
    INK,
    LOSS,
    UNDECIDED,
    Drawing,
    add_grid,
    label_rows,
    legend_line,
    new_figure,
    save,
)
from kvaudit.reports.sections.shared.words import held_to, metric_label
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import Decided, Decision, Status

LOOK = {  # colour, marker, filled
    Status.PASS: (GAIN, "o", True),
    Status.PASS_NOTED: (GAIN, "o", False),
    Status.FAIL: (LOSS, "X", True),
    Status.INCONCLUSIVE: (UNDECIDED, "D", False),
    Status.NOT_MEASURABLE: (UNDECIDED, "s", False),
    Status.INVALID: (UNDECIDED, "v", True),  # a number without a margin
}
_COLUMNS = 3
_MOST_COLUMNS = 4  # if that avoids a second line
_LETTER, _LEAST_NAMES, _MOST_NAMES = 0.07, 2.1, 8.0  # inches: of a letter, and of the row names
_ENDS = {"deployed": ", end to end", "worst": ", worst policy"}
_DRAWN = ("alike", "deployed", "worst", "serving")  # contrasts that share a margin
_Row = tuple[str, str, str]  # policy, arm, estimand
_Group = tuple[str, int]  # suite, length


def draw(findings: Decided) -> Drawing | None:
    """Draw a panel per suite and length, or one panel if each has a single row; None without numbers."""
    cells = [d for d in findings.verdict.gated if d.effect and d.estimand in _DRAWN]
    if not cells:
        return None
    groups = list(dict.fromkeys(_group(d) for d in cells))
    rows = list(dict.fromkeys(_row(d) for d in cells))
    if len(rows) == 1 and len({d.margin for d in cells}) == 1:
        figure = new_figure(7.5, 1.2 + 0.27 * len(groups))
        names = [_length(findings.comparison, *group) for group in groups]
        _panel(figure.subplots(), cells, [_group(d) for d in cells], names)
    else:
        figure = _panels(findings.comparison, cells, groups, rows)
    figure.legend(handles=_legend({d.status for d in cells}), loc="outside upper center", ncols=4)
    return save(figure, "forest", "Drift of every gated cell with its 95 % interval and the margin band.")


def _group(d: Decision) -> _Group:
    return d.suite, d.context_tokens


def _row(d: Decision) -> _Row:
    return d.policy, d.arm, d.estimand


def _length(sides: Comparison, suite: str, tokens: int) -> str:
    suite = metric_label(sides, suite)
    return f"{suite}, {tokens} tokens" if tokens else suite


def _panels(sides: Comparison, cells: list[Decision], groups: list[_Group], rows: list[_Row]) -> Figure:
    columns = len(groups) if len(groups) <= _MOST_COLUMNS else _COLUMNS
    lines = -(-len(groups) // columns)  # rounded up
    pitch = 0.27 if lines == 1 else 0.2  # keeps the verdict on one printed page
    names = _names(sides, rows)
    names_width = min(max(_LEAST_NAMES, _LETTER * max(map(len, names)) - 0.4), _MOST_NAMES)
    figure = new_figure(names_width + 2.7 * columns, lines * (1.1 + pitch * len(rows)))
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, group in zip(panels.flat, groups, strict=False):
        panel_cells = [d for d in cells if _group(d) == group]
        _panel(panel, panel_cells, [_row(d) for d in panel_cells], names, rows)
        panel.set_title(inline(_length(sides, *group)))
    return figure


def _names(sides: Comparison, rows: list[_Row]) -> list[str]:
    if sides.mode == "serving":
        return [sides.label(policy) for policy, *_ in rows]
    return [f"{sides.who(arm, policy)}{_ENDS.get(name, '')}" for policy, arm, name in rows]


def _panel(
    panel: Axes,
    decisions: Sequence[Decision],
    row_keys: Sequence[Hashable],
    names: list[str],
    rows: Sequence[Hashable] = (),
) -> None:
    """Draw each decision in its row; ``rows`` is the order of the rows, by default that of ``row_keys``."""
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


def _legend(statuses: set[Status]) -> list[Line2D]:
    return [
        legend_line(status.value, color=hue, marker=marker, markerfacecolor=hue if filled else "none")
        for status, (hue, marker, filled) in LOOK.items()
        if status in statuses
    ]
