"""The cache under each policy: bytes and entries kept, memory saved at the peak of a row, and the roles that stayed.

A row is one sequence of a batch; a role is the speaker of a message (system, user, ...).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.cache_use import CacheUse, cache_use
from kvaudit.reports.sections.shared.canvas import GAIN, INK, UNDECIDED, Drawing, label_rows, new_figure, save
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import NOT_SHOWN, bytes_text, percent, plural, times_text
from kvaudit.reports.verdict.verdict import Decided


class CacheSection(Section[tuple[CacheUse, ...]]):
    name = "cache"
    title = "KV cache"
    explain = (
        "The cache memory that compression saved at the peak of a row, relative to policy none counted the same way, "
        "and the roles of the conversation that stayed cached."
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
            cells = [c for c in decided.drift.cells if c.policy == use.policy]
            row = [decided.comparison.label(use.policy), bytes_text(use.live), times_text(use.live_share)]
            row += [bytes_text(use.allocated), times_text(use.allocated_share)]
            row.append(percent(use.retention) if use.is_shown else NOT_SHOWN)
            for role in roles:
                shares = [(c.survival[role], c.n_samples) for c in cells if role in c.survival]
                samples = sum(n for _, n in shares)
                row.append(percent(sum(share * n for share, n in shares) / samples) if samples else "-")
            rows.append(row)
        kept = [f"{role} kept" for role in roles]
        yield table_of(["policy", "live bytes", "of none", "allocated", "of none", "entries kept", *kept], rows)

    def finding(self, value: tuple[CacheUse, ...], decided: Decided) -> str:
        ranges = []
        for word, shares in (
            ("live", [u.live_share for u in value]),
            ("allocated", [u.allocated_share for u in value]),
        ):
            if numbers := [share for share in shares if share is not None]:
                ranges.append(f"{percent(min(numbers))} to {percent(max(numbers))} {word}")
        hidden = sum(not use.is_shown for use in value)
        lines = [f"Peak of an uncompressed cache, counted the same way: {', '.join(ranges)}."] if ranges else []
        lines += [f"{plural(hidden, 'engine condition')}: cache {NOT_SHOWN}."] if hidden else []
        return " ".join(lines)

    def draw(self, value: tuple[CacheUse, ...], decided: Decided) -> Iterator[Drawing | None]:
        """Yield a chart with a bar per policy; nothing if no record has bytes, or nothing was served uncompressed."""
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
