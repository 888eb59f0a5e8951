"""The decision: PASS, FAIL, INCONCLUSIVE or INVALID for every gated cell, arm and the run. Pure.

A cell is decided by the rule of its test and the floor of its reference. Where people found that the judge may err
differently in the two arms (JUDGE_DIFF), its labels alone pass nothing; nor do theirs before they looked at every
template (LABELS). Where no cluster is named (NOCLUSTERS), nothing passes unless items were declared independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from audit.core.facets import WELL_FORMED
from reports.drift.results import Contrast, Drift, People, Rates, Reason
from reports.drift.validity import some
from reports.gate.chance import larger
from reports.gate.family import (
    HOLM,
    PARITY,
    WORST_POLICY,
    GatedCell,
    Row,
    drop_pvalue,
    gated_cells,
    holm_family,
    joint_family,
    shown_cells,
)
from reports.gate.rules import WARN, Rules
from reports.gate.seeds import held_by_seeds
from reports.gate.verdict import (
    AT_FLOOR,
    EXIT_CODES,
    FLOOR,
    FORM,
    JUDGE_DIFF,
    LABELS,
    PRECEDENCE,
    TEMPLATES,
    Adjustment,
    ArmVerdict,
    Decision,
    Larger,
    Status,
    Verdict,
    worst,
    worst_recipe,
)
from reports.gate.waivers import Waiver
from reports.stats.effect import Effect
from reports.stats.rule import Call, blind_spot, calls, clusters_required, effective_clusters
from reports.stats.templates import Part, parts_show_margin, template_bound, too_large

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

    row: Row
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
                clusters=min((effective_clusters(part.counts) for part in templates), default=effect.n_clusters),
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
    alike = min((effective_clusters(part.counts) for part in templates), default=effect.n_clusters)
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


def judged(row: Row, margin: float, pvalues: Pvalues) -> Judged:
    """One test held to its margin; a contrast without a number is INVALID for its own reasons.

    Human labels correct the effect, not the seed variance: the recipe is decided where it agrees with the checkpoints.
    """
    c, what = row.contrast, "regression" if row.sign > 0 else "gain"
    status, reasons, recipe, more, room = Status.INVALID, c.reasons, None, None, 0.0
    if c.effect:
        effect = _toward(c.effect, row.sign)
        status, reasons = decide_cell(effect, margin, pvalues.adjusted, templates_of(c, row.sign), what)
        if at_floor(effect, c.rates, margin) and status is not Status.FAIL:  # a loss that is shown stays shown
            status, reasons = Status.INCONCLUSIVE, (Reason(FLOOR, AT_FLOOR), *reasons)
        recipe = _recipe(row, margin, pvalues.recipe)
        more = larger(c, margin, row.sign) if status is Status.INCONCLUSIVE else None
        room = effect.lower + margin
    judge = None
    # ``effect`` is then by human labels, and ``judged`` what the judge's alone gave
    if c.judged:
        judge = judged(_by_judge(row), margin, pvalues._replace(adjusted=pvalues.judge)).status
        if c.people and c.people.unseen and status is not Status.FAIL:  # more templates would not help, labels do
            status, reasons, more = Status.INCONCLUSIVE, (_unseen(c.people), *reasons), None
        recipe = None if recipe is None else _agreed(recipe, status)
    return Judged(row, status, recipe, reasons, pvalues.adjusted, pvalues.holm, room, more, judge)


def _recipe(row: Row, margin: float, pvalue: float) -> Status | None:
    """The test with seed variance added; at the floor the most it can be is open."""
    if row.contrast.recipe is None:
        return None
    effect = _toward(row.contrast.recipe, row.sign)
    status = decide_cell(effect, margin, pvalue, templates_of(row.contrast, row.sign))[0]
    return worst([status, Status.INCONCLUSIVE]) if at_floor(effect, row.contrast.rates, margin) else status


def at_floor(effect: Effect, rates: Rates | None, margin: float) -> bool:
    """Whether the reference has too little to lose for a cell to say anything by holding still; a shown gain does."""
    return rates is not None and rates.reference_lower <= margin and effect.lower <= 0


def _unseen(people: People) -> Reason:
    """A judge that is blind to a template shows no difference there, so people must have seen a pair of every one."""
    return Reason(
        LABELS,
        f"in {people.unseen} of {people.templates} templates nobody looked at a pair that the judge calls equal: label "
        f"{people.unseen} more, one of each (kvaudit adjudicate --concordant {people.templates} or more)",
    )


def _agreed(recipe: Status, status: Status) -> Status:
    """The recipe by the judge's labels where human labels say the same of the checkpoints; else it is open."""
    passed = (Status.PASS, Status.PASS_NOTED)
    return worst([recipe, status]) if recipe is status or {recipe, status} <= {*passed} else Status.INCONCLUSIVE


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
        blind_spot=blind_spot(_effective(c, c.effect), alpha) if c.effect else None,
        effect=c.effect,
        rates=c.rates,
        worst=c.worst,
        best=c.best,
        template_bound=_template_bound(shown, cell.margin, alpha),
        worst_seed=min(c.by_seed, key=lambda seed: seed.estimate, default=None),
        policies=tuple(row.contrast.policy for row in cell.rows) if cell.estimand == WORST_POLICY else (),
        statement=_parity(judged, cell.margin) if cell.estimand == PARITY and cell.margin else "",
        judged=worst(j.judge or j.status for j in judged) if any(j.judge for j in judged) else None,
    )


