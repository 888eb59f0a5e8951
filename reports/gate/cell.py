"""One cell decided: the rule of a test, the floor of the reference, and what a cell of several tests says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from reports.drift.results import Reason
from reports.gate.family import HOLM, Row
from reports.gate.gated import PARITY, WORST_POLICY, GatedCell
from reports.gate.verdict import AT_FLOOR, FLOOR, PRECEDENCE, Adjustment, Decision, Status, worst, worst_recipe
from reports.stats.blindspot import blind_spot, clusters_required
from reports.stats.effect import Effect
from reports.stats.resolve import clusters_to_decide
from reports.stats.rule import Call, calls

_STATUS = {
    Call.PASS: Status.PASS,
    Call.PASS_NOTED: Status.PASS_NOTED,
    Call.FAIL: Status.FAIL,
    Call.INCONCLUSIVE: Status.INCONCLUSIVE,
    Call.CLUSTERS: Status.INCONCLUSIVE,
}


class Pvalues(NamedTuple):
    """The p-values of one test, each adjusted for the family: of the checkpoints, by Holm beside, of the recipe.

    ``judge`` is that of the judge's labels: another than ``adjusted`` where human labels decide.
    """

    adjusted: float
    holm: float
    recipe: float
    judge: float


@dataclass(frozen=True)
class Judged:
    """One test of a cell, decided."""

    row: Row
    status: Status
    recipe: Status | None
    reasons: tuple[Reason, ...]
    pvalue: float
    holm: float
    room: float
    needed: int | None
    judge: Status | None = None  # by the judge's labels, where human labels decide


def decide_cell(
    effect: Effect, margin: float, pvalue: float, what: str = "regression"
) -> tuple[Status, tuple[Reason, ...]]:
    """The rule of one test; ``pvalue`` is one-sided for a drop and adjusted for the family."""
    have = effect.n_clusters
    found = calls(effect.lower, effect.upper, pvalue, clusters=have, margin=margin, alpha=effect.alpha)
    call = Call(int(found))
    reasons = {
        Call.CLUSTERS: Reason(
            "CLUSTERS",
            f"{have} clusters cannot show a {100 * margin:g} pp margin; "
            f"{clusters_required(margin, effect.alpha)} are needed",
        ),
        Call.FAIL: Reason("MARGIN", f"{what} detected and not shown within the margin"),
        Call.INCONCLUSIVE: Reason("MARGIN", "the interval reaches past the margin"),
    }
    return _STATUS[call], (reasons[call],) if call in reasons else ()


def judged(row: Row, margin: float, pvalues: Pvalues) -> Judged:
    """One test held to its margin; a contrast without a number is INVALID for its own reasons.

    Human labels correct the effect, not the seed variance: the recipe is decided where it agrees with the checkpoints.
    """
    c, what = row.contrast, "regression" if row.sign > 0 else "gain"
    status, reasons, recipe, needed, room = Status.INVALID, c.reasons, None, None, 0.0
    if c.effect:
        effect = _toward(c.effect, row.sign)
        status, reasons = decide_cell(effect, margin, pvalues.adjusted, what)
        recipe = decide_cell(_toward(c.recipe, row.sign), margin, pvalues.recipe)[0] if c.recipe else None
        if c.rates and c.rates.reference_lower <= margin:
            status, reasons, recipe = _at_floor(status, reasons, recipe)
        needed = clusters_to_decide(effect, margin) if status is Status.INCONCLUSIVE else None
        room = effect.lower + margin
    judge = None
    if c.judged:
        alone = Row(replace(c, effect=c.judged, judged=None), row.sign)
        judge = judged(alone, margin, pvalues._replace(adjusted=pvalues.judge)).status
        recipe = None if recipe is None else _agreed(recipe, status)
    return Judged(row, status, recipe, reasons, pvalues.adjusted, pvalues.holm, room, needed, judge)


def _agreed(recipe: Status, status: Status) -> Status:
    """The recipe by the judge's labels where human labels say the same of the checkpoints; else it is open."""
    passed = (Status.PASS, Status.PASS_NOTED)
    return worst([recipe, status]) if recipe is status or {recipe, status} <= {*passed} else Status.INCONCLUSIVE


