"""The decision: PASS, FAIL, INCONCLUSIVE or INVALID for every gated cell, arm and the run. Pure.

Per cell, margin D and one-sided level alpha (lower and upper bound L, U of ESS-Tango), ``stats.rule``:
PASS          L > -D and the cell has C_min clusters ("non-inferior within D"); PASS* when also U < 0
FAIL          U < 0 and the drop holds for the family of all gated cells (``family``), and L <= -D
INCONCLUSIVE  everything else; also what would pass where the reference's own rate is not clearly above D (FLOOR)
A PASS of several cells needs no correction: all must pass, each at the full level (intersection-union). ``gated`` says
which cells there are. Where people labelled a cell, their interval decides it, with FAIL held to the family by Holm;
all other cells stay as the judge has them. Waivers change what counts, never what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reports.drift.plan import Plan
from reports.drift.report import Reason, Report
from reports.gate.cell import Judged, Pvalues, decide_cell, decision, judged
from reports.gate.family import Row, drop_pvalue, holm_family, joint_family
from reports.gate.gated import GatedCell, gated_cells, is_gated, is_shown, shown_cells
from reports.gate.guard import held
from reports.gate.rules import WARN, Rules
from reports.gate.verdict import (
    AT_FLOOR,
    EXIT_CODES,
    FLOOR,
    PRECEDENCE,
    Adjustment,
    ArmVerdict,
    Decision,
    Status,
    Verdict,
    worst,
    worst_recipe,
)
from reports.gate.waivers import Waiver
from reports.labels.panel import Adjudication
from reports.page.remarks import remarks

__all__ = [
    "AT_FLOOR",
    "EXIT_CODES",
    "FLOOR",
    "ArmVerdict",
    "Decision",
    "Status",
    "Verdict",
    "decide",
    "decide_cell",
    "is_gated",
    "is_shown",
    "worst",
]


def decide(report: Report) -> Verdict:
    """The verdict of a report, by precedence INVALID > FAIL > INCONCLUSIVE > WAIVED > PASS."""
    plan = report.plan
    gated, adjustment = _decisions(gated_cells(report.contrasts, plan), plan, report.adjudication)
    gated = [_waived(d, report.waivers) for d in gated]
    beside, _ = _decisions(shown_cells(report.contrasts, plan), plan, report.adjudication)
    decisions = [*gated, *beside]
    reasons = (*report.reasons, *_reasons(gated))
    arms = _arm_verdicts(gated)
    start = Status.INVALID if reasons else Status.PASS
    status = worst([start, *(a.status for a in arms)])
    verdict = Verdict(
        status=status,
        exit_code=_exit_code(status, plan.rules),
        recipe=worst_recipe([a.recipe for a in arms]),
        reasons=reasons,
        arms=arms,
        decisions=tuple(decisions),
        headline=None if status is Status.INVALID else _headline(decisions),
        unwaived=worst([start, *(a.unwaived for a in arms)]),
        adjustment=adjustment,
        annotations=(),
        gate_sha256=plan.rules.sha256,
    )
    return replace(verdict, annotations=tuple(remarks(report, verdict)))


def _decisions(
    cells: Sequence[GatedCell], plan: Plan, labels: Adjudication | None
) -> tuple[list[Decision], Adjustment]:
    """Every cell decided, all their tests adjusted as one family; a test that two cells share counts once."""
    rows = list({_key(row): row for cell in cells for row in cell.rows}.values())
    family = joint_family([_by_judge(row) for row in rows])
    people = holm_family([drop_pvalue(row.contrast.effect, row.sign) for row in rows])
    recipes = holm_family([_recipe_pvalue(row) for row in rows])
    places = {_key(row): i for i, row in enumerate(rows)}

    def judge(row: Row, margin: float) -> Judged:
        i = places[_key(row)]
        own = (people[i], people[i]) if row.contrast.judged else (family.pvalues[i], family.holm[i])
        return judged(row, margin, Pvalues(*own, recipes[i], family.pvalues[i]))

    adjustment = Adjustment(family.method, family.reason, family.floor)
    return [held(decision(cell, plan.alpha, adjustment, judge), cell, labels) for cell in cells], adjustment


def _by_judge(row: Row) -> Row:
    """The test on the judge's labels, which the item differences at hand are of."""
    c = row.contrast
    return Row(replace(c, effect=c.judged), row.sign) if c.judged else row


def _key(row: Row) -> tuple[int, int]:
    return id(row.contrast), row.sign


def _recipe_pvalue(row: Row) -> float | None:
    return drop_pvalue(row.contrast.recipe, row.sign)


def _waived(d: Decision, waivers: Sequence[Waiver]) -> Decision:
    """The decision with the first waiver that covers it; INVALID is in no waiver's reach."""
    place = {"suite": d.suite, "arm": d.arm, "context_tokens": d.context_tokens, "estimand": d.estimand}
    policy = None if len(d.policies) > 1 else d.policy  # the worst of several has no policy to select it by
    found = [w for w in waivers if w.covers(d.status.value, {**place, "policy": policy})]
    return replace(d, waiver=found[0]) if found and d.status is not Status.INVALID else d


def _reasons(gated: Sequence[Decision]) -> list[Reason]:
    return [] if gated else [Reason("NOTHING", "no cell to gate: one arm under one policy cannot be compared")]


def _exit_code(status: Status, rules: Rules) -> int:
    """FAIL and INVALID are never downgraded."""
    return 0 if status is Status.INCONCLUSIVE and rules.on_inconclusive == WARN else EXIT_CODES[status]


def _arm_verdicts(gated: Sequence[Decision]) -> tuple[ArmVerdict, ...]:
    verdicts = []
    for arm in dict.fromkeys(d.arm for d in gated):
        own = [d for d in gated if d.arm == arm]
        suites = {
            suite: worst(d.standing for d in own if d.suite == suite) for suite in dict.fromkeys(d.suite for d in own)
        }
        recipe, found = worst_recipe([d.recipe for d in own]), worst(d.status for d in own)
        verdicts.append(ArmVerdict(arm, worst(suites.values()), recipe, suites, found))
    return tuple(verdicts)


def _headline(decisions: Sequence[Decision]) -> int | None:
    """The gated cell that decides: the worst standing that has a number, there the lowest bound against its margin.

    A cell at the floor is quoted only where every cell is.
    """
    numbered = [(i, d, d.effect) for i, d in enumerate(decisions) if d.gated and d.effect]
    known = [entry for entry in numbered if not entry[1].at_floor] or numbered
    if not known:
        return None
    rank = {status: i for i, status in enumerate(PRECEDENCE)}
    return min(known, key=lambda entry: (rank[entry[1].standing], entry[2].lower + (entry[1].margin or 0)))[0]
