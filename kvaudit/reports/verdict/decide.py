"""The decision: PASS, FAIL, NOT MEASURABLE, INCONCLUSIVE or INVALID for every gated cell, every arm and the run.

A cell is decided by its own test (``cell``), then by what can change that (``downgrades``), then by waivers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvaudit.reports.verdict.cell import DecidedTest, Pvalues, by_judge, decided_test, decision
from kvaudit.reports.verdict.comparison import some_of
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.controls import Controls
from kvaudit.reports.verdict.downgrades import (
    OF_A_PASS,
    OF_THE_DATA,
    DowngradeContext,
    downgraded,
    failing_seeds,
    judge_biases,
)
from kvaudit.reports.verdict.family import (
    FamilyRow,
    GatedCell,
    drop_pvalue,
    gated_cells,
    holm_family,
    joint_family,
    shown_cells,
)
from kvaudit.reports.verdict.reasons import Reason, ReasonCode
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import (
    PRECEDENCE,
    Adjustment,
    ArmVerdict,
    Decision,
    Status,
    Verdict,
    worst,
    worst_exit_code,
    worst_recipe,
)
from kvaudit.reports.verdict.waivers import Waiver


def decide(drift: Drift, rules: Rules, waivers: Sequence[Waiver] = ()) -> Verdict:
    """Return the verdict of a drift, by precedence FAIL > INVALID > INCONCLUSIVE > NOT MEASURABLE > WAIVED > PASS.

    A run whose comparison is broken as a whole is INVALID whatever its cells show.
    """
    cells, ungated = gated_cells(drift, rules), shown_cells(drift, rules)
    context = DowngradeContext(
        drift=drift,
        rules=rules,
        gated_cells=cells,
        controls=Controls(drift, rules.margins, rules.ratios),
        biased=judge_biases([*cells, *ungated]),
        failing_seeds=failing_seeds(cells, rules.alpha) if rules.worst_seed else {},
    )
    tested, adjustment = _tested(cells, rules.alpha)
    of_data = [downgraded(d, cell, context, OF_THE_DATA) for d, cell in zip(tested, cells, strict=True)]
    passable = [downgraded(d, cell, context, OF_A_PASS) for d, cell in zip(of_data, cells, strict=True)]
    gated = [_waived(d, waivers) for d in passable]  # last, over whatever the decision is
    shown = [
        downgraded(d, cell, context, (*OF_THE_DATA, *OF_A_PASS))
        for d, cell in zip(_tested(ungated, rules.alpha)[0], ungated, strict=True)
    ]
    decisions = (*gated, *shown)
    reasons = (*drift.reasons, *_pin_reasons(drift, rules), *_no_cell(gated))
    arms = _arm_verdicts(gated)
    # beside trained arms the reference shows what serving does, which says nothing of training
    served_only = {drift.comparison.reference} if drift.comparison.mode == "training" else set[str]()
    start = Status.INVALID if reasons else Status.PASS
    status = start if reasons else worst([start, *(a.status for a in arms)])
    return Verdict(
        status=status,
        exit_code=worst_exit_code([start] if reasons else [start, *(d.standing for d in gated)], rules),
        recipe=worst_recipe([a.recipe for a in arms if a.arm not in served_only]),
        reasons=reasons,
        arms=arms,
        decisions=decisions,
        headline=None if status is Status.INVALID else _headline(decisions),
        unwaived=start if reasons else worst([start, *(a.unwaived for a in arms)]),
        adjustment=adjustment,
        judged=_by_judge_alone(of_data, start, waivers) if any(c.people for c in drift.contrasts) else None,
        controls=context.controls.uncompressed,
    )


def _tested(cells: Sequence[GatedCell], alpha: float) -> tuple[list[Decision], Adjustment]:
    """Decide every cell by its test, with all tests adjusted as one family; a test that two cells share counts once."""
    rows = list({_key(row): row for cell in cells for row in cell.rows}.values())
    family = joint_family([by_judge(row) for row in rows], alpha)
    # signs of templates cannot be flipped together where people labelled, so these tests take Holm
    labelled = holm_family([drop_pvalue(row.contrast.effect, row.sign) for row in rows])
    recipes = holm_family([_recipe_pvalue(row) for row in rows])
    indices = {_key(row): i for i, row in enumerate(rows)}

    def decide_test(row: FamilyRow, margin: float, limit: float | None) -> DecidedTest:
        i = indices[_key(row)]
        adjusted, holm = (labelled[i], labelled[i]) if row.contrast.judged else (family.pvalues[i], family.holm[i])
        return decided_test(row, margin, Pvalues(adjusted, holm, recipes[i], family.pvalues[i]), limit)

    adjustment = Adjustment(family.method, family.reason, family.floor, family.critical)
    return [decision(cell, alpha, adjustment, decide_test) for cell in cells], adjustment


def _by_judge_alone(decisions: Sequence[Decision], start: Status, waivers: Sequence[Waiver]) -> Status:
    """Return the verdict without human labels."""
    judged = [_waived(replace(d, status=d.judged or d.status, judged=None), waivers) for d in decisions]
    return start if start is Status.INVALID else worst([start, *(d.standing for d in judged)])


def _pin_reasons(drift: Drift, rules: Rules) -> list[Reason]:
    """Name the reference weights that are not those of the pin."""
    if rules.pin is None:
        return []
    reference, pin = drift.comparison.reference, rules.pin
    other = [f"{reference} seed {seed}" for seed, sha in drift.weights.items() if not pin.holds(reference, seed, sha)]
    text = f"{pin.name} pins other weights, or none, for {some_of(other)}: gate with its own pin"
    return [Reason(ReasonCode.REF_HASH, text)] if other else []


def _key(row: FamilyRow) -> tuple[int, int]:
    return id(row.contrast), row.sign


def _recipe_pvalue(row: FamilyRow) -> float | None:
    return drop_pvalue(row.contrast.recipe, row.sign)


def _waived(d: Decision, waivers: Sequence[Waiver]) -> Decision:
    """Return the decision with the first waiver that covers it; nothing waives INVALID."""
    place = {"suite": d.suite, "arm": d.arm, "context_tokens": d.context_tokens, "estimand": d.estimand}
    policy = None if len(d.policies) > 1 else d.policy  # the worst of several policies cannot be selected by one
    covering = [w for w in waivers if w.covers(d.status.value, {**place, "policy": policy})]
    return replace(d, waiver=covering[0]) if covering and d.status is not Status.INVALID else d


def _no_cell(gated: Sequence[Decision]) -> list[Reason]:
    return [] if gated else [Reason(ReasonCode.NOTHING, "no cell to gate: one arm under one policy cannot be compared")]


def _arm_verdicts(gated: Sequence[Decision]) -> tuple[ArmVerdict, ...]:
    verdicts = []
    for arm in dict.fromkeys(d.arm for d in gated):
        cells = [d for d in gated if d.arm == arm]
        names = dict.fromkeys(d.suite for d in cells)
        suites = {suite: worst(d.standing for d in cells if d.suite == suite) for suite in names}
        recipe, unwaived = worst_recipe([d.recipe for d in cells]), worst(d.status for d in cells)
        verdicts.append(ArmVerdict(arm, worst(suites.values()), recipe, suites, unwaived))
    return tuple(verdicts)


def _headline(decisions: Sequence[Decision]) -> int | None:
    """Return the index of the gated cell that decides: the worst status, then the lowest bound against its margin.

    Only cells with a number count; one that is not measurable counts only where every cell is.
    """
    numbered = [(i, d, d.effect) for i, d in enumerate(decisions) if d.gated and d.effect]
    candidates = [entry for entry in numbered if entry[1].is_measurable] or numbered
    if not candidates:
        return None
    rank = {status: i for i, status in enumerate(PRECEDENCE)}
    return min(candidates, key=lambda entry: (rank[entry[1].standing], entry[2].lower + (entry[1].margin or 0)))[0]
