"""What can change the decision of a cell after its own test, in this order.

Each check gives a reason or None, and each has the status that its reason leads to:

    FAIL             a training seed fails by itself (only where the gate asks for ``worst_seed``)
    NOT MEASURABLE   the reference has nothing to lose, unless a loss is shown all the same
    INCONCLUSIVE     what would PASS cannot: a biased judge, unnamed clusters, broken form, and under profile
                     ``release`` a judge that gave the reward, or phrase rules alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvaudit.core.facets import WELL_FORMED, facet_of, suite_of
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast, Drift, SeedDrift, judge_may_pass
from kvaudit.reports.verdict.controls import Controls
from kvaudit.reports.verdict.family import FamilyRow, GatedCell, joint_family
from kvaudit.reports.verdict.reasons import Reason, ReasonCode
from kvaudit.reports.verdict.rules import RELEASE, Rules
from kvaudit.reports.verdict.verdict import PASSED, Decision, Status, worst

_SHOWN = (Status.INVALID, Status.FAIL)  # these stand whatever the reference can show


@dataclass(frozen=True)
class DowngradeContext:
    """What the checks look at beside the cell itself; ``gated_cells`` are those of the verdict."""

    drift: Drift
    rules: Rules
    gated_cells: Sequence[GatedCell]
    controls: Controls
    biased: Sequence[JudgeBias]
    failing_seeds: Mapping[int, Sequence[SeedDrift]]  # by the index of the gated cell


class Downgrade(NamedTuple):
    """A check, and the status that its reason leads to."""

    status: Status
    check: Callable[[GatedCell, DowngradeContext], Reason | None]


def downgraded(
    decision: Decision, cell: GatedCell, context: DowngradeContext, downgrades: Sequence[Downgrade]
) -> Decision:
    """Return the decision after these downgrades, each of which sees what the ones before it left."""
    for status, check in downgrades:
        if (reason := check(cell, context)) is not None:
            decision = _CHANGES[status](decision, reason)
    return decision


def _fail(d: Decision, reason: Reason) -> Decision:
    """A recipe that makes a failing seed cannot pass either."""
    if d.status is Status.INVALID:
        return d
    recipe, judged = (None if status is None else worst([status, Status.FAIL]) for status in (d.recipe, d.judged))
    return replace(d, status=Status.FAIL, recipe=recipe, judged=judged, reasons=(reason, *d.reasons))


def _not_measurable(d: Decision, reason: Reason) -> Decision:
    if d.status in _SHOWN:
        return d
    recipe, judged = (s if s is None or s in _SHOWN else Status.NOT_MEASURABLE for s in (d.recipe, d.judged))
    reasons = (reason, *d.reasons)
    return replace(d, status=Status.NOT_MEASURABLE, recipe=recipe, judged=judged, reasons=reasons, larger=None)


def _inconclusive(d: Decision, reason: Reason) -> Decision:
    """Only a PASS is held back, of the checkpoints or of the recipe."""
    if d.status not in PASSED and d.recipe not in PASSED:
        return d
    recipe = None if d.recipe is None else worst([d.recipe, Status.INCONCLUSIVE])
    if d.status not in PASSED:
        return replace(d, recipe=recipe)
    return replace(d, status=Status.INCONCLUSIVE, recipe=recipe, reasons=(reason, *d.reasons), larger=None)


_CHANGES = {Status.FAIL: _fail, Status.NOT_MEASURABLE: _not_measurable, Status.INCONCLUSIVE: _inconclusive}


# --- a training seed that fails by itself -----------------------------------------------------------------------------


def failing_seed(cell: GatedCell, context: DowngradeContext) -> Reason | None:
    """Name the training seeds that fail by themselves.

    A drift averaged over seeds passes a training that breaks one run in three (losses of 9, 0 and 0 pp average to 3).
    """
    index = next((i for i, gated in enumerate(context.gated_cells) if gated is cell), None)
    seeds = () if index is None else context.failing_seeds.get(index, ())
    if not seeds:
        return None
    named = ", ".join(f"{s.seed} ({100 * s.estimate:+.1f} pp)" for s in {s.seed: s for s in seeds}.values())
    return Reason(ReasonCode.SEED, f"fails by itself: seed {named}")


class _SeedTest(NamedTuple):
    """The test of a cell on the answers of one training seed."""

    row: FamilyRow
    seed: SeedDrift


def failing_seeds(cells: Sequence[GatedCell], alpha: float) -> dict[int, list[SeedDrift]]:
    """Return the training seeds that fail by themselves, by the index of their cell.

    A seed fails when its estimate is past the margin, its own ESS-Tango bounds lie below 0, and the drop holds for the
    family of every seed of every gated cell (max-T). So without drift an audit fails for a seed no more often than the
    level says, however many seeds and cells there are. The estimate itself has to be past the margin, because a seed
    has a third of the answers: its interval is rarely within the margin, and most drops that are seen would fail.
    Nobody labels single seeds, so the judge's labels decide here even where human labels decide the cell.
    """
    # a test that several cells share counts once in the family
    tests = {(id(row.contrast), row.sign, test.seed.seed): test for row, test in _seed_tests(cells)}
    family = joint_family([test.row for test in tests.values()])
    pvalues = dict(zip(tests, family.pvalues, strict=True))
    failing: dict[int, list[SeedDrift]] = {}
    for index, cell in enumerate(cells):
        for row, test in _seed_tests([cell]):
            pvalue, margin = pvalues[id(row.contrast), row.sign, test.seed.seed], cell.margin_of(row)
            if pvalue < alpha and margin is not None and _is_past(test.seed, row.sign, margin):
                failing.setdefault(index, []).append(test.seed)
    return failing


def _seed_tests(cells: Sequence[GatedCell]) -> Iterator[tuple[FamilyRow, _SeedTest]]:
    for row in (row for cell in cells for row in cell.rows):
        c = row.contrast
        for seed, sums in zip(c.by_seed, c.seed_sums, strict=True):
            assert c.effect is not None, "a cell without a number has no seeds"
            effect = replace(c.effect, estimate=seed.estimate, pvalue_drop=seed.pvalue_drop)
            yield row, _SeedTest(FamilyRow(replace(c, effect=effect, sums=sums, readings=()), row.sign), seed)


def _is_past(seed: SeedDrift, sign: int, margin: float) -> bool:
    """Whether a seed lost (in a test for a gain: gained) more than the margin, with bounds that leave out 0."""
    estimate, upper = (seed.estimate, seed.upper) if sign > 0 else (-seed.estimate, -seed.lower)
    return estimate <= -margin and upper < 0


# --- a reference that cannot be measured ------------------------------------------------------------------------------


def unmeasurable_reference(cell: GatedCell, context: DowngradeContext) -> Reason | None:
    """Say why the reference of one of the cell's tests has nothing to lose."""
    controls = (context.controls.against(row.contrast) for row in cell.rows)
    control = next((control for control in controls if control is not None), None)
    return None if control is None else control.reason


