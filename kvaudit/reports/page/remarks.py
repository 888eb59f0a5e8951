"""What must be read wherever a verdict is read: by whose rules, waivers, labels and versions it came about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from kvaudit.core.provenance import (
    STOPPED,
    TOOL_FORMS_USED,
    TOOL_SYSTEM_MOVED,
    UNSTEADY,
    WORKED_WITH,
    prompts_by_question,
    table_of,
)
from kvaudit.core.text import at_length, inline, length_label, some
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.sections.base import found_in
from kvaudit.reports.sections.shared.words import counted, spelled
from kvaudit.reports.verdict.comparison import Comparison, some_of
from kvaudit.reports.verdict.downgrades import is_apart, suite_of
from kvaudit.reports.verdict.family import gated_cells
from kvaudit.reports.verdict.reasons import Reason, ReasonCode
from kvaudit.reports.verdict.rules import DECLARED_AFTER_RUN, WARN, Rules, default_margins_line
from kvaudit.reports.verdict.verdict import Decided, Decision, Status

_TOOL_REMARKS = {
    "text": (
        "TOOLS AS TEXT in {}: the prompt lists tools and asks for calls in kvaudit's own form, not in the model's. The "
        "chat template takes no tools or not these calls, or the spec names this form."
    ),
    "any": "TOOLS of a template with an unknown form of calls in {}: answers are read in every form that is known.",
}
# of the labels that tests/test_suites_phrases.py counts: two models' answers to XSTest, and PyRIT's
PHRASE_ERRORS = "they misread 7 to 10 of 100 answers that people labelled"


def remarks(findings: Findings) -> Iterator[str]:
    """One plain line each; none for a run of one set of versions that is decided by its spec."""
    why, stopped = findings.verdict.adjustment.reason, table_of(findings.provenance, STOPPED).items()
    placed: list[tuple[int, Iterable[str]]] = [
        (10, not_measurable(findings)),
        (20, _by_which_rules(findings)),
        (40, _judges(findings)),
        (41, _waivers(findings)),
        (50, _labels(findings)),
        (70, (f"STOPPED in training, as declared: all arms of seed {seed} end {how}." for seed, how in stopped)),
        (71, _versions(findings.provenance)),
        (72, _prompts(findings.provenance)),
        (73, _tool_forms(findings.provenance)),
        (80, [f"FAIL is held to the family by Holm instead of max-T: {why}."] if why else ()),
        *((section.remarks_at, section.remarks(value, findings)) for section, value in found_in(findings.values)),
    ]
    for _, lines in sorted(placed, key=itemgetter(0)):
        yield from lines


def _by_which_rules(findings: Decided) -> Iterator[str]:
    rules = findings.rules
    if findings.drift.unclustered is not None:
        yield _unclustered(findings.drift.unclustered, rules)
    if rules.sha256 is not None:
        yield _gate(rules)
    if rules.defaults:
        yield default_margins_line(rules.defaults, {suite: round(100 * own, 6) for suite, own in rules.margins.items()})
    if rules.profile:
        yield f"Rules: profile {rules.profile}, one-sided level {rules.alpha:g}."
    if findings.verdict.status is Status.INCONCLUSIVE and rules.on_inconclusive == WARN:
        yield "WARNING: INCONCLUSIVE is let through (on_inconclusive: warn); it is not a PASS."
    if findings.verdict.status is Status.NOT_MEASURABLE and rules.not_measurable == WARN:
        yield "WARNING: NOT MEASURABLE is let through (not_measurable: warn); it is not a PASS."


def not_measurable(findings: Decided) -> list[str]:
    """What cannot be measured on this reference, why, and in how many of the gated cells; one line per reason."""
    cells: dict[tuple[str, int, str], int] = {}
    for d in findings.verdict.gated:
        if not d.is_measurable:
            place = (spelled(findings.comparison, d.suite), d.context_tokens, d.reasons[0].text)
            cells[place] = cells.get(place, 0) + 1
    several = len(findings.comparison.contexts) > 1
    found = [
        f"{suite}{f' {at_length(length)}' if several else ''} ({counted(count, 'gated cell')}), {why}"
        for (suite, length, why), count in cells.items()
    ]
    return [f"{Status.NOT_MEASURABLE.value}: {line}." for line in found]


def _unclustered(reason: Reason, rules: Rules) -> str:
    """What holds where nothing says which items share a template: the user's word for it, or what to do."""
    said = f"{reason}."
    if rules.items_are_independent:
        said = "Items were declared independent by the user (--items-are-independent): no cluster is named."
    return (
        f"{said} Each item counts as its own template: if items do share templates, documents or scenarios, the "
        "interval is too narrow and the blind spot too small."
    )


def late(rules: Rules) -> str:
    """The alarm of rules that came after the run; empty for any others."""
    if rules.declared != DECLARED_AFTER_RUN:
        return ""
    return (
        f"{rules.source} came after the run. Its author may have seen the numbers: this verdict decides nothing, and "
        "kvaudit gate refuses it."
    )


