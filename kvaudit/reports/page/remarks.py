"""The lines to read with a verdict: remarks on rules, waivers, labels and versions, then cautions and limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from kvaudit.core.facets import PARITY, suite_of
from kvaudit.core.provenance import (
    MADE_UP,
    STOPPED,
    TOOL_FORMS_USED,
    TOOL_SYSTEM_MOVED,
    UNSTABLE_NAMES,
    VERSIONS_USED,
    prompts_by_question,
    table_of,
)
from kvaudit.core.text import at_length, inline, join_names, length_label
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.records.rows import LIVE_BYTES
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.cache_use import lacks_live_bytes
from kvaudit.reports.sections.shared.words import (
    blind_spot_text,
    effect_text,
    error_rates_text,
    metric_label,
    percent,
    plural,
    rounds_error_rates_text,
    suite_label,
)
from kvaudit.reports.stats.rule import blind_spot
from kvaudit.reports.stats.seeds import SEEDS_ADVISED
from kvaudit.reports.verdict.comparison import Comparison, some_of
from kvaudit.reports.verdict.controls import shipped_rounds_rates
from kvaudit.reports.verdict.decide import is_independent_of_reward
from kvaudit.reports.verdict.family import gated_cells
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.rules import CONTRASTED, DECLARED_AFTER_RUN, WARN, Rules, default_margins_line
from kvaudit.reports.verdict.verdict import Decided, Decision, Status

_TOOL_REMARKS = {
    "text": (
        "TOOLS AS TEXT in {}: the prompt lists tools and asks for calls in kvaudit's own form, not in the model's. The "
        "chat template supports no tools or not these calls, or the spec asks for this form."
    ),
    "any": "TOOLS of a template with an unknown form of calls in {}: answers are read in every form that is known.",
}
# of the labels that tests/test_suites_phrases.py counts: two models' answers to XSTest, and PyRIT's
PHRASE_ERRORS = "7 to 10 of 100 misread"


def remarks(findings: Findings) -> Iterator[str]:
    """Yield one line per remark that qualifies the verdict, such as a waiver; there may be none."""
    why, stopped = findings.verdict.adjustment.reason, table_of(findings.provenance, STOPPED).items()
    positioned: list[tuple[int, Iterable[str]]] = [
        (10, not_measurable(findings)),
        (15, _question_remarks(findings.provenance)),
        (16, _weight_remarks(findings.comparison)),
        (20, _rule_remarks(findings)),
        (40, _judge_remarks(findings)),
        (41, _waiver_remarks(findings)),
        (50, _label_remarks(findings)),
        (70, (f"STOPPED in training, as declared: all arms of seed {seed} end {how}." for seed, how in stopped)),
        (71, _version_remarks(findings.provenance)),
        (72, _prompt_remarks(findings.provenance)),
        (73, _tool_remarks(findings.provenance)),
        (80, [f"FAIL is adjusted by Holm instead of max-T over the family: {why}."] if why else ()),
        *((section.remarks_at, section.remarks(value, findings)) for section, value in sections_in(findings.values)),
    ]
    for _, lines in sorted(positioned, key=itemgetter(0)):
        yield from lines


def not_measurable(findings: Decided) -> list[str]:
    """Return a line per suite on which the reference has nothing to lose: the reason and the number of gated cells."""
    cells: dict[tuple[str, int, str], int] = {}
    for d in findings.verdict.gated:
        if not d.is_measurable:
            place = (metric_label(findings.comparison, d.suite), d.context_tokens, d.reasons[0].text)
            cells[place] = cells.get(place, 0) + 1
    has_lengths = len(findings.comparison.contexts) > 1
    lines = [
        f"{suite}{f' {at_length(length)}' if has_lengths else ''} ({plural(count, 'gated cell')}), {why}"
        for (suite, length, why), count in cells.items()
    ]
    return [f"{Status.NOT_MEASURABLE.value}: {line}." for line in lines]


def _question_remarks(provenance: Mapping[str, Any]) -> Iterator[str]:
    if suites := provenance.get(MADE_UP):
        yield inline(f"MADE-UP QUESTIONS: {suites} are kvaudit's own, which show less about a model than public rows.")


def _weight_remarks(sides: Comparison) -> Iterator[str]:
    """Yield remarks on checkpoints that are one model although the run takes them for several."""
    for arm in sides.arms if sides.mode == "training" else ():
        if seeds := sides.alike(arm):
            yield inline(
                f"EQUAL SEEDS: seeds {join_names(map(str, seeds), 9)} of {arm} have the same weights, so they are one "
                "training run and no claim is made about the recipe."
            )
    for arm in sides.candidates:
        if seeds := sides.equal_to_reference(arm):
            yield inline(
                f"EQUAL WEIGHTS: {arm} (seed {join_names(map(str, seeds), 9)}) has exactly the weights of "
                f"{sides.reference}. Check the path, and that the trainer saved what it trained."
            )


def late_rules_alarm(rules: Rules) -> str:
    """Return the alarm if the rules were declared after the run; empty if they were declared before."""
    if rules.declared != DECLARED_AFTER_RUN:
        return ""
    return (
        f"{rules.source} came after the run, so its author may have seen the numbers: kvaudit gate refuses this "
        "verdict."
    )


def _rule_remarks(findings: Decided) -> Iterator[str]:
    rules = findings.rules
    if reason := findings.drift.unclustered:
        sentence = f"{reason}."
        if rules.items_are_independent:
            sentence = "Items were declared independent by the user (--items-are-independent): no cluster is named."
        yield (
            f"{sentence} Each item counts as its own template: if items do share templates, documents or scenarios, "
            "the interval is too narrow and the blind spot too small."
        )
    if rules.sha256 is not None:
        line = f"Gate: {rules.source}, sha256 {rules.sha256[:12]}, {rules.declared}"
        if rules.declared == DECLARED_AFTER_RUN:
            line += f", which changes {'; '.join(rules.changes) or 'nothing that decides'}"
        yield f"{line}."
    if rules.defaults:
        points = {suite: round(100 * margin, 6) for suite, margin in rules.margins.items()}
        yield default_margins_line(rules.defaults, points)
    if rules.profile:
        yield f"Rules: profile {rules.profile}, one-sided level {rules.alpha:g}."
    if findings.verdict.status is Status.INCONCLUSIVE and rules.on_inconclusive == WARN:
        yield "WARNING: the gate lets INCONCLUSIVE through (on_inconclusive: warn); it is not a PASS."
    if findings.verdict.status is Status.NOT_MEASURABLE and rules.not_measurable == WARN:
        yield "WARNING: the gate lets NOT MEASURABLE through (not_measurable: warn); it is not a PASS."


def _judge_remarks(findings: Decided) -> Iterator[str]:
    sides, cells = findings.comparison, gated_cells(findings.drift, findings.rules)
    if sides.rewarded and not is_independent_of_reward(cells, sides):
        rewarded = ", ".join(sides.rewarded)
        yield f"{ReasonCode.TRAINED}: no gated safety suite is independent of the reward, which also graded {rewarded}."
    gated = {suite_of(d.suite) for d in findings.verdict.gated}
    if suites := ", ".join(suite for suite in sides.by_phrases if suite in gated):
        grades = f"Phrase rules grade ({PHRASE_ERRORS}): {suites}"
        yield f"{grades}. The errors are of answers that people labelled; make no claim from such grades."


def _label_remarks(findings: Decided) -> Iterator[str]:
    if findings.verdict.judged is None:
        return
    sides, gated = findings.comparison, findings.verdict.gated
    labelled = [d for d in gated if d.judged]
    changed = [
        f"{_cell_place(sides, d)}: {d.status.value}, by the judge {d.judged}"
        for d in labelled
        if d.judged is not d.status
    ]
    effect = f"They change {join_names(changed, between='; ')}." if changed else "They change the verdict of none."
    yield f"Human labels decide {len(labelled)} of {len(gated)} gated cells. {effect}"
    if withheld := [_cell_place(sides, d) for d in gated if any(r.code == ReasonCode.JUDGE_DIFF for r in d.reasons)]:
        yield f"{ReasonCode.JUDGE_DIFF}: judge labels alone cannot pass {join_names(withheld, between='; ')}."
    if findings.verdict.judged is not findings.verdict.status:
        yield f"By the judge alone the verdict is {findings.verdict.judged.value}."


def _tool_remarks(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield remarks on items whose tools the prompt lists as text, and on tool calls in a form unknown to kvaudit."""
    used = table_of(provenance, TOOL_FORMS_USED)
    counts = {str(suite): dict(forms) for suite, forms in used.items() if isinstance(forms, Mapping)}
    for form, text in _TOOL_REMARKS.items():
        places = [
            f"{suite} ({forms[form]} of {sum(forms.values())} items)"
            for suite, forms in sorted(counts.items())
            if form in forms and all(isinstance(count, int) for count in forms.values())
        ]
        if places:
            yield inline(text.format(join_names(places)))
    if provenance.get(TOOL_SYSTEM_MOVED) is True:
        yield (
            "SYSTEM PROMPTS are part of the user's message where tools are offered: the chat template drops them "
            "before a tool's result."
        )


