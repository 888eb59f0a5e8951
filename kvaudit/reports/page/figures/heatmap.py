"""Policy x arm heatmap of drift; outline, star and hatching show the status, so colour is not needed."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from kvaudit.core.text import inline, length_label, length_of
from kvaudit.reports.page.findings import Findings, flips_link
from kvaudit.reports.sections.shared.canvas import GAIN, INK, LOSS, Drawing, label_rows, new_figure, save
from kvaudit.reports.sections.shared.words import metric_label, points, shorten, uncompressed_label
from kvaudit.reports.verdict.cell import decide_cell, readings_of, templates_of
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.controls import Controls
from kvaudit.reports.verdict.verdict import Decided, Status

_FULL = 0.20  # drift with the strongest colour
_COLUMNS = 2
OUTLINE = 1.4
_LONGEST, _USUAL = 28, 12  # letters of a policy's name below its column, at most and without extra height
_LEAST_WIDTH, _LETTER = 4.5, 0.085  # inches: of the figure with its key, and of a letter


def draw(findings: Findings) -> Drawing | None:
    """Draw arms by policies served alike, a panel per suite; in serving mode suites by policies."""
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
    rows = [_rows(sides, group) for group in groups.values()]
    columns = min(_COLUMNS, len(groups)) if len(policies) <= 5 else 1
    lines = -(-len(groups) // columns)  # rounded up
    named = max(len(row) for panel_rows in rows for row in panel_rows)
    width = 0.4 + (0.9 + 0.8 * len(policies)) * columns
    # long row names need more width than a few columns have
    width = max(width, _LEAST_WIDTH, _LETTER * named * columns + 0.8 * len(policies) * columns)
    names = [shorten(inline(sides.label(policy)), _LONGEST) for policy in policies]
    below = max(map(len, names))  # drawn aslant under the last row
    figure = new_figure(width, 1.1 + lines * (0.35 + 0.36 * max(map(len, rows))) + _LETTER * max(0, below - _USUAL))
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for place, (panel, (title, group)) in enumerate(zip(panels.flat, groups.items(), strict=False)):
        _panel(panel, findings, group, dict(zip(policies, names, strict=True)))
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


def status_of(
    c: Contrast, margin: float | None, decided: Status | None = None, *, is_measurable: bool = True
) -> Status:
    """Return the decided status of a cell, else the status by the same rule without adjustment."""
    if decided is not None:
        return decided
    if c.effect is None or margin is None:
        return Status.INCONCLUSIVE
    status = decide_cell(c.effect, margin, c.effect.pvalue_drop, templates_of(c), readings=readings_of(c))[0]
    return status if is_measurable or status is Status.FAIL else Status.NOT_MEASURABLE


def suite_margin(findings: Decided, c: Contrast) -> float | None:
    """Return a suite's margin; None for a facet, since only the gate checks the form that its PASS requires."""
    return None if c.suite in findings.comparison.facets else findings.rules.margins.get(c.suite)


def _rows(sides: Comparison, group: list[Contrast]) -> list[str]:
    return list(dict.fromkeys(_row(sides, c) for c in group))


def _row(sides: Comparison, c: Contrast) -> str:
    return c.arm if sides.mode == "training" else f"{metric_label(sides, c.suite)}, {length_label(c.context_tokens)}"


def _panel(panel: Axes, findings: Findings, group: list[Contrast], names: Mapping[str, str]) -> None:
    """Draw a group of contrasts; ``names`` maps policies to column names, in the order of the columns."""
    statuses = {d.place: d.status for d in findings.verdict.decisions}
    rules, rows = findings.rules, _rows(findings.comparison, group)
    controls = Controls(findings.drift, rules.margins, rules.ratios)
    for c in group:
        x, y = list(names).index(c.policy), rows.index(_row(findings.comparison, c))
        value = c.effect.estimate if c.effect else 0.0
        status = status_of(
            c, suite_margin(findings, c), statuses.get(c.place), is_measurable=controls.against(c) is None
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