def _template_bound(shown: Judged, margin: float | None, alpha: float) -> float | None:
    """What the template rule leaves open in the test's own direction; nothing where the interval leaves more."""
    c, sign = shown.row.contrast, shown.row.sign
    if c.effect is None or margin is None or _toward(c.effect, sign).lower <= -margin:
        return None
    return template_bound(templates_of(c, sign), alpha=alpha)


def _effective(c: Contrast, effect: Effect) -> float:
    """The templates of a contrast, fewer where sizes are uneven; of several suites the fewest."""
    return min((effective_clusters(part.counts) for part in c.sums), default=effect.n_clusters)


def _parity(judged: Sequence[Judged], margin: float) -> str:
    """The statement of parity: both sides within the margin, or which side is not shown."""
    sides = {"non-inferior": judged[0].status, "non-superior": judged[1].status}
    shown = [f"{word}: {'shown' if s in (Status.PASS, Status.PASS_NOTED) else s.value}" for word, s in sides.items()]
    return f"parity within {100 * margin:g} pp, " + ", ".join(shown)


PASSED = (Status.PASS, Status.PASS_NOTED)


@dataclass(frozen=True)
class Uneven:
    """A decided cell in which the judge by itself could have made more than half the margin."""

    contrast: Contrast
    bias_upper: float


def uneven_cells(cells: Sequence[GatedCell]) -> list[Uneven]:
    """Those of the cells at hand whose answers people labelled."""
    # not those of E3 and parity, which are made of the same contrasts
    own = [(cell.rows[0].contrast, cell.margin) for cell in cells if cell.estimand == cell.rows[0].contrast.estimand]
    return [Uneven(c, c.people.bias_upper) for c, m in own if c.people and m and not guarded(c.people, m)]


def guarded(people: People, margin: float) -> bool:
    """Whether the judge's own bias is at most half the margin, so that its labels alone may pass the cell."""
    return people.bias_upper <= margin / 2


def held(d: Decision, cell: GatedCell, uneven: Sequence[Uneven]) -> Decision:
    """The decision; INCONCLUSIVE instead of a PASS on judge labels of answers that the judge may have told apart.

    That is so for every test without human labels whose candidate, policy, suite and length are those of an uneven
    cell.
    """
    alone = [row.contrast for row in cell.rows if row.contrast.judged is None]
    biased = [u.bias_upper for u in uneven if any(_same_answers(u.contrast, c) for c in alone)]
    if not biased:
        return d
    most = 100 * max(biased)
    text = f"judge labels alone cannot pass: the judge may have made up to {most:.1f} pp"
    return without_pass(d, Reason(JUDGE_DIFF, text))


