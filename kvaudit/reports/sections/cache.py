"""What compression saved of the cache at the peak of a row, and which roles of the conversation stayed in it."""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.cache_use import CacheUse, cache_use
from kvaudit.reports.sections.shared.canvas import GAIN, INK, UNDECIDED, Drawing, new_figure, label_rows, save
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import NOT_SHOWN, plural, percent, bytes_text, times_text
from kvaudit.reports.verdict.verdict import Decided


class CacheSection(Section[tuple[CacheUse, ...]]):
    name = "cache"
    title = "KV cache"
    explain = (
        "What compression saved at the peak of a row, each way of counting held against policy none counted the "
        "same way, and which roles of the conversation stayed cached."
    )
    reading = (
        "Live: keys, values and codes of the entries held while an answer was decoded. Allocated: at any time, "
        "with the slack and the bookkeeping that this implementation adds, uncompressed too. Both per token, "
        "so that longer answers count as nothing saved or spent."
    )
    order = 300
    figures = ("cache",)

    def compute(self, inputs: Inputs) -> tuple[CacheUse, ...] | None:
        return tuple(cache_use(inputs.decided.drift)) or None

    def tables(self, value: tuple[CacheUse, ...], decided: Decided) -> Iterator[Table]:
        roles = list(dict.fromkeys(role for c in decided.drift.cells for role in c.survival))
        rows = []
        for use in value:
            own = [c for c in decided.drift.cells if c.policy == use.policy]
            row = [
                decided.comparison.label(use.policy),
                bytes_text(use.live),
                times_text(use.live_share),
                bytes_text(use.allocated),
            ]
            row += [times_text(use.allocated_share), percent(use.retention) if use.is_shown else NOT_SHOWN]
            for role in roles:
                known = [(c.survival[role], c.n_samples) for c in own if role in c.survival]
                # a cell counts by its samples
                total = sum(n for _, n in known)
                row.append(percent(sum(v * n for v, n in known) / total) if total else "-")
            rows.append(row)
        kept = [f"{role} kept" for role in roles]
        yield table_of(["policy", "live bytes", "of none", "allocated", "of none", "entries kept", *kept], rows)

    def finding(self, value: tuple[CacheUse, ...], decided: Decided) -> str:
        ways = (("live", [u.live_share for u in value]), ("allocated", [u.allocated_share for u in value]))
        known = ((word, [share for share in shares if share is not None]) for word, shares in ways)
        found = [f"{percent(min(shares))} to {percent(max(shares))} {word}" for word, shares in known if shares]
        hidden = sum(not use.is_shown for use in value)
        parts = [f"Peak of an uncompressed cache, counted the same way: {', '.join(found)}."] if found else []
        parts += [f"{plural(hidden, 'engine condition')}: cache {NOT_SHOWN}."] if hidden else []
        return " ".join(parts)

    def draw(self, value: tuple[CacheUse, ...], decided: Decided) -> Iterator[Drawing | None]:
        """A bar per policy; nothing when no record tells bytes, or nothing was served uncompressed."""
        uses = [(use, use.allocated_share) for use in value if use.allocated_share is not None]
        if not uses:
            return
        figure = new_figure(7.5, 0.9 + 0.36 * len(uses))
        panel = figure.subplots()
        for y, (use, ratio) in enumerate(uses):
            panel.barh(y, 1.0, height=0.66, color=UNDECIDED, alpha=0.2)
            panel.barh(y, ratio, height=0.66, color=GAIN, alpha=0.75)
            if use.live_share is not None:
                panel.plot([use.live_share] * 2, [y - 0.33, y + 0.33], color=INK, linewidth=1.6)
            text = f"{times_text(ratio)} allocated, {times_text(use.live_share)} live"
            panel.text(max(1.0, ratio) + 0.02, y, text, va="center", fontsize=8)
        label_rows(panel, [decided.comparison.label(use.policy) for use, _ in uses])
        panel.set_xlim(0, max(1.0, *(ratio for _, ratio in uses)) + 0.45)
        panel.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
        panel.set_xlabel("peak KV bytes / those of none, counted the same way: allocated (bar), live (line)")
        yield save(figure, "cache", "Peak KV bytes of each policy over those of none.")