def _toward(effect: Effect, sign: int) -> Effect:
    """The effect itself for a test of a drop; seen in a mirror for a test of a gain."""
    if sign > 0:
        return effect
    return replace(
        effect,
        estimate=-effect.estimate,
        low=-effect.high,
        high=-effect.low,
        lower=-effect.upper,
        upper=-effect.lower,
        pvalue_drop=1 - effect.pvalue_drop,
        losses=effect.gains,
        gains=effect.losses,
    )


def decision(cell: GatedCell, alpha: float, adjustment: Adjustment, judge: Callable[[Row, float], Judged]) -> Decision:
    """A cell passes when all its tests do; the worst of them is the one that is shown."""
    first = cell.rows[0].contrast
    if cell.margin is None:
        missing = Reason("NOMARGIN", f"no margin declared for suite {first.suite!r}; add it to gate.margins")
        judged = [
            Judged(row, Status.INVALID, None, (*row.contrast.reasons, missing), 1, 1, 0, None) for row in cell.rows
        ]
    else:
        judged = [judge(row, cell.margin) for row in cell.rows]
    shown = min(judged, key=lambda j: (PRECEDENCE.index(j.status), j.room))
    open_needs = [j.needed for j in judged if j.status is Status.INCONCLUSIVE]
    known_needs = [need for need in open_needs if need is not None]
    c = shown.row.contrast
    return Decision(
        estimand=cell.estimand,
        arm=c.arm,
        policy=c.policy,
        suite=c.suite,
        context_tokens=c.context_tokens,
        gated=cell.gated,
        status=shown.status,
        recipe=worst_recipe([j.recipe for j in judged]),
        reasons=shown.reasons,
        margin=cell.margin,
        pvalue_drop=shown.pvalue if c.effect else None,
        pvalue_holm=shown.holm if c.effect else None,
        adjusted_by=HOLM if c.judged else adjustment.method,
        pvalue_floor=0.0 if c.judged else adjustment.floor,
        clusters_required=clusters_required(cell.margin, alpha) if cell.margin else None,
        clusters_to_decide=max(known_needs) if known_needs and len(known_needs) == len(open_needs) else None,
        blind_spot=blind_spot(c.effect.n_clusters, alpha) if c.effect else None,
        effect=c.effect,
        rates=c.rates,
        worst=c.worst,
        best=c.best,
        policies=tuple(row.contrast.policy for row in cell.rows) if cell.estimand == WORST_POLICY else (),
        statement=_parity(judged, cell.margin) if cell.estimand == PARITY and cell.margin else "",
        judged=worst(j.judge or j.status for j in judged) if any(j.judge for j in judged) else None,
    )


def _parity(judged: Sequence[Judged], margin: float) -> str:
    """The statement of parity: both sides within the margin, or which side is not shown."""
    sides = {"non-inferior": judged[0].status, "non-superior": judged[1].status}
    shown = [f"{word}: {'shown' if s in (Status.PASS, Status.PASS_NOTED) else s.value}" for word, s in sides.items()]
    return f"parity within {100 * margin:g} pp, " + ", ".join(shown)


def _at_floor(
    status: Status, reasons: tuple[Reason, ...], recipe: Status | None
) -> tuple[Status, tuple[Reason, ...], Status | None]:
    """A loss that is shown stays shown; everything else says nothing, because nothing could be lost."""
    capped = None if recipe is None else worst([recipe, Status.INCONCLUSIVE])
    if status is Status.FAIL:
        return status, reasons, capped
    return Status.INCONCLUSIVE, (Reason(FLOOR, AT_FLOOR), *reasons), capped
