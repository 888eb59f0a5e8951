"""Churn: what moved in every gated cell, which a drift hides: losses and gains cancel in it, a user meets both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.both_sides import BothSides, gated_sides
from kvaudit.reports.sections.shared.canvas import (
    GAIN,
    INK,
    LOSS,
    Drawing,
    new_figure,
    legend_line,
    label_rows,
    legend_patch,
    add_grid,
    save,
)
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import percent, cell_label, points
from kvaudit.reports.stats.churn import churn_of, flips
from kvaudit.reports.verdict.contrast import CellName
from kvaudit.reports.verdict.verdict import Decided, Decision

_MOST_BARS = 40


@dataclass(frozen=True)
class CellChurn:
    """What moved in a cell, beside what is left of it after losses and gains cancel. Shares of all items.

    Losses, gains and churn are of answers against the reference's of the same pair of seeds: gains - losses is the
    drift, churn P(candidate's answer is not the reference's), ``rerun`` the A/A churn of two answers of one checkpoint:
    only what churn has beyond it is change. ``draws`` is the churn over any two seeds and ``draws_rerun`` what two
    draws of one arm disagree on, over samples and seeds. Each rerun is None without a second draw.
    """

    cell: CellName
    drift: float
    losses: float
    gains: float
    churn: float
    rerun: float | None
    draws: float
    draws_rerun: float | None


Churns = tuple[CellChurn, ...]


class ChurnSection(Section[Churns]):
    name = "churn"
    title = "Churn"
    explain = "Losses and gains cancel in a drift; this is what moved before they did."
    reading = (
        "Lost, gained, churn: of answers against the reference's of the same pair of seeds. A/A churn: two "
        "answers of one checkpoint, where it was sampled more than once; only churn beyond it is change. Any "
        "two seeds: the same without pairing, beside two seeds of one arm."
    )
    order = 180
    gated = True
    figures = ("churn",)
    keys: ClassVar = {"analysis.churn": 33}

    def compute(self, inputs: Inputs) -> Churns | None:
        return tuple(_cell(d, found) for d, found in gated_sides(inputs.decided, inputs.data.panels)) or None

    def tables(self, value: Churns, decided: Decided) -> Iterator[Table]:
        """Net drift beside what moved, and what moves by itself where a checkpoint answered more than once."""
        again = any(c.rerun is not None for c in value)
        headers = ["cell", "drift, pp", "lost, pp", "gained, pp", "churn", *(["A/A churn"] if again else [])]
        rows = []
        for c in value:
            row = [cell_label(decided.comparison, c.cell), points(c.drift)]
            row += [f"{100 * c.losses:.1f}", f"{100 * c.gains:.1f}", percent(c.churn)]
            rows.append([*row, *([percent(c.rerun)] if again else []), percent(c.draws), percent(c.draws_rerun)])
        yield table_of([*headers, "any two seeds", "two seeds of one arm"], rows)

    def finding(self, value: Churns, decided: Decided) -> str:
        found = [c.churn for c in value]
        return f"{percent(min(found))} to {percent(max(found))} of the answers changed."

    def draw(self, value: Churns, decided: Decided) -> Iterator[Drawing | None]:
        """What every cell lost and gained: a bar to each side, the most churn first where there are too many."""
        found = value if len(value) <= _MOST_BARS else sorted(value, key=lambda c: -c.churn)[:_MOST_BARS]
        figure = new_figure(7.6, 1.0 + 0.23 * len(found))
        panel = figure.subplots()
        for y, c in enumerate(found):
            panel.barh(y, -100 * c.losses, height=0.68, color=LOSS, alpha=0.75)
            panel.barh(y, 100 * c.gains, height=0.68, color=GAIN, alpha=0.75)
            panel.plot([100 * c.drift], [y], marker="D", color=INK, markersize=4)
        panel.axvline(0, color=INK, linewidth=0.8)
        label_rows(panel, [cell_label(decided.comparison, c.cell) for c in found])
        panel.set_xlabel("pp of all items")
        add_grid(panel)
        key = [
            legend_patch("lost", facecolor=LOSS, alpha=0.75),
            legend_patch("gained", facecolor=GAIN, alpha=0.75),
            legend_line("net drift", color=INK, marker="D", markersize=4, linestyle=""),
        ]
        figure.legend(handles=key, loc="outside upper center", ncols=3)
        yield save(figure, "churn", "What each gated cell lost and gained, in pp of all items, and its net drift.")


def _cell(d: Decision, found: BothSides) -> CellChurn:
    pairs = found.reference_pairs, found.candidate_pairs
    moved = flips(*pairs, samples=1 if found.graded else found.samples)
    any_seed = churn_of(found.reference, found.candidate, samples=1 if found.graded else found.draws)
    own = float(found.difference.mean())
    # the gate's own number to the last bit, so that no tie is rounded two ways; not where people gave that number
    alike = d.effect is not None and math.isclose(own, d.effect.estimate, abs_tol=1e-9)
    return CellChurn(
        cell=d.name,
        drift=d.effect.estimate if alike and d.effect else own,
        losses=moved.lost,
        gains=moved.won,
        churn=moved.churn,
        rerun=moved.rerun,
        draws=any_seed.draw_churn,
        draws_rerun=any_seed.rerun_churn,
    )
