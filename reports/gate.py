"""The decision: PASS, FAIL, INCONCLUSIVE or INVALID for every gated cell, arm and the run. Pure.

Per cell, margin D and one-sided level alpha (lower and upper bound L, U of ESS-Tango):
PASS          L > -D and the cell has C_min clusters ("non-inferior within D"); PASS* when also U < 0
FAIL          the drop is significant after Holm over all gated cells, and L <= -D
INCONCLUSIVE  everything else; also what would pass where the reference's own rate is not clearly above D (FLOOR)
A PASS of several cells needs no correction (all must pass); Holm is the simple valid choice for FAIL, a joint max-T
over cells would have more power. The plan's estimands are gated for trained arms (E1, E2 or both), E4 when only
serving policies are compared; of E1 and E2 the one that is not gated is decided by the same rule and printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from reports.plan import DENSE_POLICY, Plan
from reports.report import Contrast, Rates, Reason, Report
from reports.rules import DEFAULT_ESTIMANDS
from reports.stats.blindspot import blind_spot, clusters_required
from reports.stats.effect import Effect
from reports.stats.holm import holm
from reports.stats.resolve import clusters_to_decide


class Status(StrEnum):
    """What can be said."""

    PASS = "PASS"  # noqa: S105
    PASS_NOTED = "PASS*"  # noqa: S105 - a drop is detectable, and within the margin
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"


EXIT_CODES = {Status.PASS: 0, Status.PASS_NOTED: 0, Status.FAIL: 3, Status.INCONCLUSIVE: 4, Status.INVALID: 5}
FLOOR, AT_FLOOR = "FLOOR", "the reference is at the floor here: there is nothing left to lose"
_PRECEDENCE = (Status.INVALID, Status.FAIL, Status.INCONCLUSIVE, Status.PASS_NOTED, Status.PASS)


@dataclass(frozen=True)
class Decision:
    """The verdict of one cell. ``recipe`` is the verdict with seed variance added, None with fewer than 3 seeds."""

    estimand: str
    arm: str
    policy: str
    suite: str
    context_tokens: int
    gated: bool
    status: Status
    recipe: Status | None
    reasons: tuple[Reason, ...]
    margin: float | None
    pvalue_drop: float | None  # Holm-adjusted over the gated cells
    clusters_required: int | None
    clusters_to_decide: int | None
    blind_spot: float | None
    effect: Effect | None
    rates: Rates | None

    @property
    def at_floor(self) -> bool:
        """Whether the reference has too little to lose for this cell to say anything by holding still."""
        return any(reason.code == FLOOR for reason in self.reasons)


@dataclass(frozen=True)
class ArmVerdict:
    """An arm's verdict over its gated cells, and by suite; ``recipe`` adds seed variance, None below 3 seeds."""

    arm: str
    status: Status
    recipe: Status | None
    suites: dict[str, Status]


@dataclass(frozen=True)
class Verdict:
    """The run's verdict; ``headline`` is the index of the decision that the banner quotes, None if INVALID.

    ``status`` is an artifact claim: it is about the checkpoints at hand, averaged over their seeds. ``recipe`` is the
    same decision with seed variance added ("training this way does this"), None when three paired seeds are lacking.
    """

    status: Status
    exit_code: int
    recipe: Status | None
    reasons: tuple[Reason, ...]
    arms: tuple[ArmVerdict, ...]
    decisions: tuple[Decision, ...]
    headline: int | None


def decide(report: Report) -> Verdict:
    """The verdict of a report, by precedence INVALID > FAIL > INCONCLUSIVE > PASS."""
    plan = report.plan
    gated = [c for c in report.contrasts if is_gated(c, plan)]
    shown = [c for c in report.contrasts if is_shown(c, plan)]
    adjusted, recipe_adjusted = _family(c.effect for c in gated), _family(c.recipe for c in gated)
    decisions = [_decision(c, plan, p, r, gated=True) for c, p, r in zip(gated, adjusted, recipe_adjusted, strict=True)]
    beside, beside_recipe = _family(c.effect for c in shown), _family(c.recipe for c in shown)
    decisions += [_decision(c, plan, p, r, gated=False) for c, p, r in zip(shown, beside, beside_recipe, strict=True)]
    reasons = list(report.reasons)
    if not gated:
        reasons.append(Reason("NOTHING", "no cell to gate: one arm under one policy cannot be compared"))
    arms = _arm_verdicts(decisions)
    status = worst([Status.INVALID if reasons else Status.PASS, *(a.status for a in arms)])
    return Verdict(
        status=status,
        exit_code=EXIT_CODES[status],
        recipe=_recipe([a.recipe for a in arms]),
        reasons=tuple(reasons),
        arms=arms,
        decisions=tuple(decisions),
        headline=None if status is Status.INVALID else _headline(decisions),
    )


def is_gated(c: Contrast, plan: Plan) -> bool:
    """Whether a contrast enters the verdict."""
    if c.policy not in plan.primary:
        return False
    if plan.mode == "serving":
        return c.estimand == "E4" and c.arm == plan.reference and c.policy != DENSE_POLICY
    return c.estimand in plan.estimands and c.arm in plan.candidates and not _is_twin(c, plan)