def _broken_form(cell: GatedCell, drift: Drift) -> Reason | None:
    """Why a facet, which is silent of answers without form, passes nothing where those may have become many more."""
    for c in (row.contrast for row in cell.rows):
        suite, _, facet = c.suite.rpartition(".")
        if c.suite not in drift.comparison.facets or facet == WELL_FORMED or cell.margin is None:
            continue
        place = (c.estimand, c.arm, c.policy, c.context_tokens, f"{suite}.{WELL_FORMED}")
        form = next((o for o in drift.contrasts if (*_cell(o), o.suite) == place), None)
        if form is None or form.effect is None or form.rates is None:
            return Reason(FORM, "how many answers have a form that can be read is not known")
        if form.effect.lower <= -cell.margin:  # form has to be shown to hold, within the facet's own margin
            shares = f"{100 * (1 - form.rates.reference):.1f} to {100 * (1 - form.rates.candidate):.1f} %"
            return Reason(FORM, f"answers without form, of which {facet} says nothing, went from {shares}")
    return None


def _cell(c: Contrast) -> tuple[str, str, str, int]:
    return c.estimand, c.arm, c.policy, c.context_tokens


def without_pass(d: Decision, reason: Reason | None) -> Decision:
    """The decision; INCONCLUSIVE for this reason, if there is one, where checkpoints or recipe would pass."""
    if reason is None or (d.status not in PASSED and d.recipe not in PASSED):
        return d
    recipe = None if d.recipe is None else worst([d.recipe, Status.INCONCLUSIVE])
    if d.status not in PASSED:
        return replace(d, recipe=recipe)
    return replace(d, status=Status.INCONCLUSIVE, recipe=recipe, reasons=(reason, *d.reasons), larger=None)


def _same_answers(labelled: Contrast, c: Contrast) -> bool:
    suites = {part.suite for part in c.sums} or {c.suite}
    here = (labelled.arm, labelled.policy, labelled.context_tokens) == (c.arm, c.policy, c.context_tokens)
    return here and labelled.suite in suites


def decide(drift: Drift, rules: Rules, waivers: Sequence[Waiver] = ()) -> Verdict:
    """The verdict of a drift, by precedence INVALID > FAIL > INCONCLUSIVE > WAIVED > PASS."""
    cells, beside = gated_cells(drift, rules), shown_cells(drift, rules)
    uneven = uneven_cells([*cells, *beside])
    unclustered = None if rules.items_are_independent else drift.unclustered

    def open_where_unknown(d: Decision, cell: GatedCell) -> Decision:
        return without_pass(without_pass(held(d, cell, uneven), unclustered), _broken_form(cell, drift))

    found, adjustment = _decisions(cells, rules.alpha)
    # before what holds back a PASS, which leaves this FAIL alone; waivers come last, over whatever then stands
    if rules.worst_seed:
        found = held_by_seeds(found, cells, rules.alpha)
    shown, _ = _decisions(beside, rules.alpha)
    gated = [_waived(open_where_unknown(d, cell), waivers) for d, cell in zip(found, cells, strict=True)]
    decisions = (*gated, *map(open_where_unknown, shown, beside))
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
    family = joint_family([_by_judge(row) for row in rows], alpha)
    people = holm_family([drop_pvalue(row.contrast.effect, row.sign) for row in rows])
    recipes = holm_family([_recipe_pvalue(row) for row in rows])
    places = {_key(row): i for i, row in enumerate(rows)}

    def judge(row: Row, margin: float) -> Judged:
        i = places[_key(row)]
        own = (people[i], people[i]) if row.contrast.judged else (family.pvalues[i], family.holm[i])
        return judged(row, margin, Pvalues(*own, recipes[i], family.pvalues[i]))

    adjustment = Adjustment(family.method, family.reason, family.floor, family.critical)
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
    """The test on the judge's labels alone."""
    c = row.contrast
    return Row(replace(c, effect=c.judged, sums=c.judged_sums, judged=None), row.sign) if c.judged else row


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
