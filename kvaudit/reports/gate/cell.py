"""One cell decided: the rule of a test, and what a cell of several tests says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvaudit.core.estimands import PARITY, WORST
from kvaudit.reports.verdict.comparison import Reason
from kvaudit.reports.verdict.contrast import Contrast, LabelSummary
from kvaudit.reports.verdict.chance import larger
from kvaudit.reports.verdict.family import (
    HOLM,
    FamilyRow,
    GatedCell,
)
from kvaudit.reports.verdict.ratios import Ratio, ratio_of, templates_show
from kvaudit.reports.verdict.verdict import (
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
from kvaudit.reports.stats.betting import clusters_show
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.rule import (
    Call,
    Part,
    blind_spot,
    calls,
    calls_of,
    clusters_required,
    effective_clusters,
    largest_alone,
    parts_show_margin,
    template_bound,
    too_large,
    too_uneven,
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
    """One test of a cell, decided; ``ratio`` where it is held to one."""

    row: FamilyRow
    status: Status
    recipe: Status | None
    reasons: tuple[Reason, ...]
    pvalue: float
    holm: float
    room: float  # from the margin up to the lower bound, in score units; below 0 it reaches past
    larger: Larger | None
    judge: Status | None = None  # by the judge's labels, where human labels decide
    ratio: Ratio | None = None


_StatusWhy = tuple[Status, tuple[Reason, ...]]
_NO_LOOKS = Reason(
    LABELS,
    "human labels decide nothing of a run in rounds, whose rows ended where the judge's labels had decided: ask a "
    "fixed number of rows and let people label those",
)
_NO_RATIO = Reason(
    LABELS,
    "people labelled pairs that the judge tells apart, which says nothing of the reference's own rate: their labels "
    "show no ratio, declare points in gate.margins",
)


def decide_cell(
    effect: Effect,
    margin: float,
    pvalue: float,
    templates: Sequence[Part],
    what: str = "regression",
    readings: Sequence[Sequence[Part]] = (),
) -> _StatusWhy:
    """The rule of one test; ``pvalue`` is one-sided for a drop and adjusted for the family.

    ``templates`` are the totals that the effect is the mean of, a part for each suite; they have to show it under every
    one of the ``readings`` of what is not known too.
    """
    call = Call(
        int(
            calls(
                effect.lower,
                effect.upper,
                pvalue,
                clusters=_worth(templates, effect),
                uneven=any(too_uneven(part.counts, margin, effect.alpha) for part in templates),
                shown=all(parts_show_margin(own, margin=margin, alpha=effect.alpha) for own in (templates, *readings)),
                margin=margin,
                alpha=effect.alpha,
            )
        )
    )
    points = f"{100 * margin:g} pp"
    past = "the interval reaches past the margin"
    said = _Said(what, f"a {points} margin", f"a {what} of {points}", past, effect.upper < -margin)
    return _STATUS[call], _reasons(call, effect, margin, templates, said)


def decide_ratio(c: Contrast, ratio: Ratio, margin: float, pvalue: float) -> _StatusWhy:
    """The rule of a test that is held to a ratio; ``margin`` is what that allows in score units.

    Human labels say nothing of the reference's own rate, so nothing is within a ratio by them.
    """
    effect, templates = c.effect, templates_of(c)
    assert effect is not None, "a contrast without a number has no ratio"
    within, most = ratio.is_within and c.judged is None, f"{ratio.limit:g} x"
    call = Call(
        int(
            calls_of(
                np.array(within),
                np.array(effect.upper < 0 and pvalue < effect.alpha),
                # a margin of 0: nothing of it happened with the reference, and no number of templates is enough
                enough=margin > 0 and _worth(templates, effect) >= clusters_required(margin, effect.alpha) - 1e-9,
                uneven=any(too_uneven(part.counts, margin, effect.alpha) for part in templates),
                shown=within and templates_show(c, ratio.limit, effect.alpha),
            )
        )
    )
    past = f"the interval of the ratio reaches {ratio.times.upper:.3g} x, past {most}"
    if ratio.times.estimate is None:
        past = "nothing of it happened with the reference, and a multiple of nothing cannot be shown: declare points"
    limit = f"{most} (of the reference's rate, so {100 * margin:.1f} pp)"
    said = _Said("regression", limit, f"{most} as much of it", past, ratio.times.lower > ratio.limit)
    return _STATUS[call], _reasons(call, effect, margin, templates, said)


class _Said(NamedTuple):
    """The words of a test: what is lost, its limit, a model at it, an interval past it; whether a drop is beyond it."""

    what: str
    limit: str
    model: str
    past: str
    beyond: bool


def _reasons(call: Call, effect: Effect, margin: float, templates: Sequence[Part], said: _Said) -> tuple[Reason, ...]:
    """Why a call is not a PASS."""
    size = "beyond the margin" if said.beyond else "its size open"
    total = "lost everything" if said.what == "regression" else "gained everything"
    alike = _worth(templates, effect)
    worth = f" of uneven sizes, worth {alike:.1f} of one size," if alike < effect.n_clusters - 0.05 else ""
    few = f"no number of clusters can show {said.limit}"  # a margin of 0
    if margin > 0:
        needed = clusters_required(margin, effect.alpha)
        few = f"{effect.n_clusters} clusters{worth} cannot show {said.limit}; {needed} are needed"
    uneven = _uneven(templates, margin) if call is Call.UNEVEN else ""
    reasons = {
        Call.FAIL: Reason("MARGIN", f"{said.what} detected, {size}"),
        Call.INCONCLUSIVE: Reason("MARGIN", said.past),
        Call.CLUSTERS: Reason("CLUSTERS", few),
        Call.UNEVEN: Reason("CLUSTERS", f"{uneven}, so the others cannot show {said.limit}"),
        Call.TEMPLATES: Reason(
            TEMPLATES,
            f"the templates that were seen, weighted otherwise, plus one like them that {total}, could come from a "
            f"model with {said.model}",
        ),
    }
    return (reasons[call],) if call in reasons else ()


def _uneven(templates: Sequence[Part], margin: float) -> str:
    """Which templates are too large."""
    if any(too_large(part.counts, margin) for part in templates):
        return f"one template holds more than {50 * margin:g} % of the items"
    own = max((largest_alone(part.counts, margin) for part in templates), key=lambda found: found.unseen)
    return (
        f"the {own.number} largest templates hold {100 * own.share:.0f} % of the items and could, if only they break, "
        f"lose the margin unseen in {100 * own.unseen:.1f} % of audits"
    )


def judged(row: FamilyRow, margin: float, pvalues: Pvalues, limit: float | None = None) -> Judged:
    """One test held to its margin; a contrast without a number is INVALID for its own reasons.

    With a ``limit`` of the ratio ``margin`` is what that allows in score units. Human labels correct the effect, not
    the seed variance: the recipe is decided where it agrees with the checkpoints.
    """
    c, what = row.contrast, "regression" if row.sign > 0 else "gain"
    if c.looked is not None and c.effect is not None:
        return _looked_at(row, c.effect, margin)
    ratio = None if limit is None else ratio_of(c, limit)
    status, reasons, recipe, more, room = Status.INVALID, c.reasons, None, None, 0.0
    if c.effect:
        effect = _toward(c.effect, row.sign)
        recipe, room = _recipe(row, margin, pvalues.recipe), effect.lower + margin
        if ratio is None:
            status, reasons = decide_cell(
                effect, margin, pvalues.adjusted, templates_of(c, row.sign), what, readings_of(c, row.sign)
            )
        else:
            status, reasons = decide_ratio(c, ratio, margin, pvalues.adjusted)
            recipe = None if recipe is None else _agreed(recipe, status)  # seed variance is added to the points
        more = larger(c, margin, row.sign, limit) if status is Status.INCONCLUSIVE else None
    judge = None
    # ``effect`` is then by human labels, and ``judged`` what the judge's alone gave
    if c.judged:
        judge = judged(by_judge(row), margin, pvalues._replace(adjusted=pvalues.judge), limit).status
        if ratio is not None and status is not Status.FAIL:
            reasons, more = (_NO_RATIO,), None
        if c.people and c.people.unseen and status is not Status.FAIL:  # more templates would not help, labels do
            status, reasons, more = Status.INCONCLUSIVE, (_unseen(c.people), *reasons), None
        recipe = None if recipe is None else _agreed(recipe, status)
    return Judged(row, status, recipe, reasons, pvalues.adjusted, pvalues.holm, room, more, judge, ratio)


def _looked_at(row: FamilyRow, effect: Effect, margin: float) -> Judged:
    """One test of a run in rounds: a loss of the margin is ruled out, or shown, by bounds that hold at every look.

    Every test has its own share of the level already, so no p-value is adjusted.
    """
    status: Status = Status.INCONCLUSIVE
    reasons: tuple[Reason, ...] = (Reason("MARGIN", _open_at(effect, margin)),)
    if row.contrast.judged is not None:  # of a sample whose size follows from the judge's labels
        reasons = (_NO_LOOKS,)
    elif effect.lower > -margin and all(
        clusters_show(part.sums / part.counts, margin, effect.alpha)
        for parts in (templates_of(row.contrast), *readings_of(row.contrast))
        for part in parts
    ):
        status, reasons = (Status.PASS_NOTED if effect.upper < 0 else Status.PASS), ()
    elif effect.upper < -margin:
        status, reasons = Status.FAIL, (Reason("MARGIN", "a loss beyond the margin is shown"),)
    pvalue = min(1.0, effect.pvalue_drop * (row.contrast.looked.tests if row.contrast.looked else 1))
    return Judged(row, status, None, reasons, pvalue, pvalue, effect.lower + margin, None)


def _open_at(effect: Effect, margin: float) -> str:
    """What the rows that were asked leave open."""
    shown = "a loss is shown, and whether" if effect.upper < 0 else "whether"
    return f"{shown} it exceeds {100 * margin:g} pp is open after {effect.n_clusters} rows"


def _recipe(row: FamilyRow, margin: float, pvalue: float) -> Status | None:
    """The test with seed variance added."""
    if row.contrast.recipe is None:
        return None
    effect = _toward(row.contrast.recipe, row.sign)
    if margin <= 0:  # of a ratio that allows nothing at this rate: nothing can pass
        return Status.FAIL if effect.upper < 0 and pvalue < effect.alpha else Status.INCONCLUSIVE
    c = row.contrast
    return decide_cell(effect, margin, pvalue, templates_of(c, row.sign), readings=readings_of(c, row.sign))[0]


def _unseen(people: LabelSummary) -> Reason:
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


def readings_of(c: Contrast, sign: int = 1) -> list[list[Part]]:
    """The same under every reading of what is not known; human labels leave nothing of that."""
    every = () if c.judged else c.readings
    return [[Part(sign * part.weight, part.sums, part.counts) for part in sums] for sums in every]


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
    cell: GatedCell, alpha: float, adjustment: Adjustment, judge: Callable[[FamilyRow, float, float | None], Judged]
) -> Decision:
    """A cell passes when all its tests do; the worst of them is the one that is shown."""
    first = cell.rows[0].contrast
    if cell.margin is None and cell.ratio is None:
        missing = Reason("NOMARGIN", f"no margin declared for suite {first.suite!r}; add it to gate.margins")
        judged = [
            Judged(row, Status.INVALID, None, (*row.contrast.reasons, missing), 1, 1, 0, None) for row in cell.rows
        ]
    else:
        judged = [judge(row, cell.margin_of(row) or 0.0, cell.ratio) for row in cell.rows]
    # of tests that stand alike the one with the least room
    shown = min(judged, key=lambda j: (PRECEDENCE.index(j.status), j.room))
    # one test that more templates would not help leaves the cell without a remedy
    more = [j.larger for j in judged if j.status is Status.INCONCLUSIVE]
    c, margin = shown.row.contrast, cell.margin_of(shown.row)
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
        margin=margin,
        pvalue_drop=shown.pvalue if c.effect else None,
        pvalue_holm=shown.holm if c.effect else None,
        adjusted_by="Bonferroni" if c.looked else HOLM if c.judged else adjustment.method,
        pvalue_floor=0.0 if c.judged else adjustment.floor,
        clusters_required=clusters_required(margin, alpha) if margin else None,
        larger=max((m for m in more if m), key=[*Larger].index, default=None) if all(more) else None,
        blind_spot=blind_spot(_worth(templates_of(c), c.effect), alpha) if c.effect else None,
        effect=c.effect,
        rates=c.rates,
        worst=c.worst,
        best=c.best,
        template_bound=None if cell.ratio else _template_bound(shown, margin, alpha),
        worst_seed=min(c.by_seed, key=lambda seed: seed.estimate, default=None),
        policies=tuple(row.contrast.policy for row in cell.rows) if cell.estimand == WORST else (),
        statement=_parity(judged, cell.margin) if cell.estimand == PARITY and cell.margin else "",
        judged=worst(j.judge or j.status for j in judged) if any(j.judge for j in judged) else None,
        ratio=shown.ratio,
    )


def _template_bound(shown: Judged, margin: float | None, alpha: float) -> float | None:
    """What the template rule leaves open in the test's own direction; nothing where the interval leaves more."""
    c, sign = shown.row.contrast, shown.row.sign
    if c.effect is None or c.looked or margin is None or _toward(c.effect, sign).lower <= -margin:
        return None
    return min(template_bound(own, alpha=alpha) for own in (templates_of(c, sign), *readings_of(c, sign)))


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
