"""The decision of one cell (one arm under one policy on one suite at one length) by its own tests.

A test asks whether the loss lies within a margin in points, or within a ratio of the reference's rate. In a run in
rounds, which is tested between rounds (at looks), the bounds are those of ``stats.betting``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvaudit.core.facets import PARITY, WORST
from kvaudit.reports.stats.betting import clusters_show
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.rule import (
    Call,
    SuiteTotals,
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
from kvaudit.reports.verdict.chance import larger_run
from kvaudit.reports.verdict.contrast import Contrast, LabelSummary
from kvaudit.reports.verdict.family import HOLM, FamilyRow, GatedCell
from kvaudit.reports.verdict.reasons import Reason, ReasonCode
from kvaudit.reports.verdict.rules import Ratio, ratio_of, templates_show_ratio
from kvaudit.reports.verdict.verdict import (
    PASSED,
    PRECEDENCE,
    Adjustment,
    Decision,
    Larger,
    Status,
    worst,
    worst_recipe,
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
    """The p-values of one test, each adjusted for multiple testing over all gated tests."""

    adjusted: float  # decides
    holm: float  # the same by Holm's method
    recipe: float  # of the training recipe: with the variance between seeds
    judge: float  # by the judge's labels; differs from ``adjusted`` only if human labels decide


@dataclass(frozen=True)
class DecidedTest:
    """One test of a cell (is the loss within the limit?) with its decision."""

    row: FamilyRow
    status: Status
    recipe: Status | None
    reasons: tuple[Reason, ...]
    pvalue: float
    holm: float
    room: float  # lower bound + margin, in score units: below 0 the interval reaches past the margin
    larger: Larger | None
    judge: Status | None = None  # by the judge's labels, where human labels decide
    ratio: Ratio | None = None  # the ratio that the test is held to, if any


_NO_LOOKS = Reason(
    ReasonCode.LABELS,
    "human labels decide nothing of a run in rounds, whose rows ended where the judge's labels had decided: ask a "
    "fixed number of rows and let people label those",
)
_NO_RATIO = Reason(
    ReasonCode.LABELS,
    "people labelled the pairs that the judge graded differently, which does not give the reference's own rate: "
    "human labels cannot show a ratio, declare points in gate.margins",
)


def decide_cell(
    effect: Effect,
    margin: float,
    pvalue: float,
    templates: Sequence[SuiteTotals],
    loss: str = "regression",
    readings: Sequence[Sequence[SuiteTotals]] = (),
) -> tuple[Status, tuple[Reason, ...]]:
    """Return status and reasons of one test against its margin.

    ``pvalue`` is one-sided for a drop and adjusted for multiple testing. ``templates`` holds the differences summed by
    template, one part for each suite; the effect is their mean. ``readings`` holds the same sums for every other way to
    count answers whose grade is uncertain; a PASS needs the margin shown under each. ``loss`` is the word for a drop in
    the reasons.
    """
    call = Call(
        int(
            calls(
                effect.lower,
                effect.upper,
                pvalue,
                clusters=_effective_templates(templates, effect),
                uneven=any(too_uneven(part.counts, margin, effect.alpha) for part in templates),
                shown=all(
                    parts_show_margin(parts, margin=margin, alpha=effect.alpha) for parts in (templates, *readings)
                ),
                margin=margin,
                alpha=effect.alpha,
            )
        )
    )
    points = f"{100 * margin:g} pp"
    text = _RuleText(
        loss=loss,
        limit=f"a {points} margin",
        model=f"a {loss} of {points}",
        past="the interval reaches past the margin",
        is_beyond=effect.upper < -margin,
    )
    return _STATUS[call], _reasons(call, effect, margin, templates, text)


def decide_ratio(c: Contrast, ratio: Ratio, margin: float, pvalue: float) -> tuple[Status, tuple[Reason, ...]]:
    """Return status and reasons of one test against a ratio ("at most 1.1 times as many attacks succeed").

    ``margin`` is the loss that the ratio allows at the reference's rate, in score units. Human labels do not give the
    reference's own rate, so a contrast whose effect is computed from human labels never passes a ratio.
    """
    effect, templates = c.effect, templates_of(c)
    assert effect is not None, "a contrast without a number has no ratio"
    within, limit = ratio.is_within and c.judged is None, f"{ratio.limit:g} x"
    call = Call(
        int(
            calls_of(
                np.array(within),
                np.array(effect.upper < 0 and pvalue < effect.alpha),
                # the margin is 0 if the event never happened with the reference: no number of templates is then enough
                enough=margin > 0
                and _effective_templates(templates, effect) >= clusters_required(margin, effect.alpha) - 1e-9,
                uneven=any(too_uneven(part.counts, margin, effect.alpha) for part in templates),
                shown=within and templates_show_ratio(c, ratio.limit, effect.alpha),
            )
        )
    )
    past = f"the interval of the ratio reaches {ratio.times.upper:.3g} x, past {limit}"
    if ratio.times.estimate is None:
        past = "nothing of it happened with the reference, and a multiple of nothing cannot be shown: declare points"
    text = _RuleText(
        loss="regression",
        limit=f"{limit} (of the reference's rate, so {100 * margin:.1f} pp)",
        model=f"{limit} as much of it",
        past=past,
        is_beyond=ratio.times.lower > ratio.limit,
    )
    return _STATUS[call], _reasons(call, effect, margin, templates, text)


def unadjusted_status(c: Contrast, margin: float, *, is_measurable: bool) -> Status:
    """Return the status that a contrast would have as a cell of its own, without adjustment for multiple testing.

    A contrast whose effect could not be computed is INVALID. Without ``is_measurable`` (the reference has nothing to
    lose) only a FAIL stays, and everything else is NOT MEASURABLE.
    """
    if c.effect is None:
        return Status.INVALID
    status = decide_cell(c.effect, margin, c.effect.pvalue_drop, templates_of(c), readings=readings_of(c))[0]
    return status if is_measurable or status is Status.FAIL else Status.NOT_MEASURABLE


class _RuleText(NamedTuple):
    """The phrases from which the reason of one test is written."""

    loss: str  # regression, or gain
    limit: str  # the margin or ratio
    model: str  # a model that is exactly at the limit
    past: str  # an interval that reaches past the limit
    is_beyond: bool  # whether the shown loss is beyond the limit


def _reasons(
    call: Call, effect: Effect, margin: float, templates: Sequence[SuiteTotals], text: _RuleText
) -> tuple[Reason, ...]:
    """Return why the rule's outcome ``call`` is not a PASS, as a tuple of one Reason; for a PASS it is empty."""
    if call is Call.FAIL:
        size = "beyond the margin" if text.is_beyond else "its size open"
        return (Reason(ReasonCode.LOSS, f"{text.loss} detected, {size}"),)
    if call is Call.INCONCLUSIVE:
        return (Reason(ReasonCode.MARGIN, text.past),)
    if call is Call.CLUSTERS:
        return (Reason(ReasonCode.CLUSTERS, _too_few_templates(effect, margin, templates, text.limit)),)
    if call is Call.UNEVEN:
        large = _largest_templates(templates, margin)
        return (Reason(ReasonCode.CLUSTERS, f"{large}, so the others cannot show {text.limit}"),)
    if call is Call.TEMPLATES:
        total = "lost everything" if text.loss == "regression" else "gained everything"
        weighted = f"the templates that were seen, weighted otherwise, plus one like them that {total},"
        return (Reason(ReasonCode.TEMPLATES, f"{weighted} could come from a model with {text.model}"),)
    return ()