def _cell_place(sides: Comparison, d: Decision) -> str:
    return f"{d.estimand}, {d.arm}, {d.suite} {length_label(d.context_tokens)} @ {sides.label(d.policy)}"


def _waiver_remarks(findings: Decided) -> Iterator[str]:
    for waiver in findings.waivers:
        cells = [d for d in findings.verdict.decisions if d.waiver is waiver]
        places = join_names(f"{d.arm}, {d.suite} @ {findings.comparison.label(d.policy)}" for d in cells)
        effect = f"lets {len(cells)} cells through ({places})" if cells else "matches no cell and does nothing"
        if len(cells) == 1:
            effect = f"lets {cells[0].status.value} through ({places})"
        # the date first: pages that name remarks by their first words cut names such as "Dr. A. Byron"
        yield f"WAIVER until {waiver.expires} by {waiver.who}: {waiver.why}; it {effect}."
    if findings.verdict.unwaived is not findings.verdict.status:
        yield f"Without waivers the verdict is {findings.verdict.unwaived.value}."


def _version_remarks(provenance: Mapping[str, Any]) -> Iterator[str]:
    # a remark and no more: other versions change numbers by rounding at most
    table = provenance.get(VERSIONS_USED)
    if isinstance(table, Mapping) and len(table) > 1:
        versions = [f"{line} (since {since})" for line, since in sorted(table.items(), key=lambda pair: str(pair[1]))]
        yield f"VERSIONS: the run used {len(versions)} sets of versions: {some_of(versions)}."


