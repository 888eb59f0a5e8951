"""The drift of every gated cell by training seed, and how far the seeds differ beyond the noise of their items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.canvas import (
    INK,
    UNDECIDED,
    Drawing,
    add_grid,
    label_rows,
    legend_line,
    new_figure,
    save,
    series_style,
)
from kvaudit.reports.sections.shared.tables import Passage, Table, table_of
from kvaudit.reports.sections.shared.words import cell_label, effect_text, points, seed_text
from kvaudit.reports.stats.seeds import seed_spread
from kvaudit.reports.verdict.contrast import CellName
from kvaudit.reports.verdict.verdict import Decided

_MOST_ROWS = 40  # of the figure


@dataclass(frozen=True)
class SeedSpread:
    """The drift of a gated cell, separately for each pair of training seeds.

    ``sd`` is the standard deviation of these drifts that remains when the noise of their items is subtracted. ``low,
    high`` is its 95 % interval, which is wide for few seeds. All three are None below three seeds.
    """

    cell: CellName
    seeds: tuple[int, ...]
    estimates: tuple[float, ...]
    sd: float | None
    low: float | None
    high: float | None


Spreads = tuple[SeedSpread, ...]


class SeedsSection(Section[Spreads]):
    name = "seeds"
    title = "Seeds"
    explain = "The same drift seed by seed: how much of it depends on the training run."
    order = 210
    gated = True
    figures = ("seeds",)
    keys: ClassVar = {"analysis.seeds": 37}

    def compute(self, inputs: Inputs) -> Spreads | None:
        return tuple(_seed_spreads(inputs.decided)) or None

    def passage(self, value: Spreads, decided: Decided) -> Passage:
        """Return the section's passage; it is empty if nothing was trained."""
        if decided.comparison.mode != "training":
            return Passage(self.name, self.title, self.explain)
        return super().passage(value, decided)

    def tables(self, value: Spreads, decided: Decided) -> Iterator[Table]:
        """Yield a table of the drift by training seed, the spread of the seeds, and the drift with seed variance.

        The seed variance widens the interval, for a claim about training with any seed.
        """
        contrasts = {c.place: c for c in decided.drift.contrasts}
        rows = []
        for s in value:
            c = contrasts[s.cell.place]
            by_seed = ", ".join(f"{seed}: {points(value)}" for seed, value in zip(s.seeds, s.estimates, strict=True))
            sd = "-" if s.sd is None else f"{100 * s.sd:.1f} pp [{100 * (s.low or 0):.1f}, {100 * (s.high or 0):.1f}]"
            recipe = effect_text(c.recipe) if c.recipe else "recipe claim not supported"
            worst = seed_text(min(c.by_seed, key=lambda seed: seed.estimate)) if c.by_seed else "-"
            rows.append([cell_label(decided.comparison, s.cell), by_seed, effect_text(c.effect), worst, sd, recipe])
        headers = ["cell", "drift by seed, pp", "averaged", "worst seed, 95 % interval", "SD over seeds, 95 % interval"]
        headers.append("with seed variance")
        yield table_of(headers, rows)

    def notes(self, value: Spreads, decided: Decided) -> Iterator[str]:
        if any(s.sd is None for s in value):
            yield "Recipe claim not supported: it needs 3 paired seeds."

    def finding(self, value: Spreads, decided: Decided) -> str:
        ranges = [max(s.estimates) - min(s.estimates) for s in value if s.estimates]
        count = len(decided.comparison.seeds)
        if not ranges:
            return ""
        if count == 1:
            return "One seed."
        return f"{count} paired seeds; within a cell they differ by up to {100 * max(ranges):.1f} pp."

    def draw(self, value: Spreads, decided: Decided) -> Iterator[Drawing | None]:
        if decided.comparison.mode != "training":
            return
        drawn = value[:_MOST_ROWS]
        figure = new_figure(7.6, 1.0 + 0.25 * len(drawn))
        panel = figure.subplots()
        lowest = min(0.0, *(100 * v for s in drawn for v in s.estimates))
        highest = max(0.0, *(100 * v for s in drawn for v in s.estimates))
        width = max(2.0, highest - lowest)
        for y, s in enumerate(drawn):
            hue, marker, _ = series_style(decided.comparison.arms, s.cell.arm)
            values = [100 * v for v in s.estimates]
            panel.plot([min(values), max(values)], [y, y], color=hue, alpha=0.4, linewidth=1)
            panel.plot(values, [y] * len(values), marker=marker, color=hue, linestyle="", markersize=4.5)
            panel.plot([sum(values) / len(values)], [y], marker="|", color=INK, markersize=10)
            panel.text(highest + 0.06 * width, y, _sd_text(s), va="center", fontsize=7.5)
        panel.axvline(0, color=UNDECIDED, linewidth=0.8)
        label_rows(panel, [cell_label(decided.comparison, s.cell) for s in drawn])
        # leave space on the right for the texts
        panel.set_xlim(lowest - 0.05 * width, highest + 0.55 * width)
        panel.set_xlabel("drift, pp, a mark per training seed; right: SD, 95 % interval")
        add_grid(panel)
        mean = legend_line("mean over seeds", color=INK, marker="|", markersize=10, linestyle="")
        figure.legend(handles=[mean], loc="outside upper center")
        yield save(
            figure, "seeds", "Drift of each gated cell by training seed, with the standard deviation over seeds."
        )


def _seed_spreads(decided: Decided) -> Iterator[SeedSpread]:
    contrasts = {c.place: c for c in decided.drift.contrasts}
    for d in decided.verdict.gated:
        c = contrasts.get(d.place)
        if d.effect and c and c.seed_estimates:
            low, sd, high = seed_spread(c.seed_estimates, c.seed_noise) or (None, None, None)
            yield SeedSpread(d.name, c.seeds, c.seed_estimates, sd, low, high)


def _sd_text(s: SeedSpread) -> str:
    if s.sd is None or s.low is None or s.high is None:
        return "recipe claim not supported"
    return f"SD {100 * s.sd:.1f} [{100 * s.low:.1f}, {100 * s.high:.1f}]"
