"""The cache of each policy: bytes and entries kept, memory saved at the peak of a row, and the roles that stayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.canvas import GAIN, INK, UNDECIDED, Drawing, label_rows, new_figure, save
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import NOT_SHOWN, bytes_text, percent, plural, times_text
from kvaudit.reports.verdict.contrast import Cell, Drift
from kvaudit.reports.verdict.verdict import Decided


class CacheUse(NamedTuple):
    """Mean bytes per row over every arm, suite and length, counted in two ways.

    ``allocated`` includes slack and bookkeeping; ``live`` counts only the entries, None if some record lacks it. The
    shares are relative to policy ``none`` counted the same way, None if that is unknown. For an engine that does not
    show its cache every number is None.
    """

    policy: str
    allocated: float | None
    live: float | None
    dense: float | None  # the entries of the same tokens, uncompressed
    allocated_share: float | None
    live_share: float | None
    retention: float | None

    @property
    def is_shown(self) -> bool:
        """Whether the cache could be measured."""
        return self.retention is not None


def cache_use(drift: Drift) -> list[CacheUse]:
    """Return the cache use of every policy that has records, weighted by samples."""
    uses = []
    for policy in drift.comparison.policies:
        cells = [c for c in drift.cells if c.policy == policy]
        if cells:
            uses.append(
                CacheUse(
                    policy,
                    allocated=_mean([c.kv_bytes_peak for c in cells], cells),
                    live=_mean([c.kv_bytes_live for c in cells], cells),
                    dense=_mean([c.kv_bytes_dense for c in cells], cells),
                    allocated_share=_share([c.kv_ratio for c in cells], cells),
                    live_share=_share([c.kv_live_ratio for c in cells], cells),
                    retention=_mean([c.retention for c in cells], cells),
                )
            )
    return uses


def lacks_live_bytes(drift: Drift) -> bool:
    """Return whether bytes were recorded, but for some policy not those of the live entries."""
    return any((use.dense or 0) > 0 and use.live is None for use in cache_use(drift))


def _mean(values: Sequence[float | None], cells: Sequence[Cell]) -> float | None:
    return _weighted(values, [float(c.n_samples) for c in cells])


def _share(values: Sequence[float | None], cells: Sequence[Cell]) -> float | None:
    # weighted by uncompressed bytes, so that the result is the share of all bytes
    return _weighted(values, [c.n_samples * (c.kv_bytes_dense or 0.0) for c in cells])


def _weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted mean, None if a value is unknown."""
    numbers = [value for value in values if value is not None]
    total = sum(weights)
    if len(numbers) < len(values) or total <= 0:
        return None
    return sum(value * weight for value, weight in zip(numbers, weights, strict=True)) / total


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
        """Draw a bar per policy; nothing if no record has bytes, or nothing was served uncompressed."""
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
