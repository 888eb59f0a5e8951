"""JUDGE_DIFF: where people found that the judge may err differently in the two arms, its labels alone pass nothing."""

from __future__ import annotations

from dataclasses import replace

from reports.drift.report import Contrast, Reason
from reports.gate.gated import GatedCell
from reports.gate.verdict import JUDGE_DIFF, Decision, Status, worst
from reports.labels.panel import Adjudication, JudgedCell

PASSED = (Status.PASS, Status.PASS_NOTED)


def held(d: Decision, cell: GatedCell, labels: Adjudication | None) -> Decision:
    """The decision; INCONCLUSIVE instead of a PASS on judge labels of answers that the judge may have told apart.

    That is so for every test without human labels whose candidate, policy, suite and length are those of a cell where
    the judge's possible bias goes beyond half the margin.
    """
    alone = [row.contrast for row in cell.rows if row.contrast.judged is None]
    uneven = [j for j in labels.cells if not j.guard and any(_same_answers(j, c) for c in alone)] if labels else []
    if not uneven or (d.status not in PASSED and d.recipe not in PASSED):
        return d
    recipe = None if d.recipe is None else worst([d.recipe, Status.INCONCLUSIVE])
    if d.status not in PASSED:
        return replace(d, recipe=recipe)
    most = max(j.bias_upper for j in uneven)
    reason = Reason(JUDGE_DIFF, f"judge labels alone cannot pass: the judge may have made up to {100 * most:.1f} pp")
    return replace(d, status=Status.INCONCLUSIVE, recipe=recipe, reasons=(reason, *d.reasons), clusters_to_decide=None)


def _same_answers(j: JudgedCell, c: Contrast) -> bool:
    suites = {part.suite for part in c.sums} or {c.suite}
    return (j.arm, j.policy, j.context_tokens) == (c.arm, c.policy, c.context_tokens) and j.suite in suites
