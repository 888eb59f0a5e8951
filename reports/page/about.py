"""The sentences of a banner: what its number is about, and what must be read wherever a verdict is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from audit.core.inputs import WORKED_WITH
from audit.core.text import inline
from reports.drift.results import Reason
from reports.gate.family import PARITY
from reports.gate.rules import AFTER_RUN, DEFAULT_ESTIMANDS, WARN, Rules
from reports.gate.seeds import SEED
from reports.gate.verdict import AT_FLOOR, FLOOR, JUDGE_DIFF, TEMPLATES, Decision, Status, Verdict
from reports.page.findings import Findings
from reports.page.tables import against, calibrated, decided_lines, deployed, named
from reports.page.words import beyond, counted, drift, is_relative, percent, points, rates, short_suites, unsampled
from reports.stats.rule import blind_spot
from reports.stats.seeds import SEEDS_ADVISED

_NAMED = 3  # cells that a line spells out


def remarks(findings: Findings) -> Iterator[str]:
    """One plain line each; none for a run of one set of versions that is decided by its spec."""
    rules = findings.rules
    if findings.drift.unclustered is not None:
        yield _unclustered(findings.drift.unclustered, rules)
    if rules.sha256 is not None:
        yield _gate(rules)
    if rules.profile:
        yield f"Rules: profile {rules.profile}, one-sided level {rules.alpha:g}."
    if findings.verdict.status is Status.INCONCLUSIVE and rules.on_inconclusive == WARN:
        yield "WARNING: INCONCLUSIVE is let through (on_inconclusive: warn); it is not a PASS."
    yield from _waivers(findings)
    yield from _labels(findings)
    yield from _versions(findings)
    if findings.verdict.adjustment.reason:
        yield f"FAIL is held to the family by Holm instead of max-T: {findings.verdict.adjustment.reason}."


def _unclustered(reason: Reason, rules: Rules) -> str:
    """What holds where nothing says which items share a template: the user's word for it, or what to do."""
    said = f"{reason.code}: {reason.text}."
    if rules.items_are_independent:
        said = "Items were declared independent by the user (--items-are-independent): no cluster is named."
    return (
        f"{said} Each item counts as its own template: if items do share templates, documents or scenarios, the "
        "interval is too narrow and the blind spot too small."
    )


def late(rules: Rules) -> str:
    """The alarm of rules that came after the run; empty for any others."""
    if rules.declared != AFTER_RUN:
        return ""
    return (
        f"{rules.source} came after the run. Its author may have seen the numbers: this verdict decides nothing, and "
        "kvaudit gate refuses it."
    )


def _gate(rules: Rules) -> str:
    line = f"Gate: {rules.source}, sha256 {(rules.sha256 or '')[:12]}, {rules.declared}"
    if rules.declared != AFTER_RUN:
        return line + "."
    return f"{line}, which changes " + ("; ".join(rules.changes) if rules.changes else "nothing that decides") + "."


def _labels(findings: Findings) -> Iterator[str]:
    """What human labels decided, and what judge labels alone were not let pass."""
    if findings.verdict.judged is None:
        return
    people = [d for d in findings.verdict.decisions if d.gated and d.judged]
    turned = [d for d in people if d.judged is not d.status]
    more = f" and {len(turned) - _NAMED} more" if len(turned) > _NAMED else ""
    cells = [f"{_place(findings, d)}: {d.status.value}, by the judge {d.judged}" for d in turned[:_NAMED]]
    turns = f" They change {'; '.join(cells)}{more}." if turned else " They change the verdict of none."
    yield f"Human labels decide {len(people)} of {sum(d.gated for d in findings.verdict.decisions)} gated cells.{turns}"
    held = [
        _place(findings, d)
        for d in findings.verdict.decisions
        if d.gated and any(r.code == JUDGE_DIFF for r in d.reasons)
    ]
    if held:
        more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
        yield f"{JUDGE_DIFF}: judge labels alone cannot pass {'; '.join(held[:_NAMED])}{more}."
    if findings.verdict.judged is not findings.verdict.status:
        yield f"On the judge's labels alone the verdict would be {findings.verdict.judged.value}."


def _versions(findings: Findings) -> Iterator[str]:
    """What a run was worked on with, where that changed: a remark, as it changes numbers by rounding at most."""
    table = findings.provenance.get(WORKED_WITH)
    if isinstance(table, Mapping) and len(table) > 1:
        found = [f"{line} (since {since})" for line, since in sorted(table.items(), key=lambda pair: str(pair[1]))]
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        yield f"VERSIONS: the run was worked on with {len(found)} sets of versions: {'; '.join(found[:_NAMED])}{more}."