def _too_few_templates(effect: Effect, margin: float, templates: Sequence[SuiteTotals], limit: str) -> str:
    if margin <= 0:
        return f"no number of clusters can show {limit}"
    effective = _effective_templates(templates, effect)
    worth = f" of uneven sizes, worth {effective:.1f} of one size," if effective < effect.n_clusters - 0.05 else ""
    needed = clusters_required(margin, effect.alpha)
    return f"{effect.n_clusters} clusters{worth} cannot show {limit}; {needed} are needed"


def _largest_templates(templates: Sequence[SuiteTotals], margin: float) -> str:
    """Return a phrase that says which templates are so large that a loss of the margin could hide in them."""
    if any(too_large(part.counts, margin) for part in templates):
        return f"one template holds more than {50 * margin:g} % of the items"
    largest = max((largest_alone(part.counts, margin) for part in templates), key=lambda group: group.unseen)
    return (
        f"the {largest.number} largest templates hold {100 * largest.share:.0f} % of the items and could, if only they "
        f"break, lose the margin unseen in {100 * largest.unseen:.1f} % of audits"
    )


def decided_test(row: FamilyRow, margin: float, pvalues: Pvalues, limit: float | None = None) -> DecidedTest:
    """Return one test with its decision, against its margin, or against a ratio if ``limit`` is given.

    With a ratio, ``margin`` is the loss that ``limit`` allows. A test whose effect could not be computed is INVALID.
    The recipe is the claim about training with any seed. Human labels correct the effect, but not the variance between
    seeds. So if there are human labels, the recipe keeps its status only if it agrees with that of the checkpoints;
    otherwise it is INCONCLUSIVE.
    """
    c, loss = row.contrast, "regression" if row.sign > 0 else "gain"
    if c.look is not None and c.effect is not None:
        return _test_in_rounds(row, c.effect, margin)
    ratio = None if limit is None else ratio_of(c, limit)
    status, reasons, recipe, more, room = Status.INVALID, c.reasons, None, None, 0.0
    if c.effect:
        effect = _mirrored(c.effect, row.sign)
        recipe, room = _recipe(row, margin, pvalues.recipe), effect.lower + margin
        if ratio is None:
            status, reasons = decide_cell(
                effect, margin, pvalues.adjusted, templates_of(c, row.sign), loss, readings_of(c, row.sign)
            )
        else:
            status, reasons = decide_ratio(c, ratio, margin, pvalues.adjusted)
            # seed variance is known in points only
            recipe = None if recipe is None else _status_if_agreed(recipe, status)
        more = larger_run(c, margin, row.sign, limit) if status is Status.INCONCLUSIVE else None
    judge = None
    if c.judged:  # ``effect`` is then by human labels, and ``judged`` by the judge's
        judge = decided_test(by_judge(row), margin, pvalues._replace(adjusted=pvalues.judge), limit).status
        if ratio is not None and status is not Status.FAIL:
            reasons, more = (_NO_RATIO,), None
        if c.people and c.people.unseen and status is not Status.FAIL:  # more labels would help, more templates not
            status, reasons, more = Status.INCONCLUSIVE, (_ask_for_labels(c.people), *reasons), None
        recipe = None if recipe is None else _status_if_agreed(recipe, status)
    return DecidedTest(row, status, recipe, reasons, pvalues.adjusted, pvalues.holm, room, more, judge, ratio)


