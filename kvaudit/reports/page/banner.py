"""The sentences of a banner: what the verdict means, what its number is about, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter

from kvaudit.core.estimands import DEPLOYED, SERVING
from kvaudit.core.text import at_length, inline, some
from kvaudit.reports.page.answers import question_of
from kvaudit.reports.page.facets import taken_apart
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.remarks import late, not_measurable, remarks
from kvaudit.reports.page.tables import compressed_as_deployed, decided_lines, deployed
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.words import (
    effect_text,
    exceeds_margin,
    has_little_to_lose,
    held_to,
    percent,
    plural,
    points,
    rates_text,
    ratio_text,
    seed_text,
    suite_label,
    undersized_suites,
)
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import Decided, Decision, Status, Verdict, worst_recipe

INVALID_SHOWN = 4  # cells in the banner
_NAME_CLUSTERS = "do not clear {} yet (INCONCLUSIVE): name what items share, no further run is needed"
_TO_DO = {  # by the verdict of what is named
    Status.INVALID: "mend the records of {} (INVALID)",
    Status.FAIL: "hold back {} (FAIL)",
    Status.NOT_MEASURABLE: "do not clear {} by this (NOT MEASURABLE): ask what the uncompressed reference can show",
    Status.INCONCLUSIVE: "do not clear {} yet (INCONCLUSIVE): kvaudit plan sizes a next run",
    Status.WAIVED: "{} goes by a waiver, not by the data (WAIVED)",
    Status.PASS_NOTED: "this gate does not hold back {} (PASS*: a drop is detectable, and within the margin)",
    Status.PASS: "this gate does not hold back {} (PASS)",
}


def number(d: Decision) -> str:
    """The drift that a banner quotes, with its interval and margin."""
    assert d.effect is not None
    told = "margin" if d.ratio is None else f"{ratio_text(d.ratio.times)}, limit"
    return f"{effect_text(d.effect)}, {told} {held_to(d)}"


def verdict_sentence(verdict: Verdict) -> str:
    """What a verdict means; of a FAIL also in how many cells the drop is shown to be beyond the margin."""
    failed = [d for d in verdict.gated if d.standing is Status.FAIL and d.effect]
    if verdict.status is not Status.FAIL or not failed:
        return SENTENCES[verdict.status]
    by_seed = [d for d in failed if any(reason.code == ReasonCode.SEED for reason in d.reasons)]
    far = sum(exceeds_margin(d) for d in failed if d not in by_seed)
    open_ = len(failed) - far - len(by_seed)
    seeds = f", by a seed that fails alone {len(by_seed)}" if by_seed else ""
    return (
        f"Worse, by a loss that may exceed the declared margin, in {len(failed)} of {len(verdict.gated)} gated cells: "
        f"shown to exceed it {far or 'none'}, size open {open_ or 'none'}{seeds}."
    )


SENTENCES = {
    Status.PASS: "Non-inferior within the declared margin in every gated cell.",
    Status.PASS_NOTED: "Non-inferior within the declared margin in every gated cell; a drop within it is detectable.",
    Status.FAIL: "Worse, by a loss that may exceed the declared margin, in at least one gated cell.",
    Status.WAIVED: "Let through by a waiver, not by the data: some gated cell failed or is open.",
    Status.NOT_MEASURABLE: "Some gated cell cannot be measured on this reference: holding still says nothing there.",
    Status.INCONCLUSIVE: "The data cannot tell: some gated cell neither passes nor fails by its rule.",
    Status.INVALID: "No verdict: the records do not allow a valid comparison in at least one gated cell.",
}


def about(findings: Decided, d: Decision) -> str:
    """The cell that the banner quotes, in words."""
    sides, effect = findings.comparison, d.effect
    assert effect is not None
    policy, plain = sides.label(d.policy), sides.label(sides.uncompressed_of(d.policy))
    who = f"{d.arm} against {sides.reference}, both served under {policy}"
    if d.estimand == "deployed":
        who = f"{d.arm} served under {policy} against {sides.reference} served under {plain}"
    if sides.mode == "serving":
        who = f"{d.arm} served under {policy} against the same model under {plain}"
    near = f" Rates: {rates_text(findings.comparison, d)}." if has_little_to_lose(d) else ""
    return inline(
        f"{suite_label(findings.comparison, d)} {at_length(d.context_tokens)}, {who}: {effect.n_items} items in "
        f"{effect.n_clusters} templates, 95 % interval, {churn_words(findings, d)}.{near} {why_quoted(findings, d)}"
    ).strip()


def why_quoted(findings: Decided, d: Decision) -> str:
    """Why this cell is quoted, and that the most extreme of several is no unbiased estimate."""
    cells = sum(other.effect is not None for other in findings.verdict.gated)
    if d.waiver:
        return f"This cell is {d.status.value}, waived by {d.waiver.who} until {d.waiver.expires}."
    if d.status is not findings.verdict.status:
        return f"This cell is {d.status.value}; the verdict is of cells that cannot be measured."
    if cells == 1:
        return "It is the only gated cell."
    return f"It is the most extreme of {cells} gated cells: picked that way, a number tends to look worse than it is."


def asides(findings: Findings, head: Decision | None) -> list[str]:
    """What the number is made of, what to do, what is deployed, what is claimed; then what is not as it should be."""
    first = not_measurable(findings)
    placed: list[tuple[int, Iterable[str]]] = [
        (10, first),
        (20, taken_apart(findings, head)),
        (30, [to_do(findings)]),
        (40, _served(findings, head)),
        (60, [*_seeds_alone(findings), _scope(findings)]),
        (70, map(str, findings.verdict.reasons)),
        (71, (line for line in remarks(findings) if line not in first)),
        (72, _invalid(findings)),
        (80, unscored(findings.comparison, head) if head else ()),
        (81, undersized_suites(findings)),
        *(
            (section.banner_lines_at, section.banner_lines(value, findings, head))
            for section, value in sections_in(findings.values)
        ),
    ]
    return [inline(line) for _, lines in sorted(placed, key=itemgetter(0)) for line in lines]


def _invalid(findings: Decided) -> Iterator[str]:
    invalid = [d for d in findings.verdict.gated if d.status is Status.INVALID]
    for d in invalid[:INVALID_SHOWN]:
        end = ", as deployed" if d.estimand == DEPLOYED else ""
        where = f"{d.arm}, {d.suite} @ {findings.comparison.label(d.policy)}{end}"
        yield f"{where}: {d.reasons[0]}"
    if len(invalid) > INVALID_SHOWN:
        yield f"and {plural(len(invalid) - INVALID_SHOWN, 'more invalid cell')} in the gate table"


def to_do(findings: Decided) -> str:
    """What follows from the verdict for every arm, or for every policy where nothing was trained."""
    if late(findings.rules):
        return "What to do: gate this run by the rules that were declared before it."
    if findings.verdict.status is Status.INVALID:
        return "What to do: mend the records or the comparison; nothing is decided."
    lines = decided_lines(findings)
    parts = []
    open_cells = [d for d in findings.verdict.gated if d.standing is Status.INCONCLUSIVE]
    unnamed = bool(open_cells) and all(d.is_unclustered for d in open_cells)  # which holds back all of them
    for status, words in (_TO_DO | ({Status.INCONCLUSIVE: _NAME_CLUSTERS} if unnamed else {})).items():
        names = [line.name for line in lines if line.status is status]
        parts += [words.format(", ".join(names))] if names else []
    return f"What to do: {'; '.join(parts)}." if parts else "What to do: see the reasons below."


def _seeds_alone(findings: Decided) -> list[str]:
    sides = findings.comparison
    lost = [
        f"{sides.who(d.arm, d.policy)}, {suite_label(sides, d)}, seed {seed_text(seed)}"
        for d in findings.verdict.gated
        if d.margin and d.status is not Status.FAIL and (seed := d.worst_seed)
        if seed.estimate <= -d.margin and seed.high < 0
    ]
    return [f"One seed alone lost more than the margin: {some(lost, 2, between='; ')}."] if lost else []


def _served(findings: Decided, head: Decision | None) -> list[str]:
    """The worst that a user of a compressed candidate meets; nothing where the number above is that."""
    found = [d for d in deployed(findings) if compressed_as_deployed(findings.comparison, d)]
    if not found or found[0] is head:
        return []
    d = found[0]
    who = f"{findings.comparison.who(d.arm, d.policy)} against uncompressed {findings.comparison.reference}"
    number = effect_text(d.effect)
    rule = f"It is gated: {d.status.value}" if d.gated else f"By the same rule {d.status.value}, but it is not gated"
    return [
        f"As deployed, the worst of {len(found)} cells: {who}, {suite_label(findings.comparison, d)}: {number}. {rule}."
    ]


def churn_words(findings: Decided, d: Decision) -> str:
    """Churn of a decision's cell, beside what a rerun of one checkpoint changes (A/A)."""
    found = {c.estimand: c for c in findings.drift.contrasts if c.place[1:] == d.place[1:]}
    own = found.get(d.estimand, found.get(findings.comparison.base))
    if own is None or own.churn is None:
        return "churn -"
    again = "" if own.rerun is None else f", {percent(own.rerun)} between two answers of one checkpoint (A/A)"
    return f"churn {percent(own.churn)}{again}"


def unscored(sides: Comparison, head: Decision) -> list[str]:
    """The number with every answer that it leaves open counted against the candidate, and for it; if there are any."""
    if head.worst is None or head.best is None or head.worst == head.best:
        return []
    against_it, for_it = points(head.worst), points(head.best)
    what = "Answers that could not be read" if head.suite in sides.facets else "Unscored answers"
    return [f"{what}: all counted against the candidate {against_it} pp, all counted for it {for_it} pp."]


def _scope(findings: Decided) -> str:
    if findings.comparison.mode == "serving":
        return "Claim: about this checkpoint under these serving policies (artifact)."
    if findings.verdict.recipe is None:
        return "Claim: about these checkpoints (artifact). Recipe claim not supported: it needs 3 paired seeds."
    by_question: dict[str, list[Status | None]] = {}
    for d in findings.verdict.gated:
        if (question := question_of(findings.comparison, d)) != SERVING:
            by_question.setdefault(question, []).append(d.recipe)
    found = {question: worst_recipe(own) for question, own in by_question.items()}
    said = "; ".join(f"{question} {status.value}" for question, status in found.items() if status)
    return (
        f"Claim: about these checkpoints, averaged over paired seeds (artifact). For the recipe, with seed variance "
        f"added: {said}."
    )
