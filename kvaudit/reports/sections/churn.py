"""Churn, the share of answers that changed: losses and gains of every gated cell, which cancel in its drift."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvaudit.reports.records.rows import Panel, Panels
from kvaudit.reports.sections.base import Inputs, Section, has_two_sides
from kvaudit.reports.sections.shared.canvas import (
    GAIN,
    INK,
    LOSS,
    Drawing,
    add_grid,
    label_rows,
    legend_line,
    legend_patch,
    new_figure,
    save,
)
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import cell_label, percent, points
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.stats.power import draw_flips, flips
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellName
from kvaudit.reports.verdict.drift import paired_scores, seed_pairs, two_sides, weights_of
from kvaudit.reports.verdict.verdict import Decided, Decision

_MOST_BARS = 40


@dataclass(frozen=True)
class CellChurn:
    """Losses, gains and churn of a cell, as shares of all items.

    Churn is the share of answers that differ. ``losses``, ``gains`` and ``churn`` compare the two answers of one pair
    of seeds; gains - losses is the drift. ``rerun`` is the A/A churn, between two answers of one checkpoint: only churn
    beyond it is an effect. ``draws`` compares any answer of the candidate with any of the reference, whatever their
    seeds; ``draws_rerun`` compares any two answers of one arm. ``rerun`` and ``draws_rerun`` are None without a second
    answer.
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
        "Lost, gained, churn: answers compared with the reference's of the same pair of seeds. A/A churn: two answers "
        "of one checkpoint, if it was sampled more than once; only churn beyond it is change. Any two seeds: the same "
        "without pairing, next to two seeds of one arm."
    )
    order = 180
    gated = True
    figures = ("churn",)
    keys: ClassVar = {"analysis.churn": 33}

    def compute(self, inputs: Inputs) -> Churns | None:
        return tuple(_cell(d, sides) for d, sides in gated_sides(inputs.decided, inputs.data.panels)) or None

    def tables(self, value: Churns, decided: Decided) -> Iterator[Table]:
        """Yield the table of drift and churn by cell, with the A/A churn if a checkpoint answered more than once.

        The A/A churn is the share of answers that differ between two answers of one checkpoint to the same request.
        """
        has_rerun = any(c.rerun is not None for c in value)
        headers = ["cell", "drift, pp", "lost, pp", "gained, pp", "churn", *(["A/A churn"] if has_rerun else [])]
        rows = []
        for c in value:
            row = [cell_label(decided.comparison, c.cell), points(c.drift)]
            row += [f"{100 * c.losses:.1f}", f"{100 * c.gains:.1f}", percent(c.churn)]
            rows.append([*row, *([percent(c.rerun)] if has_rerun else []), percent(c.draws), percent(c.draws_rerun)])
        yield table_of([*headers, "any two seeds", "two seeds of one arm"], rows)

    def finding(self, value: Churns, decided: Decided) -> str:
        churns = [c.churn for c in value]
        return f"{percent(min(churns))} to {percent(max(churns))} of the answers changed."

    def draw(self, value: Churns, decided: Decided) -> Iterator[Drawing | None]:
        """Yield a chart of losses (left) and gains (right) by cell; if cells are too many, of those with most churn."""
        cells = value if len(value) <= _MOST_BARS else sorted(value, key=lambda c: -c.churn)[:_MOST_BARS]
        figure = new_figure(7.6, 1.0 + 0.23 * len(cells))
        panel = figure.subplots()
        for y, c in enumerate(cells):
            panel.barh(y, -100 * c.losses, height=0.68, color=LOSS, alpha=0.75)
            panel.barh(y, 100 * c.gains, height=0.68, color=GAIN, alpha=0.75)
            panel.plot([100 * c.drift], [y], marker="D", color=INK, markersize=4)
        panel.axvline(0, color=INK, linewidth=0.8)
        label_rows(panel, [cell_label(decided.comparison, c.cell) for c in cells])
        panel.set_xlabel("pp of all items")
        add_grid(panel)
        handles = [
            legend_patch("lost", facecolor=LOSS, alpha=0.75),
            legend_patch("gained", facecolor=GAIN, alpha=0.75),
            legend_line("net drift", color=INK, marker="D", markersize=4, linestyle=""),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
        yield save(figure, "churn", "What each gated cell lost and gained, in pp of all items, and its net drift.")


def _cell(d: Decision, sides: BothSides) -> CellChurn:
    pairs = sides.reference_pairs, sides.candidate_pairs
    paired = flips(*pairs, samples=1 if sides.graded else sides.samples)
    unpaired = draw_flips(sides.reference, sides.candidate, samples=1 if sides.graded else sides.draws)
    drift = float(sides.difference.mean())
    # take the number of the gate to the last bit, so that both are rounded alike; human labels give another number
    if d.effect is not None and math.isclose(drift, d.effect.estimate, abs_tol=1e-9):
        drift = d.effect.estimate
    return CellChurn(
        cell=d.name,
        drift=drift,
        losses=paired.lost,
        gains=paired.won,
        churn=paired.churn,
        rerun=paired.rerun,
        draws=unpaired.churn,
        draws_rerun=unpaired.rerun,
    )


# --- the scores of both sides of a cell -------------------------------------------------------------------------------


@dataclass(frozen=True)
class BothSides:
    """The scores [N] of N items in reference and candidate, averaged over samples and paired seeds.

    For a facet, N counts the items to which both sides of some pair of seeds gave readable answers. ``draws`` is the
    number of answers that an item's score averages. ``reference_pairs`` and ``candidate_pairs`` [S, N] are the scores
    of each of S pairs of seeds, averaged over ``samples`` answers. ``graded`` means that some answer scores neither 0
    nor 1.
    """

    templates: tuple[str, ...]  # [N] names
    reference: Array
    candidate: Array
    reference_pairs: Array
    candidate_pairs: Array
    samples: int
    draws: int
    graded: bool

    @property
    def difference(self) -> Array:
        """Candidate minus reference [N]."""
        return self.candidate - self.reference


def _both_sides(panel: Panel, comparison: Comparison, name: CellName) -> BothSides:
    """Return the scores of candidate and reference in a cell that compares two sides and has an effect."""
    pairs = seed_pairs(comparison, panel, name.arm)
    weights = [weights_of(comparison, name.estimand, name.arm, pair, name.policy) for pair in pairs]
    positive, negative = two_sides(weights)
    readable = [~np.isnan(np.stack([panel.scores[cell] for cell in cells])) for cells in (positive, negative)]  # [S, N]
    present: npt.NDArray[np.bool_] = np.any(readable[0] & readable[1], axis=0)  # [N]
    candidate, reference = paired_scores(panel, weights, present)
    return BothSides(
        templates=tuple(panel.cluster_names[code] for code in panel.clusters[present]),
        reference=reference.mean(axis=0),
        candidate=candidate.mean(axis=0),
        reference_pairs=reference,
        candidate_pairs=candidate,
        samples=panel.samples,
        draws=panel.samples * len(pairs),
        graded=panel.graded,
    )


def gated_sides(decided: Decided, tables: Panels) -> Iterator[tuple[Decision, BothSides]]:
    """Yield every gated cell whose effect could be computed, with the scores of its reference and candidate."""
    for d in decided.verdict.decisions:
        if has_two_sides(d):
            yield d, _both_sides(tables[d.suite, d.context_tokens], decided.comparison, d)