def _place(findings: Findings, d: Decision) -> str:
    return f"{d.estimand}, {d.arm}, {d.suite} {d.context_tokens} @ {findings.comparison.labels.get(d.policy, d.policy)}"


def _waivers(findings: Findings) -> Iterator[str]:
    for waiver in findings.waivers:
        cells = [d for d in findings.verdict.decisions if d.waiver is waiver]
        places = ", ".join(
            f"{d.arm}, {d.suite} @ {findings.comparison.labels.get(d.policy, d.policy)}" for d in cells[:3]
        )
        more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
        let = f"lets {len(cells)} cells through ({places}{more})" if cells else "fits no cell and does nothing"
        if len(cells) == 1:
            let = f"lets {cells[0].status.value} through ({places})"
        yield f"WAIVER by {waiver.who}, until {waiver.expires}: {waiver.why}; it {let}."
    if findings.verdict.unwaived is not findings.verdict.status:
        yield f"Without waivers the verdict is {findings.verdict.unwaived.value}."


INVALID_SHOWN = 4  # cells in the banner
_TO_DO = {  # by the verdict of what is named
    Status.INVALID: "mend the records of {} (INVALID)",
    Status.FAIL: "hold back {} (FAIL)",
    Status.INCONCLUSIVE: "do not clear {} yet (INCONCLUSIVE): kvaudit plan sizes a next run",
    Status.WAIVED: "{} goes by a waiver, not by the data (WAIVED)",
    Status.PASS_NOTED: "this gate does not hold back {} (PASS*: a drop is detectable, and within the margin)",
    Status.PASS: "this gate does not hold back {} (PASS)",
}


def number(d: Decision) -> str:
    """The drift that a banner quotes, with its interval and margin."""
    assert d.effect is not None
    return f"{drift(d.effect)}, margin {100 * (d.margin or 0):g} pp"


def sentence(verdict: Verdict) -> str:
    """What a verdict means; of a FAIL also in how many cells the drop is shown to be beyond the margin."""
    gated = [d for d in verdict.decisions if d.gated]
    failed = [d for d in gated if d.standing is Status.FAIL and d.effect]
    if verdict.status is not Status.FAIL or not failed:
        return SENTENCES[verdict.status]
    by_seed = [d for d in failed if any(reason.code == SEED for reason in d.reasons)]
    far = sum(beyond(d) for d in failed if d not in by_seed)
    open_ = len(failed) - far - len(by_seed)
    seeds = f"; by a seed that fails alone: {len(by_seed)}" if by_seed else ""
    return (
        f"Regression detected, and not shown to be within the declared margin, in {len(failed)} of {len(gated)} gated "
        f"cells. Shown to be beyond the margin: {far or 'none'}; worse, its size open: {open_ or 'none'}{seeds}."
    )


SENTENCES = {
    Status.PASS: "Non-inferior within the declared margin in every gated cell.",
    Status.PASS_NOTED: "Non-inferior within the declared margin in every gated cell; a drop within it is detectable.",
    Status.FAIL: "Regression detected, and not shown to be within the declared margin, in at least one gated cell.",
    Status.WAIVED: "Let through by a waiver, not by the data: some gated cell failed or is open.",
    Status.INCONCLUSIVE: "The data cannot tell: some gated cell is neither within its margin nor shown to be worse.",
    Status.INVALID: "No verdict: the records do not allow a valid comparison in at least one gated cell.",
}


def about(findings: Findings, d: Decision) -> str:
    """The cell that the banner quotes, in words."""
    sides, effect = findings.comparison, d.effect
    assert effect is not None
    policy = sides.labels.get(d.policy, d.policy)
    who = f"{d.arm} against {sides.reference}, both served under {policy}"
    if d.estimand == "E2":
        who = f"{d.arm} served under {policy} against {sides.reference} served under none"
    if sides.mode == "serving":
        who = f"{d.arm} served under {policy} against the same model under none"
    near = f" Rates: {rates(d)}." if is_relative(d) else ""
    return inline(
        f"{named(findings, d)} at {d.context_tokens} tokens, {who}: {effect.n_items} items in {effect.n_clusters} "
        f"templates, 95 % interval, {churn_words(findings, d)}.{near} {chosen(findings, d)}"
    ).strip()


