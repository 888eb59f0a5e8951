"""Dose-response: the rate of every arm against the budget (or the length), on a log axis, with what was cleared."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from kvaudit.core.text import inline
from kvaudit.reports.analysis.results import DoseCurve
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.layout.canvas import INK, UNDECIDED, Drawing, blank, colour, quiet, save
from kvaudit.reports.page.findings import Findings

_COLUMNS = 3
MOST_LINES = 4  # rows of panels
_APART = 0.16  # of the range of doses, from the first arm at a dose to the last


def budget(findings: Findings) -> Drawing | None:
    """Rate against budget, a panel per family and suite; None where no family has two budgets."""
    return _draw(findings, "budget", "doses", "Rate of every arm against the cache budget, with 95 % intervals.")


def length(findings: Findings) -> Drawing | None:
    """Rate against context length, a panel per policy and suite; None where the run has one length."""
    return _draw(findings, "length", "lengths", "Rate of every arm against the context length, with 95 % intervals.")


def _draw(findings: Findings, axis: str, name: str, alt: str) -> Drawing | None:
    known = [c for c in findings.analysis.doses if c.axis == axis and c.doses]
    if axis == "length":  # one panel per policy is many: the gated ones
        gated = {findings.comparison.labels.get(p, p) for p in findings.rules.primary}
        known = [c for c in known if c.family in gated] or known
    groups: dict[tuple[str, str, int | None], list[DoseCurve]] = {}
    for curve in known:
        groups.setdefault((curve.family, curve.suite, curve.context_tokens), []).append(curve)
    if not groups:
        return None
    columns = min(_COLUMNS, len(groups))
    shown = list(groups.items())[: columns * MOST_LINES]
    lines = -(-len(shown) // columns)
    figure = blank(0.5 + 2.9 * columns, 0.6 + 2.3 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(shown) :]:
        panel.set_visible(False)
    for place, (panel, (key, curves)) in enumerate(zip(panels.flat, shown, strict=False)):
        _panel(panel, findings, curves)
        family, suite, context = key
        where = suite if context is None or len(findings.comparison.contexts) == 1 else f"{suite}, {context}"
        panel.set_title(inline(f"{where}: {family}"))
        if place % columns == 0:
            panel.set_ylabel("desired, %")
        if place + columns >= len(shown):
            panel.set_xlabel("budget, entries" if axis == "budget" else "context, tokens")
    figure.legend(handles=_legend(findings.comparison, shown[0][1], axis), loc="outside upper center", ncols=4)
    return save(figure, name, alt)


def _panel(panel: Axes, findings: Findings, curves: Sequence[DoseCurve]) -> None:
    cleared = {
        (s.axis, s.arm, s.family, s.suite, s.context_tokens): s.cleared for s in findings.analysis.safe if s.cleared
    }
    doses = curves[0].doses
    spread = _APART * (doses[-1].x - doses[0].x)
    for i, curve in enumerate(curves):
        hue, marker, line = colour(findings.comparison.arms, curve.arm)
        shift = spread * (i / (len(curves) - 1) - 0.5) if len(curves) > 1 else 0.0
        for dose in curve.doses:
            panel.plot([dose.x + shift] * 2, [100 * dose.low, 100 * dose.high], color=hue, alpha=0.5, linewidth=1)
            panel.plot([dose.x + shift], [100 * dose.rate], marker=marker, color=hue, markersize=4.5, linestyle="")
        xs = [dose.x + shift for dose in curve.doses]
        panel.plot(xs, [100 * dose.fitted for dose in curve.doses], color=hue, linestyle=line, linewidth=1.3)
        last = cleared.get((curve.axis, curve.arm, curve.family, curve.suite, curve.context_tokens))
        for dose in curve.doses:
            if dose.amount == last:
                panel.plot([dose.x + shift], [105], marker="v", color=hue, markersize=6)
    reference = next((c.uncompressed for c in curves if c.arm == findings.comparison.reference), None)
    if reference is not None:
        panel.axhline(100 * reference, color=INK, linewidth=0.9)
        margin = findings.rules.margins.get(curves[0].suite)
        if margin is not None:
            panel.axhspan(100 * (reference - margin), 100 * reference, color=UNDECIDED, alpha=0.16, linewidth=0)
    panel.set_xticks([dose.x for dose in doses], [str(dose.amount) for dose in doses])
    panel.set_xticks([], minor=True)
    panel.set_yticks([0, 20, 40, 60, 80, 100])
    panel.set_ylim(-2, 109)
    panel.margins(x=0.12)
    quiet(panel)


def _legend(sides: Comparison, curves: Sequence[DoseCurve], axis: str) -> list[Line2D]:
    handles = []
    for curve in curves:
        hue, marker, line = colour(sides.arms, curve.arm)
        handles.append(Line2D([], [], color=hue, marker=marker, linestyle=line, label=inline(curve.arm)))
    if axis == "budget":
        text = inline(f"{sides.reference} uncompressed, with the margin")
        handles.append(Line2D([], [], color=INK, linewidth=0.9, label=text))
    handles.append(Line2D([], [], color=INK, marker="v", linestyle="", label=f"smallest cleared {axis}"))
    if axis == "length":
        handles[-1].set_label("longest cleared length")
    return handles
