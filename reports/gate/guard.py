"""JUDGE_DIFF: where people found that the judge may err differently in the two arms, its labels alone pass nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reports.drift.results import Contrast, People, Reason
from reports.gate.gated import GatedCell
from reports.gate.verdict import JUDGE_DIFF, Decision, Status, worst

PASSED = (Status.PASS, Status.PASS_NOTED)


@dataclass(frozen=True)
class Uneven:
    """A decided cell in which the judge by itself could have made more than half the margin."""

    contrast: Contrast
    bias_upper: float


def uneven_cells(cells: Sequence[GatedCell]) -> list[Uneven]:
    """Those of the cells at hand whose answers people labelled."""
    own = [(cell.rows[0].contrast, cell.margin) for cell in cells if cell.estimand == cell.rows[0].contrast.estimand]
    return [Uneven(c, c.people.bias_upper) for c, m in own if c.people and m and not guarded(c.people, m)]


def guarded(people: People, margin: float) -> bool:
    """Whether the judge's own bias is at most half the margin, so that its labels alone may pass the cell."""
    return people.bias_upper <= margin / 2


def held(d: Decision, cell: GatedCell, uneven: Sequence[Uneven]) -> Decision:
    """The decision; INCONCLUSIVE instead of a PASS on judge labels of answers that the judge may have told apart.

    That is so for every test without human labels whose candidate, policy, suite and length are those of an uneven
    cell.
    """
    alone = [row.contrast for row in cell.rows if row.contrast.judged is None]
    biased = [u.bias_upper for u in uneven if any(_same_answers(u.contrast, c) for c in alone)]
    if not biased or (d.status not in PASSED and d.recipe not in PASSED):
        return d
    recipe = None if d.recipe is None else worst([d.recipe, Status.INCONCLUSIVE])
    if d.status not in PASSED:
        return replace(d, recipe=recipe)
    most = 100 * max(biased)
    reason = Reason(JUDGE_DIFF, f"judge labels alone cannot pass: the judge may have made up to {most:.1f} pp")
    return replace(d, status=Status.INCONCLUSIVE, recipe=recipe, reasons=(reason, *d.reasons), clusters_to_decide=None)


def _same_answers(labelled: Contrast, c: Contrast) -> bool:
    suites = {part.suite for part in c.sums} or {c.suite}
    here = (labelled.arm, labelled.policy, labelled.context_tokens) == (c.arm, c.policy, c.context_tokens)
    return here and labelled.suite in suites