def _prompt_remarks(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield a remark if prompts differ between policies, or contain the date and so may differ on another day."""
    names = str(provenance.get(UNSTABLE_NAMES) or "")
    differing = [name for name, prompts in prompts_by_question(provenance).items() if len(set(prompts.values())) > 1]
    template = f"the chat template uses {names}, so its text changes from day to day" if names else ""
    if differing:
        yield (
            f"PROMPTS differ between policies in {some_of(differing)}: "
            f"{template or 'the chat template wrote different text'}. Differences there need not come from the cache; "
            "run these units again within one day."
        )
    elif template:
        yield f"PROMPTS may differ on another day: {template}. Within this run all policies had the same prompts."


def cautions(findings: Findings, head: Decision | None) -> list[str]:
    """Return cautions to read with the quoted drift: unsampled templates, error rates, the cell's other comparison.

    A cell is compared with the reference served alike and with the uncompressed one; the banner quotes only one of
    them.
    """
    other_contrasts = [
        _other_contrast_line(findings.comparison, d)
        for d in findings.verdict.decisions
        if d.effect and head and d.place[1:] == head.place[1:] and {d.estimand, head.estimand} == set(CONTRASTED)
    ]
    fewest = min((c.n_clusters for c in findings.drift.cells), default=0)
    lines = (
        blind_spot_line(findings, head, fewest),
        *broken_template_lines(findings),
        *other_contrasts,
        *_recipe_error_rate(findings),
        *error_rate_lines(findings),
    )
    return list(map(inline, lines))


def blind_spot_line(findings: Decided, head: Decision | None, fewest: int, units: str = "templates") -> str:
    """Return a line on the blind spot: the largest share of broken templates that the sample may have missed.

    ``head`` is the cell that the banner quotes; without one, the share is computed for ``fewest`` templates. ``units``
    is what the line calls templates; it is "items" if each item is its own template.
    """
    alpha = findings.rules.alpha
    if head and head.effect and head.blind_spot is not None:
        return blind_spot_text(head.blind_spot, alpha, head.effect.n_clusters, units)
    return blind_spot_text(blind_spot(fewest, alpha), alpha, fewest, units)


_RULED_OUT = (
    "Broken templates: in {cells} with the interval inside the margin, a model that loses the margin is ruled out even "
    "with the seen templates reweighted and one more that lost everything; a loss of {most} is not ({place})."
)
_NOT_RULED_OUT = (
    "Broken templates: in {cells} with the interval inside the margin, the seen templates, reweighted, with one more "
    "that lost everything, allow a loss beyond the margin, up to {most} ({place}): the data cannot tell."
)


def broken_template_lines(findings: Decided) -> list[str]:
    """Return lines on the loss that a few totally failed templates could hide in cells that pass by their interval."""
    cells = [d for d in findings.verdict.gated if d.template_bound is not None and d.estimand != PARITY]
    failing = [d for d in cells if any(reason.code == ReasonCode.TEMPLATES for reason in d.reasons)]
    lines = []
    for group, words in ((failing, _NOT_RULED_OUT), ([d for d in cells if d not in failing], _RULED_OUT)):
        if group:
            d = min(group, key=lambda d: (d.template_bound or 0.0) + (d.margin or 0.0))
            place = f"{findings.comparison.who(d.arm, d.policy)}, {suite_label(findings.comparison, d)}"
            loss = f"{-100 * min(d.template_bound or 0.0, 0.0):.2f} pp"
            lines.append(words.format(cells=plural(len(group), "cell"), most=loss, place=place))
    return lines


def _other_contrast_line(sides: Comparison, d: Decision) -> str:
    """Return a sentence on ``d``, the drift of the quoted cell by the comparison that is not quoted.

    The two comparisons are "alike" (both sides under one policy) and "deployed" (the candidate under its policy against
    the uncompressed reference).
    """
    assert d.effect is not None
    policy = sides.label(d.policy)
    if d.estimand == "deployed":
        who = f"{d.arm} served under {policy} against uncompressed {sides.reference}"
        return f"End to end, {who}: {effect_text(d.effect)}."
    return f"Served alike, {d.arm} against {sides.reference}, both under {policy}: {effect_text(d.effect)}."


def _recipe_error_rate(findings: Findings) -> list[str]:
    has_few = len(findings.comparison.seeds) < SEEDS_ADVISED and findings.verdict.recipe is not None
    if not has_few or findings.calibration is None:
        return []
    return [
        f"With fewer than {SEEDS_ADVISED} seeds the 95 % interval of a recipe raises a false alarm in up to "
        f"{percent(findings.calibration.recipe_three_seeds_max)} of simulated audits; with {SEEDS_ADVISED} seeds "
        "it is about 5 %."
    ]


def error_rate_lines(findings: Findings) -> list[str]:
    """Return the gate's error rates, from simulations whose results ship with kvaudit; empty for an INVALID run."""
    c = findings.calibration
    if c is None or findings.verdict.status is Status.INVALID:
        return []
    rules = findings.rules
    if findings.comparison.looks:  # other bounds, tested more than once
        text = rounds_error_rates_text(shipped_rounds_rates(), rules.alpha, rules.margins.values())
    else:
        text = (
            f"{error_rates_text(c, rules.alpha, rules.margins.values(), rules.ratios.values())} Simulated at {c.scale} "
            f"scale ({c.simulations:,} runs). Two-sided false alarms at 5 %: at most {percent(c.type_one_max)}; "
            f"coverage of 95 % intervals: at least {percent(c.coverage_min)}."
        )
    return [
        f"{text} A reference with nothing to lose counts as measurable in at most {percent(c.nothing_to_lose_max)} of "
        f"runs, a healthy one as not measurable in at most {percent(c.turned_away_max)}."
    ]


def limits(findings: Decided) -> tuple[str, ...]:
    """Return a sentence for each limit that holds for every verdict."""
    graded = "Answers are graded by program; where a person would grade otherwise, that is not corrected here."
    if any(c.people for c in findings.drift.contrasts):
        graded = "Outside the cells that people labelled, answers are graded as recorded."
    lines = [
        "The verdict covers the listed suites, policies and lengths only.",
        graded,
        f"FAIL uses {findings.verdict.adjustment.method} over the gated cells; every interval is unadjusted, and "
        "outside the gate exploratory.",
    ]
    if lacks_live_bytes(findings.drift):
        lines.append(
            f"Live bytes of the cache are unknown: some records have no {LIVE_BYTES}, which earlier versions of "
            "kvaudit did not count. The allocated bytes are known."
        )
    if findings.comparison.mode == "training" and findings.verdict.recipe is None:
        lines.append("With fewer than 3 paired seeds no claim is made about the training recipe.")
    return tuple(lines)
