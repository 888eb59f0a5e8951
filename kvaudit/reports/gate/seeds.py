"""The worst training seed: one that fails by itself, beside others that lost nothing.

A drift averaged over seeds passes a training that breaks one run in three (losses of 9, 0 and 0 pp average to 3). Where
the gate asks ``worst_seed``, a cell with a seed that fails by itself is FAIL, for reason SEED. A seed fails by itself
when its own drift is past the margin, its own ESS-Tango bounds lie below 0, and the drop holds for the family of every
seed of every gated cell, by the same max-T: without drift no audit fails for a seed more often than the level says,
however many seeds and cells there are. The interval of a seed is rarely within the margin, having a third of the
answers: were that enough, most drops that are seen would fail, PASS* too. So the estimate itself must be past it.
People label no seed by itself; seeds are held by the judge's labels also where human labels decide the cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvaudit.reports.verdict.comparison import Reason
from kvaudit.reports.verdict.contrast import SeedDrift
from kvaudit.reports.verdict.family import FamilyRow, GatedCell, joint_family
from kvaudit.reports.verdict.verdict import Decision, Status, worst

SEED = "SEED"


class _Alone(NamedTuple):
    """A test of one seed: the test of its own cell, and the seed."""

    row: FamilyRow
    seed: SeedDrift


def held_by_seeds(decisions: Sequence[Decision], cells: Sequence[GatedCell], alpha: float) -> list[Decision]:
    """The decisions of cells; FAIL instead of anything that is valid where a seed FAILs alone."""
    # a test that several cells share counts once in the family
    found = {(id(row.contrast), row.sign, alone.seed.seed): alone for row, alone in _every(cells)}
    family = joint_family([alone.row for alone in found.values()])
    pvalues = dict(zip(found, family.pvalues, strict=True))

    def failing(cell: GatedCell) -> Iterator[SeedDrift]:
        for row, alone in _every([cell]):
            p = pvalues[id(row.contrast), row.sign, alone.seed.seed]
            margin = cell.margin_of(row)
            if p < alpha and margin is not None and _lost(alone.seed, row.sign, margin):
                yield alone.seed

    return [_failed(d, list(failing(cell))) for d, cell in zip(decisions, cells, strict=True)]


def _every(cells: Sequence[GatedCell]) -> Iterator[tuple[FamilyRow, _Alone]]:
    """Every test of every cell with each of its seeds alone, as one more test of a family."""
    for row in (row for cell in cells for row in cell.rows):
        c = row.contrast
        for seed, sums in zip(c.by_seed, c.seed_sums, strict=True):
            assert c.effect is not None, "a cell without a number has no seeds"
            # what the family and the margin are asked of is the seed's own
            effect = replace(c.effect, estimate=seed.estimate, pvalue_drop=seed.pvalue_drop)
            yield row, _Alone(FamilyRow(replace(c, effect=effect, sums=sums, readings=()), row.sign), seed)


def _lost(seed: SeedDrift, sign: int, margin: float) -> bool:
    """Whether a seed lost (in a test for a gain, gained) more than the margin, with bounds that leave out 0."""
    estimate, upper = (seed.estimate, seed.upper) if sign > 0 else (-seed.estimate, -seed.lower)
    return estimate <= -margin and upper < 0


def _failed(d: Decision, seeds: Sequence[SeedDrift]) -> Decision:
    """The decision with the seeds that FAIL alone; a recipe that makes them is not one to pass either."""
    if not seeds or d.status is Status.INVALID:
        return d
    named = ", ".join(f"{s.seed} ({100 * s.estimate:+.1f} pp)" for s in {s.seed: s for s in seeds}.values())
    reason = Reason(SEED, f"fails by itself: seed {named}")
    recipe = None if d.recipe is None else worst([d.recipe, Status.FAIL])
    judged = None if d.judged is None else worst([d.judged, Status.FAIL])
    return replace(d, status=Status.FAIL, recipe=recipe, judged=judged, reasons=(reason, *d.reasons))
