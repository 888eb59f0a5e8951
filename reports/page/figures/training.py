"""Training curves of every arm: reward, and how far the sampler and the learner were apart."""

from __future__ import annotations

import math
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from kvaudit.core.text import inline
from kvaudit.reports.analysis.curves import Curve
from kvaudit.reports.layout.canvas import Drawing, blank, colour, quiet, save
from kvaudit.reports.page.findings import Findings


class _View(NamedTuple):
    """One panel."""

    key: str
    title: str
    log: bool


VIEWS = (
    _View("reward_mean", "reward", False),
    _View("mismatch/max_abs_gap", "largest |log p sampler - learner|", True),
    _View("mismatch/k3_kl", "mismatch KL (k3), nats", True),
    _View("mismatch/ess", "effective sample share", False),
    _View("mismatch/overlap_p5", "overlap, 5th percentile", False),
    _View("entropy", "entropy, nats", False),
)
LOWEST_DRAWN = 1e-16
_COLUMNS = 3


def draw(findings: Findings) -> Drawing | None:
    """A panel for each of the views that any arm recorded; None without telemetry."""
    views = [view for view in VIEWS if any(_known(curve, view) for curve in findings.curves)]
    if not views:
        return None
    columns = min(_COLUMNS, len(views))
    lines = -(-len(views) // columns)
    figure = blank(0.4 + 3.0 * columns, 0.4 + 2.3 * lines)
    panels = figure.subplots(lines, columns, squeeze=False)
    for panel in panels.flat[len(views) :]:
        panel.set_visible(False)
    for panel, view in zip(panels.flat, views, strict=False):
        for curve in findings.curves:
            _line(panel, curve, view, findings.comparison.arms)
        panel.set_title(view.title)
        panel.set_xlabel("step")
        if view.log:
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
        quiet(panel)
    figure.legend(handles=_legend(findings), loc="outside upper center", ncols=5)
    return save(figure, "training", "Reward and sampler-learner mismatch of every arm over training steps.")


def _known(curve: Curve, view: _View) -> bool:
    values = [v for v in curve.series.get(view.key, ()) if v is not None]
    return any(v > 0 for v in values) if view.log else bool(values)


def _line(panel: Axes, curve: Curve, view: _View, arms: tuple[str, ...]) -> None:
    if view.key not in curve.series:
        return
    hue, _, line = colour(arms, curve.arm)
    middle, low, high = (
        [_value(v, view.log) for v in table[view.key]] for table in (curve.series, curve.lowest, curve.highest)
    )
    panel.plot(curve.steps, middle, color=hue, linestyle=line, linewidth=1.4)
    panel.fill_between(curve.steps, low, high, color=hue, alpha=0.13, linewidth=0)


def _value(value: float | None, log: bool) -> float:
    if value is None:
        return math.nan
    return max(value, LOWEST_DRAWN) if log else value


def _legend(findings: Findings) -> list[Line2D]:
    handles = []
    for curve in findings.curves:
        hue, _, line = colour(findings.comparison.arms, curve.arm)
        handles.append(Line2D([], [], color=hue, linestyle=line, label=inline(curve.arm)))
    return handles