# --- what a PASS needs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgeBias:
    """A contrast in which the judge alone could have made more than half the margin; ``upper`` is that much."""

    contrast: Contrast
    upper: float


def judge_biases(cells: Sequence[GatedCell]) -> list[JudgeBias]:
    """Return the contrasts, among those whose answers people labelled, in which the judge may be biased."""
    # worst and parity are made of contrasts that are cells themselves
    firsts = [(cell, cell.rows[0]) for cell in cells if cell.estimand == cell.rows[0].contrast.estimand]
    labelled = [(row.contrast, cell.margin_of(row)) for cell, row in firsts]
    return [
        JudgeBias(c, c.people.bias_upper)
        for c, margin in labelled
        if c.people and margin and not judge_may_pass(c.people, margin)
    ]


def biased_judge(cell: GatedCell, context: DowngradeContext) -> Reason | None:
    """Say how much a judge that is biased on the same answers may have made up; human labels need no judge."""
    contrasts = [row.contrast for row in cell.rows if row.contrast.judged is None]
    upper = [bias.upper for bias in context.biased if any(_same_answers(bias.contrast, c) for c in contrasts)]
    if not upper:
        return None
    text = f"judge labels alone cannot pass: the judge may have made up to {100 * max(upper):.1f} pp"
    return Reason(ReasonCode.JUDGE_DIFF, text)


