"""Forest plot: every gated drift with its interval, and the margin as a shaded band."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from audit.core.text import inline
from reports.gate.verdict import Decision, Status
from reports.page.figures.canvas import GAIN, INK, LOSS, UNDECIDED, Drawing, blank, quiet, save
from reports.page.findings import Findings

LOOK = {  # colour, marker, filled
    Status.PASS: (GAIN, "o", True),
    Status.PASS_NOTED: (GAIN, "o", False),
    Status.FAIL: (LOSS, "X", True),
    Status.INCONCLUSIVE: (UNDECIDED, "D", False),
    Status.INVALID: (UNDECIDED, "v", True),  # a number without a margin
}
_COLUMNS = 3
_ENDS = {"E2": ", end to end", "E3": ", worst policy"}
_DRAWN = ("E1", "E2", "E3", "E4")  # the others have margins of their own


def draw(findings: Findings) -> Drawing | None:
    """One panel per suite and length; None without a single number."""
    known = [d for d in findings.verdict.decisions if d.gated and d.effect and d.estimand in _DRAWN]
    if not known:
        return None
    groups = list(dict.fromkeys((d.suite, d.context_tokens) for d in known))
    rows = list(dict.fromkeys((d.policy, d.arm, d.estimand) for d in known))
    columns = min(_COLUMNS, len(groups))
    lines = -(-len(groups) // columns)
    figure = blank(2.1 + 2.7 * columns, lines * (1.1 + 0.27 * len(rows)))
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, group in zip(panels.flat, groups, strict=False):
        _panel(panel, [d for d in known if (d.suite, d.context_tokens) == group], rows, findings)
    figure.legend(handles=_legend({d.status for d in known}), loc="outside upper center", ncols=4)
    return save(figure, "forest", "Drift of every gated cell with its 95 % interval and the margin band.")


def _panel(panel: Axes, decisions: Sequence[Decision], rows: list[tuple[str, str, str]], findings: Findings) -> None:
    margin = 100 * (decisions[0].margin or 0)
    panel.axvspan(-margin, margin, color=GAIN, alpha=0.13, linewidth=0)
    panel.axvline(-margin, color=LOSS, linestyle="--", linewidth=1)
    panel.axvline(0, color=INK, linewidth=0.8)
    for d in decisions:
        assert d.effect is not None
        y = rows.index((d.policy, d.arm, d.estimand))
        hue, marker, filled = LOOK[d.status]
        panel.plot([100 * d.effect.low, 100 * d.effect.high], [y, y], color=hue, linewidth=1.6)
        panel.plot([100 * d.effect.lower], [y], marker="|", color=hue, markersize=8)
        face = hue if filled else "none"
        panel.plot([100 * d.effect.estimate], [y], marker=marker, color=hue, markerfacecolor=face, markersize=6)
    labels = findings.comparison.labels
    names = [f"{arm} @ {labels.get(policy, policy)}{_ENDS.get(name, '')}" for policy, arm, name in rows]
    if findings.comparison.mode == "serving":
        names = [labels.get(policy, policy) for policy, *_ in rows]
    panel.set_yticks(range(len(rows)), [inline(name) for name in names])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_title(inline(f"{decisions[0].suite}, {decisions[0].context_tokens} tokens"))
    panel.set_xlabel(f"drift, pp (margin {margin:g})")
    quiet(panel)


def _legend(found: set[Status]) -> list[Line2D]:
    return [
        Line2D([], [], color=hue, marker=marker, markerfacecolor=hue if filled else "none", label=status.value)
        for status, (hue, marker, filled) in LOOK.items()
        if status in found
    ]
