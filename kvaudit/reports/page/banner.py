"""The sentences of the banner at the top of a report: the verdict, what the quoted drift compares, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter

from kvaudit.core.facets import DEPLOYED, PARITY, SERVING
from kvaudit.core.text import at_length, inline, join_names
from kvaudit.reports.page.answers import question_of
from kvaudit.reports.page.facets import breakdown
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Banner
from kvaudit.reports.page.remarks import late_rules_alarm, not_measurable, remarks
from kvaudit.reports.page.tables import deployed_cells, is_compressed_deployment, verdict_lines
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.words import (
    effect_text,
    exceeds_margin,
    has_little_to_lose,
    held_to,
    is_serving,
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
_NAME_CLUSTERS = "do not clear {} yet (INCONCLUSIVE): name the clusters of the items; no further run is needed"
_TO_DO = {  # status -> what to do with the arms or policies that have it
    Status.INVALID: "fix the records of {} (INVALID)",
    Status.FAIL: "hold back {} (FAIL)",
    Status.NOT_MEASURABLE: "do not clear {} by this run (NOT MEASURABLE): use suites that can show a loss",
    Status.INCONCLUSIVE: "do not clear {} yet (INCONCLUSIVE): size the next run with kvaudit plan",
    Status.WAIVED: "{} is let through by a waiver, not by the data (WAIVED)",
    Status.PASS_NOTED: "this gate does not hold back {} (PASS*: a drop is detectable, and within the margin)",
    Status.PASS: "this gate does not hold back {} (PASS)",
}
SENTENCES = {
    Status.PASS: "Non-inferior within the declared margin in every gated cell.",
    Status.PASS_NOTED: "Non-inferior within the declared margin in every gated cell; a drop within it is detectable.",
    Status.FAIL: "Worse, by a loss that may exceed the declared margin, in at least one gated cell.",
    Status.WAIVED: "Let through by a waiver, not by the data: some gated cell failed or is undecided.",
    Status.NOT_MEASURABLE: "Some gated cell cannot be measured on this reference: an unchanged score is no evidence.",
    Status.INCONCLUSIVE: "The data cannot tell: some gated cell neither passes nor fails by its rule.",
    Status.INVALID: "No verdict: the records do not allow a valid comparison in at least one gated cell.",
}


def make_banner(findings: Findings, title: str, description: str, lines: Iterable[str]) -> Banner:
    """Return the banner of a run or of a comparison of two files.

    The banner quotes one drift. ``description`` says what that drift compares; ``lines`` stand below the description.
    """
    head = findings.verdict.head
    return Banner(
        title=inline(title),
        status=findings.verdict.status,
        sentence=verdict_sentence(findings.verdict),
        number=quoted_number(head) if head and head.effect else "",
        about=inline(description),
        lines=tuple(map(inline, lines)),
        alarm=inline(late_rules_alarm(findings.rules)),
    )


def run_banner(findings: Findings) -> Banner:
    """Return the banner of a run, which is the top of its report."""
    head = findings.verdict.head
    title = f"KV-cache compression audit: {findings.drift.run}"
    return make_banner(findings, title, describe_cell(findings, head) if head else "", banner_lines(findings, head))


def quoted_number(d: Decision) -> str:
    """Return as text the drift that a banner quotes, with its interval and margin."""
    assert d.effect is not None
    label = "margin" if d.ratio is None else f"{ratio_text(d.ratio.times)}, limit"
    return f"{effect_text(d.effect)}, {label} {held_to(d)}"


def verdict_sentence(verdict: Verdict) -> str:
    """Return a sentence on what a verdict means.

    For a FAIL it also says how many cells are shown to exceed their margin.
    """
    failed = [d for d in verdict.gated if d.standing is Status.FAIL and d.effect]
    if verdict.status is not Status.FAIL or not failed:
        return SENTENCES[verdict.status]
    by_seed = [d for d in failed if any(reason.code == ReasonCode.SEED for reason in d.reasons)]
    n_exceeding = sum(exceeds_margin(d) for d in failed if d not in by_seed)
    n_open = len(failed) - n_exceeding - len(by_seed)
    seeds = f", one seed alone fails in {len(by_seed)}" if by_seed else ""
    change = "Changed, by a loss or gain" if any(d.estimand == PARITY for d in failed) else "Worse, by a loss"
    return (
        f"{change} that may exceed the declared margin, in {len(failed)} of {len(verdict.gated)} gated cells: "
        f"shown to exceed it in {n_exceeding or 'none'}, size open in {n_open or 'none'}{seeds}."
    )


def describe_cell(findings: Decided, d: Decision) -> str:
    """Return what the cell quoted in the banner compares, on how many items, and why it is quoted."""
    sides, effect = findings.comparison, d.effect
    assert effect is not None
    policy, plain = sides.label(d.policy), sides.label(sides.uncompressed_of(d.policy))
    who = f"{d.arm} against {sides.reference}, both served under {policy}"
    if d.estimand == "deployed":
        who = f"{d.arm} served under {policy} against {sides.reference} served under {plain}"
    if is_serving(sides, d):
        who = f"{d.arm} served under {policy} against the same model under {plain}"
    rates_note = f" Rates: {rates_text(sides, d)}." if has_little_to_lose(d) else ""
    return inline(
        f"{suite_label(sides, d)} {at_length(d.context_tokens)}, {who}: {effect.n_items} items in {effect.n_clusters} "
        f"templates, 95 % interval, {churn_words(findings, d)}.{rates_note} {why_quoted(findings, d)}"
    ).strip()


def why_quoted(findings: Decided, d: Decision) -> str:
    """Return why the banner quotes cell ``d``, and a warning that the most extreme of several cells is biased."""
    cells = sum(cell.effect is not None for cell in findings.verdict.gated)
    if d.waiver:
        return f"This cell is {d.status.value}, waived by {d.waiver.who} until {d.waiver.expires}."
    if d.status is not findings.verdict.status:
        return f"This cell is {d.status.value}; the verdict comes from cells that cannot be measured."
    if cells == 1:
        return "It is the only gated cell."
    return f"It is the most extreme of {cells} gated cells: picked that way, a number tends to look worse than it is."


def banner_lines(findings: Findings, head: Decision | None) -> list[str]:
    """Return the lines below the drift that the banner quotes.

    They say which facets (yes-or-no properties of answers) moved in the quoted cell ``head``, what to do, and what may
    be claimed from the run; then come reasons, remarks and problems.
    """
    first = not_measurable(findings)
    positioned: list[tuple[int, Iterable[str]]] = [
        (10, first),
        (20, breakdown(findings, head)),
        (30, [to_do(findings)]),
        (40, _worst_deployed_lines(findings, head)),
        (60, [*_losing_seed_lines(findings), _claim_line(findings)]),
        (70, map(str, findings.verdict.reasons)),
        (71, (line for line in remarks(findings) if line not in first)),
        (72, _invalid_cell_lines(findings)),
        (80, unscored_lines(findings.comparison, head) if head else ()),
        (81, undersized_suites(findings)),
        *(
            (section.banner_lines_at, section.banner_lines(value, findings, head))
            for section, value in sections_in(findings.values)
        ),
    ]
    return [inline(line) for _, lines in sorted(positioned, key=itemgetter(0)) for line in lines]


def _invalid_cell_lines(findings: Decided) -> Iterator[str]:
    invalid = [d for d in findings.verdict.gated if d.status is Status.INVALID]
    for d in invalid[:INVALID_SHOWN]:
        end = ", as deployed" if d.estimand == DEPLOYED else ""
        cell_name = f"{d.arm}, {d.suite} @ {findings.comparison.label(d.policy)}{end}"
        yield f"{cell_name}: {d.reasons[0]}"
    if len(invalid) > INVALID_SHOWN:
        yield f"and {plural(len(invalid) - INVALID_SHOWN, 'more invalid cell')} in the gate table"


def to_do(findings: Decided) -> str:
    """Return one line that recommends what to do with every arm, or with every policy if nothing was trained."""
    if late_rules_alarm(findings.rules):
        return "What to do: gate this run by the rules that were declared before it."
    if findings.verdict.status is Status.INVALID:
        return "What to do: fix the records or the comparison; nothing is decided."
    lines = verdict_lines(findings)
    parts = []
    open_cells = [d for d in findings.verdict.gated if d.standing is Status.INCONCLUSIVE]
    # missing clusters hold back every open cell, so one remedy fits all
    lacks_clusters = bool(open_cells) and all(d.is_unclustered for d in open_cells)
    for status, words in (_TO_DO | ({Status.INCONCLUSIVE: _NAME_CLUSTERS} if lacks_clusters else {})).items():
        names = [line.name for line in lines if line.status is status]
        parts += [words.format(", ".join(names))] if names else []
    return f"What to do: {'; '.join(parts)}." if parts else "What to do: see the reasons below."


def _losing_seed_lines(findings: Decided) -> list[str]:
    sides = findings.comparison
    places = [
        f"{sides.who(d.arm, d.policy)}, {suite_label(sides, d)}, seed {seed_text(seed)}"
        for d in findings.verdict.gated
        if d.margin and d.status is not Status.FAIL and (seed := d.worst_seed)
        if seed.estimate <= -d.margin and seed.high < 0
    ]
    return [f"One seed alone lost more than the margin: {join_names(places, 2, between='; ')}."] if places else []


def _worst_deployed_lines(findings: Decided, head: Decision | None) -> list[str]:
    """Return a line on the worst drift of a candidate that is served compressed, unless the banner quotes it."""
    cells = [d for d in deployed_cells(findings) if is_compressed_deployment(findings.comparison, d)]
    if not cells or cells[0] is head:
        return []
    d = cells[0]
    who = f"{findings.comparison.who(d.arm, d.policy)} against uncompressed {findings.comparison.reference}"
    rule = f"It is gated: {d.status.value}" if d.gated else f"By the same rule {d.status.value}, but it is not gated"
    place = suite_label(findings.comparison, d)
    return [f"As deployed, the worst of {len(cells)} cells: {who}, {place}: {effect_text(d.effect)}. {rule}."]


def churn_words(findings: Decided, d: Decision) -> str:
    """Return as text the churn: the share of a cell's answers that differ between reference and candidate.

    For comparison it also gives the share that differs between two answers of one checkpoint, if that was measured.
    """
    by_estimand = {c.estimand: c for c in findings.drift.contrasts if c.place[1:] == d.place[1:]}
    contrast = by_estimand.get(d.estimand, by_estimand.get(findings.comparison.base))
    if contrast is None or contrast.churn is None:
        return "churn -"
    rerun = "" if contrast.rerun is None else f", {percent(contrast.rerun)} between two answers of one checkpoint (A/A)"
    return f"churn {percent(contrast.churn)}{rerun}"


def unscored_lines(sides: Comparison, head: Decision) -> list[str]:
    """Return a line with the two drifts that cell ``head`` would have if its unscored answers were counted.

    They are counted as a loss of the candidate for the first drift, and as a gain for the second. For a facet, the
    answers that could not be read are counted instead. The list is empty if there are no such answers.
    """
    if head.worst is None or head.best is None or head.worst == head.best:
        return []
    against_it, for_it = points(head.worst), points(head.best)
    subject = "Answers that could not be read" if head.suite in sides.facets else "Unscored answers"
    return [f"{subject}: all counted against the candidate {against_it} pp, all counted for it {for_it} pp."]


def _claim_line(findings: Decided) -> str:
    if findings.comparison.mode == "serving":
        return "Claim: about this checkpoint under these serving policies (artifact)."
    if findings.verdict.recipe is None:
        return "Claim: about these checkpoints (artifact). Recipe claim not supported: it needs 3 paired seeds."
    by_question: dict[str, list[Status | None]] = {}
    for d in findings.verdict.gated:
        if (question := question_of(findings.comparison, d)) != SERVING:
            by_question.setdefault(question, []).append(d.recipe)
    recipes = {question: worst_recipe(statuses) for question, statuses in by_question.items()}
    text = "; ".join(f"{question} {status.value}" for question, status in recipes.items() if status)
    return (
        f"Claim: about these checkpoints, averaged over paired seeds (artifact). For the recipe, with seed variance "
        f"added: {text}."
    )
