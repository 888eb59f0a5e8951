"""KV bytes under each policy against policy none counted the same way."""

from __future__ import annotations

from kvaudit.core.text import inline
from kvaudit.reports.analysis.cache_use import cache_use
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.layout.canvas import GAIN, INK, UNDECIDED, Drawing, blank, save
from kvaudit.reports.layout.words import times


def draw(findings: Decided) -> Drawing | None:
    """A bar per policy; None when no record tells bytes, or nothing was served uncompressed."""
    uses = [(use, use.allocated_share) for use in cache_use(findings.drift) if use.allocated_share is not None]
    if not uses:
        return None
    figure = blank(7.5, 0.9 + 0.36 * len(uses))
    panel = figure.subplots()
    for y, (use, ratio) in enumerate(uses):
        panel.barh(y, 1.0, height=0.66, color=UNDECIDED, alpha=0.2)
        panel.barh(y, ratio, height=0.66, color=GAIN, alpha=0.75)
        if use.live_share is not None:
            panel.plot([use.live_share] * 2, [y - 0.33, y + 0.33], color=INK, linewidth=1.6)
        text = f"{times(ratio)} allocated, {times(use.live_share)} live"
        panel.text(max(1.0, ratio) + 0.02, y, text, va="center", fontsize=8)
    panel.set_yticks(range(len(uses)), [inline(findings.comparison.labels.get(u.policy, u.policy)) for u, _ in uses])
    panel.set_ylim(len(uses) - 0.5, -0.5)
    panel.set_xlim(0, max(1.0, *(ratio for _, ratio in uses)) + 0.45)
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    panel.set_xlabel("peak KV bytes / those of none, counted the same way: allocated (bar), live (line)")
    return save(figure, "cache", "Peak KV bytes of each policy over those of none.")