def _gate(rules: Rules) -> str:
    line = f"Gate: {rules.source}, sha256 {(rules.sha256 or '')[:12]}, {rules.declared}"
    if rules.declared != DECLARED_AFTER_RUN:
        return line + "."
    return f"{line}, which changes " + ("; ".join(rules.changes) if rules.changes else "nothing that decides") + "."


def _judges(findings: Decided) -> Iterator[str]:
    sides, cells = findings.comparison, gated_cells(findings.drift, findings.rules)
    if sides.rewarded and not is_apart(cells, sides):
        rewarded = ", ".join(sides.rewarded)
        yield f"{ReasonCode.TRAINED}: no gated safety suite is apart from the reward, which graded {rewarded} too."
    gated = {suite_of(d.suite, sides) for d in findings.verdict.gated}
    if own := [suite for suite in sides.by_phrases if suite in gated]:
        yield f"Phrase rules alone read refusals: of {', '.join(own)}; {PHRASE_ERRORS}, so no claim rests on them."


def _labels(findings: Decided) -> Iterator[str]:
    if findings.verdict.judged is None:
        return
    sides, gated = findings.comparison, findings.verdict.gated
    people = [d for d in gated if d.judged]
    turned = [d for d in people if d.judged is not d.status]
    cells = [f"{_place(sides, d)}: {d.status.value}, by the judge {d.judged}" for d in turned]
    turns = f" They change {some(cells, between='; ')}." if turned else " They change the verdict of none."
    yield f"Human labels decide {len(people)} of {len(gated)} gated cells.{turns}"
    if held := [_place(sides, d) for d in gated if any(r.code == ReasonCode.JUDGE_DIFF for r in d.reasons)]:
        yield f"{ReasonCode.JUDGE_DIFF}: judge labels alone cannot pass {some(held, between='; ')}."
    if findings.verdict.judged is not findings.verdict.status:
        yield f"On the judge's labels alone the verdict would be {findings.verdict.judged.value}."


def _versions(provenance: Mapping[str, Any]) -> Iterator[str]:
    """What a run was worked on with, where that changed: a remark, as it changes numbers by rounding at most."""
    table = provenance.get(WORKED_WITH)
    if isinstance(table, Mapping) and len(table) > 1:
        found = [f"{line} (since {since})" for line, since in sorted(table.items(), key=lambda pair: str(pair[1]))]
        yield f"VERSIONS: the run was worked on with {len(found)} sets of versions: {some_of(found)}."


def _prompts(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Whether one question was asked by other prompts under other policies, and what of the template may do so."""
    names = str(provenance.get(UNSTEADY) or "")
    other = [name for name, own in prompts_by_question(provenance).items() if len(set(own.values())) > 1]
    writes = f"the chat template names {names}, by which it writes something else another day" if names else ""
    if other:
        why = writes or "the chat template wrote something else"
        yield (
            f"PROMPTS differ between policies in {some_of(other)}: {why}. "
            "What differs there need not come from the cache; run these units again within one day."
        )
    elif writes:
        yield f"PROMPTS may differ on another day: {writes}. Within this run all policies were asked alike."


def _tool_forms(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Which items offered their tools as text of the prompt, and which answers were read without a known form."""
    used = table_of(provenance, TOOL_FORMS_USED)
    for form, text in _TOOL_REMARKS.items():
        counts = {str(suite): dict(forms) for suite, forms in used.items() if isinstance(forms, Mapping)}
        places = [
            f"{suite} ({forms[form]} of {sum(forms.values())} items)"
            for suite, forms in sorted(counts.items())
            if form in forms and all(isinstance(count, int) for count in forms.values())
        ]
        if places:
            yield inline(text.format(some(places)))
    if provenance.get(TOOL_SYSTEM_MOVED) is True:
        yield (
            "SYSTEM PROMPTS stand in the user's message where there are tools: the chat template drops them before a "
            "tool's result."
        )


def _place(sides: Comparison, d: Decision) -> str:
    return f"{d.estimand}, {d.arm}, {d.suite} {length_label(d.context_tokens)} @ {sides.label(d.policy)}"


def _waivers(findings: Decided) -> Iterator[str]:
    for waiver in findings.waivers:
        cells = [d for d in findings.verdict.decisions if d.waiver is waiver]
        places = some(f"{d.arm}, {d.suite} @ {findings.comparison.label(d.policy)}" for d in cells)
        let = f"lets {len(cells)} cells through ({places})" if cells else "fits no cell and does nothing"
        if len(cells) == 1:
            let = f"lets {cells[0].status.value} through ({places})"
        # the date first: pages that name remarks by their first words cut names such as "Dr. A. Byron"
        yield f"WAIVER until {waiver.expires} by {waiver.who}: {waiver.why}; it {let}."
    if findings.verdict.unwaived is not findings.verdict.status:
        yield f"Without waivers the verdict is {findings.verdict.unwaived.value}."
