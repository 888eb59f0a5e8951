"""One cell decided: the rule of a test, and what a cell of several tests says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvaudit.core.estimands import PARITY, WORST
from kvaudit.reports.drift.comparison import Reason
from kvaudit.reports.drift.results import Contrast, People
from kvaudit.reports.gate.chance import larger
from kvaudit.reports.gate.family import (
    HOLM,
    FamilyRow,
    GatedCell,
)
from kvaudit.reports.gate.verdict import (
    LABELS,
    PASSED,
    PRECEDENCE,
    TEMPLATES,
    Adjustment,
    Decision,
    Larger,
    Status,
    worst,
    worst_recipe,
)
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.rule import (
    Call,
    Part,
    blind_spot,
    calls,
    clusters_required,
    effective_clusters,
    parts_show_margin,
    template_bound,
    too_large,
)

_STATUS = {
    Call.PASS: Status.PASS,
    Call.PASS_NOTED: Status.PASS_NOTED,
    Call.FAIL: Status.FAIL,
    Call.INCONCLUSIVE: Status.INCONCLUSIVE,
    Call.CLUSTERS: Status.INCONCLUSIVE,
    Call.UNEVEN: Status.INCONCLUSIVE,
    Call.TEMPLATES: Status.INCONCLUSIVE,
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

    row: FamilyRow
    status: Status
    recipe: Status | None
    reasons: tuple[Reason, ...]
    pvalue: float
    holm: float
    room: float
    larger: Larger | None
    judge: Status | None = None  # by the judge's labels, where human labels decide


def decide_cell(
    effect: Effect, margin: float, pvalue: float, templates: Sequence[Part], what: str = "regression"
) -> tuple[Status, tuple[Reason, ...]]:
    """The rule of one test; ``pvalue`` is one-sided for a drop and adjusted for the family.

    ``templates`` are the totals that the effect is the mean of, a part for each suite.
    """
    call = Call(
        int(
            calls(
                effect.lower,
                effect.upper,
                pvalue,
                clusters=_worth(templates, effect),
                uneven=any(too_large(part.counts, margin) for part in templates),
                shown=parts_show_margin(templates, margin=margin, alpha=effect.alpha),
                margin=margin,
                alpha=effect.alpha,
            )
        )
    )
    reason = _reason(call, effect, margin, templates, what)
    return _STATUS[call], (reason,) if reason else ()


def _reason(call: Call, effect: Effect, margin: float, templates: Sequence[Part], what: str) -> Reason | None:
    """Why a call is not a PASS."""
    detected = f"{what} detected, beyond the margin" if effect.upper < -margin else f"{what} detected, its size open"
    total = "lost everything" if what == "regression" else "gained everything"
    needed = clusters_required(margin, effect.alpha)
    alike = _worth(templates, effect)
    worth = f" of uneven sizes, worth {alike:.1f} of one size," if alike < effect.n_clusters - 0.05 else ""
    pp = f"{100 * margin:g} pp"
    reasons = {
        Call.FAIL: Reason("MARGIN", detected),
        Call.INCONCLUSIVE: Reason("MARGIN", "the interval reaches past the margin"),
        Call.CLUSTERS: Reason(
            "CLUSTERS", f"{effect.n_clusters} clusters{worth} cannot show a {pp} margin; {needed} are needed"
        ),
        Call.UNEVEN: Reason(
            "CLUSTERS",
            f"one template holds more than {50 * margin:g} % of the items, so the others cannot show a {pp} margin",
        ),
        Call.TEMPLATES: Reason(
            TEMPLATES,
            f"the templates that were seen, weighted otherwise, plus one like them that {total}, could come from a "
            f"model with a {what} of {pp}",
        ),
    }
    return reasons.get(call)


def judged(row: FamilyRow, margin: float, pvalues: Pvalues) -> Judged:
    """One test held to its margin; a contrast without a number is INVALID for its own reasons.

    Human labels correct the effect, not the seed variance: the recipe is decided where it agrees with the checkpoints.
    """
    c, what = row.contrast, "regression" if row.sign > 0 else "gain"
    status, reasons, recipe, more, room = Status.INVALID, c.reasons, None, None, 0.0
    if c.effect:
        effect = _toward(c.effect, row.sign)
        status, reasons = decide_cell(effect, margin, pvalues.adjusted, templates_of(c, row.sign), what)
        recipe = _recipe(row, margin, pvalues.recipe)
        more = larger(c, margin, row.sign) if status is Status.INCONCLUSIVE else None
        room = effect.lower + margin
    judge = None
    # ``effect`` is then by human labels, and ``judged`` what the judge's alone gave
    if c.judged:
        judge = judged(by_judge(row), margin, pvalues._replace(adjusted=pvalues.judge)).status
        if c.people and c.people.unseen and status is not Status.FAIL:  # more templates would not help, labels do
            status, reasons, more = Status.INCONCLUSIVE, (_unseen(c.people), *reasons), None
        recipe = None if recipe is None else _agreed(recipe, status)
    return Judged(row, status, recipe, reasons, pvalues.adjusted, pvalues.holm, room, more, judge)


def _recipe(row: FamilyRow, margin: float, pvalue: float) -> Status | None:
    """The test with seed variance added."""
    if row.contrast.recipe is None:
        return None
    effect = _toward(row.contrast.recipe, row.sign)
    return decide_cell(effect, margin, pvalue, templates_of(row.contrast, row.sign))[0]


def _unseen(people: People) -> Reason:
    """A judge that is blind to a template shows no difference there, so people must have seen a pair of every one."""
    return Reason(
        LABELS,
        f"in {people.unseen} of {people.templates} templates nobody looked at a pair that the judge calls equal: label "
        f"{people.unseen} more, one of each (kvaudit grade adjudicate --concordant {people.templates} or more)",
    )


def _agreed(recipe: Status, status: Status) -> Status:
    """The recipe by the judge's labels where human labels say the same of the checkpoints; else it is open."""
    return worst([recipe, status]) if recipe is status or {recipe, status} <= {*PASSED} else Status.INCONCLUSIVE


