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

from reports.drift.results import Drift, Reason
from reports.drift.validity import some
from reports.gate.cell import Judged, Pvalues, decision, judged
from reports.gate.family import Row, drop_pvalue, holm_family, joint_family
from reports.gate.gated import GatedCell, gated_cells, shown_cells
from reports.gate.guard import held, uneven_cells
from reports.gate.rules import WARN, Rules
from reports.gate.verdict import (
    EXIT_CODES,
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


def decide(drift: Drift, rules: Rules, waivers: Sequence[Waiver] = ()) -> Verdict:
    """The verdict of a drift, by precedence INVALID > FAIL > INCONCLUSIVE > WAIVED > PASS."""
    cells, beside = gated_cells(drift, rules), shown_cells(drift, rules)
    uneven = uneven_cells([*cells, *beside])
    found, adjustment = _decisions(cells, rules.alpha)
    shown, _ = _decisions(beside, rules.alpha)
    gated = [_waived(held(d, cell, uneven), waivers) for d, cell in zip(found, cells, strict=True)]
    decisions = (*gated, *(held(d, cell, uneven) for d, cell in zip(shown, beside, strict=True)))
    reasons = (*drift.reasons, *_pin_reasons(drift, rules), *_reasons(gated))
    arms = _arm_verdicts(gated)
    start = Status.INVALID if reasons else Status.PASS
    status = worst([start, *(a.status for a in arms)])
    return Verdict(
        status=status,
        exit_code=_exit_code(status, rules),
        recipe=worst_recipe([a.recipe for a in arms]),
        reasons=reasons,
        arms=arms,
        decisions=decisions,
        headline=None if status is Status.INVALID else _headline(decisions),
        unwaived=worst([start, *(a.unwaived for a in arms)]),
        adjustment=adjustment,
        judged=_judged_alone(found, start, waivers) if any(c.people for c in drift.contrasts) else None,
    )


def _decisions(cells: Sequence[GatedCell], alpha: float) -> tuple[list[Decision], Adjustment]:
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
    return [decision(cell, alpha, adjustment, judge) for cell in cells], adjustment


def _judged_alone(found: Sequence[Decision], start: Status, waivers: Sequence[Waiver]) -> Status:
    """The verdict had nobody labelled anything."""
    alone = [_waived(replace(d, status=d.judged or d.status, judged=None), waivers) for d in found]
    return worst([start, *(d.standing for d in alone)])


def _pin_reasons(drift: Drift, rules: Rules) -> list[Reason]:
    """Reference weights that are not those of the pin."""
    if rules.pin is None:
        return []
    reference, known = drift.comparison.reference, rules.pin.weights(drift.comparison.reference)
    strange = [f"{reference} seed {seed}" for seed, found in drift.weights.items() if found != {known.get(seed)}]
    text = f"{rules.pin.name} pins other weights, or none, for {some(strange)}: gate with its own pin"
    return [Reason("REFHASH", text)] if strange else []


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