def _test_in_rounds(row: FamilyRow, effect: Effect, margin: float) -> DecidedTest:
    """Decide a test of a run in rounds by its bounds, which hold at every look (test between rounds).

    The p-value is multiplied by the number of gated tests (Bonferroni), and not adjusted further.
    """
    status: Status = Status.INCONCLUSIVE
    prefix = "a loss is shown, and whether" if effect.upper < 0 else "whether"
    undecided = f"{prefix} it exceeds {100 * margin:g} pp is open after {effect.n_clusters} rows"
    reasons: tuple[Reason, ...] = (Reason(ReasonCode.MARGIN, undecided),)
    if row.contrast.judged is not None:  # the judge's labels decided how many rows there are
        reasons = (_NO_LOOKS,)
    elif effect.lower > -margin and all(
        clusters_show(part.sums / part.counts, margin, effect.alpha)
        for parts in (templates_of(row.contrast), *readings_of(row.contrast))
        for part in parts
    ):
        status, reasons = (Status.PASS_NOTED if effect.upper < 0 else Status.PASS), ()
    elif effect.upper < -margin:
        status, reasons = Status.FAIL, (Reason(ReasonCode.LOSS, "a loss beyond the margin is shown"),)
    pvalue = min(1.0, effect.pvalue_drop * (row.contrast.look.tests if row.contrast.look else 1))
    return DecidedTest(row, status, None, reasons, pvalue, pvalue, effect.lower + margin, None)


def _recipe(row: FamilyRow, margin: float, pvalue: float) -> Status | None:
    """Return the status of the test for the training recipe (variance between seeds added); None for too few seeds."""
    if row.contrast.recipe is None:
        return None
    effect = _mirrored(row.contrast.recipe, row.sign)
    if margin <= 0:  # a ratio that allows nothing at this rate: nothing can pass
        return Status.FAIL if effect.upper < 0 and pvalue < effect.alpha else Status.INCONCLUSIVE
    c = row.contrast
    return decide_cell(effect, margin, pvalue, templates_of(c, row.sign), readings=readings_of(c, row.sign))[0]


def _ask_for_labels(people: LabelSummary) -> Reason:
    """Return a reason that asks people to label at least one pair in every template.

    A pair is the two answers of reference and candidate to one item. A judge that does not notice how the answers to a
    template changed grades both answers of each pair alike, so only human labels can show its errors.
    """
    return Reason(
        ReasonCode.LABELS,
        f"in {people.unseen} of {people.templates} templates no pair that the judge graded alike has a label: label "
        f"{people.unseen} more, one of each (kvaudit grade adjudicate --concordant {people.templates} or more)",
    )


def _status_if_agreed(recipe: Status, status: Status) -> Status:
    """Return the status of the training recipe if that of the checkpoints agrees with it, else INCONCLUSIVE."""
    return worst([recipe, status]) if recipe is status or {recipe, status} <= {*PASSED} else Status.INCONCLUSIVE


def templates_of(c: Contrast, sign: int = 1) -> list[SuiteTotals]:
    """Return a contrast's differences by template, one part for each suite; ``sign`` -1 exchanges loss and gain."""
    return [SuiteTotals(sign * part.weight, part.sums, part.counts) for part in c.sums]