def templates_of(c: Contrast, sign: int = 1) -> list[Part]:
    """The template totals of a contrast, seen in a mirror for a test of a gain."""
    return [Part(sign * part.weight, part.sums, part.counts) for part in c.sums]


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


def decision(
    cell: GatedCell, alpha: float, adjustment: Adjustment, judge: Callable[[FamilyRow, float], Judged]
) -> Decision:
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
    # one test that more templates would not help leaves the cell without a remedy
    more = [j.larger for j in judged if j.status is Status.INCONCLUSIVE]
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
        larger=max((m for m in more if m), key=[*Larger].index, default=None) if all(more) else None,
        blind_spot=blind_spot(_worth(templates_of(c), c.effect), alpha) if c.effect else None,
        effect=c.effect,
        rates=c.rates,
        worst=c.worst,
        best=c.best,
        template_bound=_template_bound(shown, cell.margin, alpha),
        worst_seed=min(c.by_seed, key=lambda seed: seed.estimate, default=None),
        policies=tuple(row.contrast.policy for row in cell.rows) if cell.estimand == WORST else (),
        statement=_parity(judged, cell.margin) if cell.estimand == PARITY and cell.margin else "",
        judged=worst(j.judge or j.status for j in judged) if any(j.judge for j in judged) else None,
    )


def _template_bound(shown: Judged, margin: float | None, alpha: float) -> float | None:
    """What the template rule leaves open in the test's own direction; nothing where the interval leaves more."""
    c, sign = shown.row.contrast, shown.row.sign
    if c.effect is None or margin is None or _toward(c.effect, sign).lower <= -margin:
        return None
    return template_bound(templates_of(c, sign), alpha=alpha)


def _worth(templates: Sequence[Part], effect: Effect) -> float:
    """The templates of an effect, fewer where sizes are uneven; of several suites the fewest."""
    return min((effective_clusters(part.counts) for part in templates), default=effect.n_clusters)


def _parity(judged: Sequence[Judged], margin: float) -> str:
    """The statement of parity: both sides within the margin, or which side is not shown."""
    sides = {"non-inferior": judged[0].status, "non-superior": judged[1].status}
    shown = [f"{word}: {'shown' if s in PASSED else s.value}" for word, s in sides.items()]
    return f"parity within {100 * margin:g} pp, " + ", ".join(shown)


def by_judge(row: FamilyRow) -> FamilyRow:
    """The test on the judge's labels alone."""
    c = row.contrast
    return FamilyRow(replace(c, effect=c.judged, sums=c.judged_sums, judged=None), row.sign) if c.judged else row