def chosen(findings: Findings, d: Decision) -> str:
    """Why this cell is quoted, and that the most extreme of several is no unbiased estimate."""
    cells = sum(other.gated and other.effect is not None for other in findings.verdict.decisions)
    if d.waiver:
        return f"This cell is {d.status.value}, waived by {d.waiver.who} until {d.waiver.expires}."
    if d.status is not findings.verdict.status:
        return f"This cell is {d.status.value}; the verdict is open because of cells at the floor."
    if cells == 1:
        return "It is the only gated cell."
    return f"It is the most extreme of {cells} gated cells: picked that way, a number tends to look worse than it is."


def asides(findings: Findings, head: Decision | None) -> list[str]:
    """What to do, what is deployed, what is claimed; then whatever is not as it should be."""
    lines = [to_do(findings), *_served(findings, head), _scope(findings)]
    lines += [f"{reason.code}: {reason.text}" for reason in findings.verdict.reasons] + list(remarks(findings))
    invalid = [d for d in findings.verdict.decisions if d.gated and d.status is Status.INVALID]
    labels = findings.comparison.labels
    lines += [
        f"{d.arm}, {d.suite} @ {labels.get(d.policy, d.policy)}{', as deployed' if d.estimand == 'E2' else ''}: "
        f"{d.reasons[0].code}: {d.reasons[0].text}"
        for d in invalid[:INVALID_SHOWN]
    ]
    if len(invalid) > INVALID_SHOWN:
        lines.append(f"and {counted(len(invalid) - INVALID_SHOWN, 'more invalid cell')} in the gate table")
    lines += [*(unscored(head) if head else ()), *short_suites(findings), *_floors(findings), *_flips(findings)]
    return [inline(line) for line in lines]


def to_do(findings: Findings) -> str:
    """What follows from the verdict for every arm, or for every policy where nothing was trained."""
    if late(findings.rules):
        return "What to do: gate this run by the rules that were declared before it."
    lines = decided_lines(findings)
    parts = []
    for status, words in _TO_DO.items():
        names = [line.name for line in lines if line.status is status]
        parts += [words.format(", ".join(names))] if names else []
    return f"What to do: {'; '.join(parts)}." if parts else "What to do: see the reasons below."


def _served(findings: Findings, head: Decision | None) -> list[str]:
    """The worst that a user of a compressed candidate meets; nothing where the number above is that."""
    found = deployed(findings)
    if not found or found[0] is head:
        return []
    d, labels = found[0], findings.comparison.labels
    who = f"{d.arm} @ {labels.get(d.policy, d.policy)} against uncompressed {findings.comparison.reference}"
    number = drift(d.effect) if d.effect else "-"
    rule = f"It is gated: {d.status.value}" if d.gated else f"By the same rule {d.status.value}, but it is not gated"
    return [f"As deployed, the worst of {len(found)} cells: {who}, {named(findings, d)}: {number}. {rule}."]


def _floors(findings: Findings) -> list[str]:
    floors = [d for d in findings.verdict.decisions if d.gated and d.at_floor]
    if not floors:
        return []
    where = list(dict.fromkeys(f"{d.suite} ({against(findings, d)})" for d in floors))
    share = f"{len(floors)} of {sum(d.gated for d in findings.verdict.decisions)} gated cells"
    return [f"{FLOOR}: {AT_FLOOR} ({share}: {', '.join(where)})."]


def _flips(findings: Findings) -> list[str]:
    """Analyses that would say something else."""
    flips = [f"{m.method} ({m.status})" for m in findings.analysis.methods if m.flips]
    of = ", of the judge's labels," if findings.verdict.judged else ""
    return (
        [f"Another analysis{of} would flip this verdict: {', '.join(flips)}. The declared one stands."] if flips else []
    )


def cautions(findings: Findings, head: Decision | None) -> list[str]:
    """What a number cannot say: what was not sampled, the other side of the cell, and how often the gate is wrong."""
    other = [
        _other_side(findings, d) for d in findings.verdict.decisions if d.effect and head and is_other_side(d, head)
    ]
    return [
        inline(line)
        for line in (
            _blind_spot(findings, head),
            *_templates(findings),
            *other,
            *_recipe_level(findings),
            *calibrated(findings),
        )
    ]