def is_shown(c: Contrast, plan: Plan) -> bool:
    """Whether a contrast is decided beside the verdict: of E1 and E2 the one that is not gated."""
    if plan.mode == "serving" or c.policy not in plan.primary or _is_twin(c, plan):
        return False
    return c.estimand in DEFAULT_ESTIMANDS and not is_gated(c, plan)


def _is_twin(c: Contrast, plan: Plan) -> bool:
    """Uncompressed, E1 and E2 are the same difference; it is decided once, as E1 where that is gated."""
    other = "E2" if "E1" in plan.estimands else "E1"
    return c.policy == DENSE_POLICY and c.estimand == other


def _recipe(statuses: Sequence[Status | None]) -> Status | None:
    """The worst recipe verdict, None when any part lacks the seeds for one."""
    known = [status for status in statuses if status]
    return worst(known) if known and len(known) == len(statuses) else None


def worst(statuses: Iterable[Status]) -> Status:
    """The status that decides, by precedence."""
    found = set(statuses)
    return next(status for status in _PRECEDENCE if status in found)


def decide_cell(effect: Effect, margin: float, pvalue_drop: float) -> tuple[Status, tuple[Reason, ...]]:
    """The rule of one cell; ``pvalue_drop`` is adjusted for the family."""
    required = clusters_required(margin, effect.alpha)
    if effect.lower > -margin:
        if effect.n_clusters < required:
            text = f"{effect.n_clusters} clusters cannot show a {100 * margin:g} pp margin; {required} are needed"
            return Status.INCONCLUSIVE, (Reason("CLUSTERS", text),)
        return (Status.PASS_NOTED if effect.upper < 0 else Status.PASS), ()
    if effect.upper < 0 and pvalue_drop < effect.alpha:
        return Status.FAIL, (Reason("MARGIN", "regression detected and not shown within the margin"),)
    return Status.INCONCLUSIVE, (Reason("MARGIN", "the interval reaches past the margin"),)


def _family(effects: Iterable[Effect | None]) -> list[float]:
    """Holm-adjusted one-sided p-values in order; 1 where there is no effect."""
    found = list(effects)
    known = [i for i, effect in enumerate(found) if effect]
    adjusted = holm([e.pvalue_drop for e in found if e])
    result = [1.0] * len(found)
    for index, value in zip(known, adjusted, strict=True):
        result[index] = value
    return result


def _decision(c: Contrast, plan: Plan, pvalue: float, recipe_pvalue: float, *, gated: bool) -> Decision:
    margin = plan.margins.get(c.suite)
    status, reasons, recipe, needed = Status.INVALID, c.reasons, None, None
    if margin is None:
        reasons = (*reasons, Reason("NOMARGIN", f"no margin declared for suite {c.suite!r}; add it to gate.margins"))
    elif c.effect:
        status, reasons = decide_cell(c.effect, margin, pvalue)
        recipe = decide_cell(c.recipe, margin, recipe_pvalue)[0] if c.recipe else None
        if c.rates and c.rates.reference_lower <= margin:
            status, reasons, recipe = _at_floor(status, reasons, recipe)
        needed = clusters_to_decide(c.effect, margin) if status is Status.INCONCLUSIVE else None
    return Decision(
        estimand=c.estimand,
        arm=c.arm,
        policy=c.policy,
        suite=c.suite,
        context_tokens=c.context_tokens,
        gated=gated,
        status=status,
        recipe=recipe,
        reasons=reasons,
        margin=margin,
        pvalue_drop=pvalue if c.effect else None,
        clusters_required=clusters_required(margin, plan.alpha) if margin else None,
        clusters_to_decide=needed,
        blind_spot=blind_spot(c.effect.n_clusters, plan.alpha) if c.effect else None,
        effect=c.effect,
        rates=c.rates,
    )


def _at_floor(
    status: Status, reasons: tuple[Reason, ...], recipe: Status | None
) -> tuple[Status, tuple[Reason, ...], Status | None]:
    """A loss that is shown stays shown; everything else says nothing, because nothing could be lost."""
    capped = None if recipe is None else worst([recipe, Status.INCONCLUSIVE])
    if status is Status.FAIL:
        return status, reasons, capped
    return Status.INCONCLUSIVE, (Reason(FLOOR, AT_FLOOR), *reasons), capped


def _arm_verdicts(decisions: Sequence[Decision]) -> tuple[ArmVerdict, ...]:
    gated = [d for d in decisions if d.gated]
    verdicts = []
    for arm in dict.fromkeys(d.arm for d in gated):
        own = [d for d in gated if d.arm == arm]
        suites = {
            suite: worst(d.status for d in own if d.suite == suite) for suite in dict.fromkeys(d.suite for d in own)
        }
        verdicts.append(ArmVerdict(arm, worst(suites.values()), _recipe([d.recipe for d in own]), suites))
    return tuple(verdicts)


def _headline(decisions: Sequence[Decision]) -> int | None:
    """The gated cell that decides: the worst status that has a number, there the lowest bound against its margin.

    A cell at the floor is quoted only where every cell is.
    """
    numbered = [(i, d, d.effect) for i, d in enumerate(decisions) if d.gated and d.effect]
    known = [entry for entry in numbered if not entry[1].at_floor] or numbered
    if not known:
        return None
    rank = {status: i for i, status in enumerate(_PRECEDENCE)}
    return min(known, key=lambda entry: (rank[entry[1].status], entry[2].lower + (entry[1].margin or 0)))[0]