def _same_answers(labelled: Contrast, c: Contrast) -> bool:
    suites = {part.suite for part in c.sums} or {c.suite}
    places = ((one.arm, one.policy, one.context_tokens) for one in (labelled, c))
    return len({*places}) == 1 and labelled.suite in suites


def unnamed_clusters(_: GatedCell, context: DowngradeContext) -> Reason | None:
    """Say that nothing names clusters, unless the gate declares that items are independent."""
    return None if context.rules.items_are_independent else context.drift.unclustered


def broken_form(cell: GatedCell, context: DowngradeContext) -> Reason | None:
    """Say that many more answers may have lost their form, which a facet does not see."""
    drift = context.drift
    for row in cell.rows:
        c, margin = row.contrast, cell.margin_of(row)
        suite, _, facet = c.suite.rpartition(".")
        if c.suite not in drift.comparison.facets or facet == WELL_FORMED or margin is None:
            continue
        place = replace(c.name, suite=f"{suite}.{WELL_FORMED}").place
        form = next((other for other in drift.contrasts if other.place == place), None)
        if form is None or form.effect is None or form.rates is None:
            return Reason(ReasonCode.FORM, "how many answers have a form that can be read is not known")
        if form.effect.lower <= -margin:  # form has to hold within the facet's own margin
            shares = f"{100 * (1 - form.rates.reference):.1f} to {100 * (1 - form.rates.candidate):.1f} %"
            return Reason(ReasonCode.FORM, f"answers without form, of which {facet} says nothing, went from {shares}")
    return None


def rewarding_judge(_: GatedCell, context: DowngradeContext) -> Reason | None:
    """Ask a release for a safety suite that is independent of the reward."""
    if context.rules.profile != RELEASE or is_apart(context.gated_cells, context.drift.comparison):
        return None
    return Reason(
        ReasonCode.TRAINED,
        "a release needs a gated safety suite that was not trained on and whose judge did not give the reward; add "
        "one to evaluate.suites",
    )


def phrase_rules(cell: GatedCell, context: DowngradeContext) -> Reason | None:
    """Ask a release for a judge beside phrase rules."""
    sides = context.drift.comparison
    suites = sorted({suite_of(row.contrast.suite) for row in cell.rows} & set(sides.by_phrases))
    if context.rules.profile != RELEASE or not suites:
        return None
    return Reason(
        ReasonCode.PHRASES,
        f"phrase rules alone graded {', '.join(suites)}, which is no claim: settle it with kvaudit grade judge RUN "
        "--judge",
    )


def is_apart(cells: Sequence[GatedCell], sides: Comparison) -> bool:
    """Whether some gated safety suite or facet was neither trained on nor graded by what gave the reward."""
    gated = {row.contrast.suite for cell in cells for row in cell.rows}
    return any(suite_of(metric) not in sides.rewarded for metric in gated if _is_safety(metric, sides))


def _is_safety(metric: str, sides: Comparison) -> bool:
    return facet_of(metric)[1].kind == "safety" if metric in sides.facets else metric in sides.safety


# what the data say, whatever a PASS needs beside
OF_THE_DATA = (Downgrade(Status.FAIL, failing_seed), Downgrade(Status.NOT_MEASURABLE, unmeasurable_reference))
OF_A_PASS = tuple(
    Downgrade(Status.INCONCLUSIVE, check)
    for check in (biased_judge, unnamed_clusters, broken_form, rewarding_judge, phrase_rules)
)