def churn_words(findings: Findings, d: Decision) -> str:
    """E7 of a decision's cell, of the worst policy's for E3, beside what a rerun of one checkpoint changes (A/A)."""
    place = (d.arm, d.policy, d.suite, d.context_tokens)
    here = [c for c in findings.drift.contrasts if (c.arm, c.policy, c.suite, c.context_tokens) == place]
    found = {c.estimand: c for c in here}
    own = found.get(d.estimand, found.get(findings.comparison.base))
    if own is None or own.churn is None:
        return "churn -"
    again = "" if own.rerun is None else f", {percent(own.rerun)} between two answers of one checkpoint (A/A)"
    return f"churn {percent(own.churn)}{again}"


def unscored(head: Decision) -> list[str]:
    """The number with every unscored answer counted against the candidate, and for it; nothing where all are scored."""
    if head.worst is None or head.best is None or head.worst == head.best:
        return []
    against_it, for_it = points(head.worst), points(head.best)
    return [f"Unscored answers: all counted against the candidate {against_it} pp, all counted for it {for_it} pp."]


def _blind_spot(findings: Findings, head: Decision | None) -> str:
    """Of the cell that is quoted; without one, of the suite with the fewest templates."""
    alpha = findings.rules.alpha
    if head and head.effect and head.blind_spot is not None:
        return unsampled(head.blind_spot, alpha, head.effect.n_clusters)
    have = min((c.n_clusters for c in findings.drift.cells), default=0)
    return unsampled(blind_spot(have, alpha), alpha, have)


def _templates(findings: Findings) -> list[str]:
    """Could a few broken templates hide a loss of the margin where the interval alone would pass?"""
    cells = [d for d in findings.verdict.decisions if d.gated and d.template_bound is not None and d.estimand != PARITY]
    held = [d for d in cells if any(reason.code == TEMPLATES for reason in d.reasons)]
    lines = []
    for own, words in ((held, _HELD), ([d for d in cells if d not in held], _CLEARED)):
        if own:
            d = min(own, key=lambda d: (d.template_bound or 0.0) + (d.margin or 0.0))
            place = f"{d.arm} @ {findings.comparison.labels.get(d.policy, d.policy)}, {named(findings, d)}"
            most = f"{-100 * min(d.template_bound or 0.0, 0.0):.1f} pp"
            lines.append(words.format(cells=counted(len(own), "cell"), most=most, place=place))
    return lines


_WEIGHTED = "the templates that were seen, weighted otherwise, plus one like them that lost everything,"
_CLEARED = (
    f"Broken templates: in {{cells}} with the interval inside the margin, {_WEIGHTED} leave a loss of at most {{most}} "
    "open ({place})."
)
_HELD = (
    f"Broken templates: in {{cells}} with the interval inside the margin, {_WEIGHTED} could lose more than the margin, "
    "up to {most} ({place}): data cannot tell."
)


def is_other_side(d: Decision, head: Decision) -> bool:
    """Whether a decision is the same cell against the reference served another way."""
    same = (d.arm, d.policy, d.suite, d.context_tokens) == (head.arm, head.policy, head.suite, head.context_tokens)
    return same and {d.estimand, head.estimand} == set(DEFAULT_ESTIMANDS)


def _other_side(findings: Findings, d: Decision) -> str:
    assert d.effect is not None
    policy = findings.comparison.labels.get(d.policy, d.policy)
    if d.estimand == "E2":
        who = f"{d.arm} served under {policy} against uncompressed {findings.comparison.reference}"
        return f"End to end, {who}: {drift(d.effect)}."
    return f"Served alike, {d.arm} against {findings.comparison.reference}, both under {policy}: {drift(d.effect)}."


def _scope(findings: Findings) -> str:
    if findings.comparison.mode == "serving":
        return "Claim: about this checkpoint under these serving policies (artifact)."
    if findings.verdict.recipe is None:
        return "Claim: about these checkpoints (artifact). Recipe claim not supported: it needs 3 paired seeds."
    return (
        f"Claim: about these checkpoints, averaged over paired seeds (artifact). For the recipe, with seed variance "
        f"added, the verdict is {findings.verdict.recipe.value}."
    )


def _recipe_level(findings: Findings) -> list[str]:
    """How far a recipe's claim from few seeds may be trusted, as simulated."""
    few = len(findings.comparison.seeds) < SEEDS_ADVISED and findings.verdict.recipe is not None
    if not few or findings.calibration is None:
        return []
    return [
        f"With fewer than {SEEDS_ADVISED} seeds the 95 % interval of a recipe raises a false alarm in up to "
        f"{percent(findings.calibration.recipe_three_seeds_max)} of simulated audits; {SEEDS_ADVISED} seeds keep 5 %."
    ]