def readings_of(c: Contrast, sign: int = 1) -> list[list[SuiteTotals]]:
    """Return a contrast's differences by template, once for every other way to count its uncertain answers.

    An answer is uncertain if the judge was unsure of it, or if it has no score; the contrast itself counts it in one
    way. The list is empty if human labels decide. ``sign`` -1 exchanges loss and gain.
    """
    readings = () if c.judged else c.readings
    return [[SuiteTotals(sign * part.weight, part.sums, part.counts) for part in sums] for sums in readings]


def _mirrored(effect: Effect, sign: int) -> Effect:
    """Return the effect as a test needs it: with ``sign`` -1, a test for a gain, loss and gain are exchanged."""
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
    cell: GatedCell,
    alpha: float,
    adjustment: Adjustment,
    decide_test: Callable[[FamilyRow, float, float | None], DecidedTest],
) -> Decision:
    """Return the decision of a cell: it passes if all its tests do, and shows the numbers of the worst test.

    ``decide_test`` decides one test, from its row, margin and limit on a ratio (or None).
    """
    suite = cell.rows[0].contrast.suite
    if cell.margin is None and cell.ratio is None:
        missing = Reason(ReasonCode.NO_MARGIN, f"no margin declared for suite {suite!r}; add it to gate.margins")
        tests = [
            DecidedTest(row, Status.INVALID, None, (*row.contrast.reasons, missing), 1, 1, 0, None) for row in cell.rows
        ]
    else:
        tests = [decide_test(row, cell.margin_of(row) or 0.0, cell.ratio) for row in cell.rows]
    worst_test = min(tests, key=lambda test: (PRECEDENCE.index(test.status), test.room))
    # if more templates would not help one of the tests, they would not decide the cell
    more = [test.larger for test in tests if test.status is Status.INCONCLUSIVE]
    c, margin = worst_test.row.contrast, cell.margin_of(worst_test.row)
    return Decision(
        estimand=cell.estimand,
        arm=c.arm,
        policy=c.policy,
        suite=c.suite,
        context_tokens=c.context_tokens,
        gated=cell.gated,
        status=worst_test.status,
        recipe=worst_recipe([test.recipe for test in tests]),
        reasons=worst_test.reasons,
        margin=margin,
        pvalue_drop=worst_test.pvalue if c.effect else None,
        pvalue_holm=worst_test.holm if c.effect else None,
        adjusted_by="Bonferroni" if c.look else HOLM if c.judged else adjustment.method,
        pvalue_floor=0.0 if c.judged else adjustment.floor,
        clusters_required=clusters_required(margin, alpha) if margin else None,
        larger=max((m for m in more if m), key=[*Larger].index, default=None) if all(more) else None,
        blind_spot=blind_spot(_effective_templates(templates_of(c), c.effect), alpha) if c.effect else None,
        effect=c.effect,
        rates=c.rates,
        worst=c.worst,
        best=c.best,
        template_bound=None if cell.ratio else _template_bound(worst_test, margin, alpha),
        worst_seed=min(c.by_seed, key=lambda seed: seed.estimate, default=None),
        policies=tuple(row.contrast.policy for row in cell.rows) if cell.estimand == WORST else (),
        statement=_parity(tests, cell.margin) if cell.estimand == PARITY and cell.margin else "",
        judged=worst(test.judge or test.status for test in tests) if any(test.judge for test in tests) else None,
        ratio=worst_test.ratio,
    )


def _template_bound(test: DecidedTest, margin: float | None, alpha: float) -> float | None:
    """Return the lowest drift that could still hide in a few broken templates (the template rule, ``stats.rule``).

    It is None if there is no effect or no margin, for a run in rounds, and if the interval reaches the margin already.
    """
    c, sign = test.row.contrast, test.row.sign
    if c.effect is None or c.look or margin is None or _mirrored(c.effect, sign).lower <= -margin:
        return None
    return min(template_bound(parts, alpha=alpha) for parts in (templates_of(c, sign), *readings_of(c, sign)))


def _effective_templates(templates: Sequence[SuiteTotals], effect: Effect) -> float:
    """Return the effective number of templates: how many templates of equal size would show as much.

    If the test is over several suites, the number of the suite with the fewest is returned.
    """
    return min((effective_clusters(part.counts) for part in templates), default=effect.n_clusters)


def _parity(tests: Sequence[DecidedTest], margin: float) -> str:
    """Return a phrase on whether the test for a drop and the one for a gain are both within the margin."""
    sides = {"non-inferior": tests[0].status, "non-superior": tests[1].status}
    phrases = [f"{word}: {'shown' if s in PASSED else s.value}" for word, s in sides.items()]
    return f"parity within {100 * margin:g} pp, " + ", ".join(phrases)


def by_judge(row: FamilyRow) -> FamilyRow:
    """Return the test with the effect by the judge's labels if human labels decide it; any other test unchanged."""
    c = row.contrast
    return FamilyRow(replace(c, effect=c.judged, sums=c.judged_sums, judged=None), row.sign) if c.judged else row
