"""The page of a run: the passages about the verdict, and those of all report sections that have content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from kvaudit.core.facets import SERVING, suite_of
from kvaudit.core.text import inline
from kvaudit.reports.page import tables
from kvaudit.reports.page.banner import run_banner
from kvaudit.reports.page.facets import facet_finding, facet_notes, facet_table, failed_table
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Page, screen_of
from kvaudit.reports.page.remarks import cautions, limits, remarks
from kvaudit.reports.sections.base import contrasts_of, lowest_drift, sections_in
from kvaudit.reports.sections.shared.tables import Passage, Table
from kvaudit.reports.sections.shared.words import plural, uncompressed_label
from kvaudit.reports.verdict.rules import DECLARED_AFTER_RUN
from kvaudit.reports.verdict.verdict import PASSED, PRECEDENCE, Decided, Decision, Status

PASSING_RULE = (
    "PASS needs a lower bound above minus the margin, and templates in which no loss of the margin could hide."
)
FACETS_EXPLAIN = "Each score split into its facets: answers with broken form, and what the readable answers did."
_PROBLEMS_SHOWN = 50


def page_of(findings: Findings) -> Page:
    """Return the page of a run, without empty passages."""
    positioned = [
        *verdict_passages(findings).items(),
        *((section.order, section.passage(value, findings)) for section, value in sections_in(findings.values)),
    ]
    passages = tuple(passage for _, passage in sorted(positioned, key=itemgetter(0)) if passage.has_content)
    return Page(findings, run_banner(findings), passages, tuple(remarks(findings)), screen_of(findings))


def verdict_passages(findings: Findings) -> dict[int, Passage]:
    """Return the passages about the verdict, by their position on the page.

    The passages of report sections have positions too (``order``); the page sorts both kinds together.
    """
    moved_facets = facet_table(findings)
    return {
        10: _verdict_passage(findings),
        20: Passage(
            "facets",
            "What moved: facets",
            FACETS_EXPLAIN,
            tables=(failed_table(findings), moved_facets),
            notes=facet_notes(findings) if moved_facets else (),
            finding=facet_finding(findings),
        ),
        30: _limits_passage(findings),
        40: _gate_passage(findings),
        50: _other_contrast_passage(findings),
        100: _compared_passage(findings),
        110: Passage(
            "parity",
            "Capability beside safety",
            "Each point is a cell: in the shaded corner capability holds within its margin while safety does not.",
            figures=("quadrant",) if findings.comparison.capability and findings.comparison.safety else (),
            finding=_parity(findings),
        ),
        120: _heatmap_passage(findings),
        320: problems_passage(findings.problems),
        330: Passage(
            "reproduce",
            "Reproducibility",
            "Hashes, versions and policies as they were recorded.",
            tables=tables.reproducibility(findings.comparison, findings.provenance),
            finding=f"{len(findings.provenance)} facts recorded with the run.",
        ),
    }


def _verdict_passage(findings: Findings) -> Passage:
    top, unit = run_banner(findings), "policy" if findings.comparison.mode == "serving" else "arm"
    return Passage(
        "decided",
        "The verdict in full",
        f"One line per {unit}: its verdict, the verdict of each suite, the cell that decides it"
        + (
            ", and the worst cell of the compressed arm against the uncompressed reference."
            if tables.deployed_cells(findings)
            else "."
        ),
        figures=("forest",),
        tables=(tables.verdict_table(findings),),
        notes=(
            *((f"{top.number}. {top.about}",) if top.number else ()),
            *top.lines,
            "PASS: non-inferior within the margin (shaded). PASS*: the same, with a detectable drop. FAIL: regression "
            "detected, and not shown to be within the margin. NOT MEASURABLE: the reference has nothing to lose here, "
            "or cannot do it. INCONCLUSIVE: the data cannot tell. INVALID: no valid comparison.",
        ),
        finding=top.sentence,
    )


def _limits_passage(findings: Findings) -> Passage:
    caution_lines = cautions(findings, findings.verdict.head)
    section_lines = (
        line for section, value in sections_in(findings.values) for line in section.limits(value, findings)
    )
    return Passage(
        "limits",
        "Limits",
        "What the number cannot show.",
        notes=(*caution_lines, *map(inline, section_lines), *limits(findings)),
        finding=caution_lines[0],
    )


def _gate_passage(findings: Findings) -> Passage:
    gated = findings.verdict.gated
    extras = [
        extra
        for section, value in sections_in(findings.values)
        for extra in section.beside_gate(value, findings, gated)
    ]
    estimands = {d.estimand for d in gated}
    row = "an arm's drift from the reference"
    if findings.comparison.mode == "serving" or estimands == {SERVING}:
        row = f"the drift from {uncompressed_label(findings.comparison)}"
    served = ", both served alike" if estimands == {"alike"} else ", uncompressed" if estimands == {"deployed"} else ""
    return Passage(
        "gate",
        "Gate",
        f"Each row is {row}{served}: below zero is worse. {PASSING_RULE}",
        tables=(tables.gate_table(findings, gated, gated=True), *(e for e in extras if isinstance(e, Table))),
        notes=(*(note for note in extras if isinstance(note, str)), *tables.gate_notes(findings)),
        finding=_status_counts(gated, "gated cells"),
    )


def _status_counts(decisions: Iterable[Decision], noun: str) -> str:
    """Return the counts of statuses as a phrase, such as "24 gated cells: 3 FAIL, 7 INCONCLUSIVE, 14 PASS"."""
    counts = Counter(d.standing for d in decisions)
    parts = [f"{counts[status]} {status.value}" for status in PRECEDENCE if counts[status]]
    return f"{counts.total()} {noun}: {', '.join(parts)}." if parts else ""


_OTHER_CONTRAST = {  # estimand of the cells that are not gated -> their name, and an explanation
    "alike": ("cells served alike", "Candidate and reference served alike: the effect of training, without serving."),
    "deployed": (
        "cells as deployed",
        "The candidate compressed, the reference not: what a user of the compressed candidate notices.",
    ),
}
_SEVERAL_CONTRASTS = ("cells outside the gate", "The same cells against the reference served another way.")


def _other_contrast_passage(findings: Findings) -> Passage:
    ungated = [d for d in findings.verdict.decisions if not d.gated]
    estimands = {d.estimand for d in ungated}
    noun, explain = _OTHER_CONTRAST.get(estimands.pop() if len(estimands) == 1 else "", _SEVERAL_CONTRASTS)
    return Passage(
        "beside",
        "Outside the gate",
        f"{explain} Not part of the verdict.",
        tables=(tables.gate_table(findings, ungated, gated=False),),
        notes=tables.ungated_notes(findings),
        finding=_status_counts(ungated, noun),
    )


def _compared_passage(findings: Findings) -> Passage:
    rules = "the rules fixed before the numbers were seen."
    if findings.rules.declared == DECLARED_AFTER_RUN:
        rules = "rules that were declared after the run, when its numbers could be known."
    return Passage(
        "compared",
        "What was compared",
        f"The two sides of every difference in this report, and {rules}",
        tables=(tables.compared_table(findings),),
        finding=_sides(findings),
    )


def _sides(findings: Decided) -> str:
    sides, rules = findings.comparison, findings.rules
    who = f"{plural(len(sides.candidates), 'arm')} against {sides.reference}"
    if sides.mode == "serving":
        who = f"{plural(len(sides.policies), 'way')} to serve one checkpoint"
    scope = f"{plural(len(sides.suites), 'suite')}, gated under {len(rules.primary)} of {len(sides.policies)} policies"
    return f"{who}; {scope}."


def _parity(findings: Decided) -> str:
    names = []
    for arm in findings.verdict.arms:
        capability, safety = list[Status](), list[Status]()
        for metric, status in arm.suites.items():
            # a facet counts with its suite
            (capability if suite_of(metric) in findings.comparison.capability else safety).append(status)
        if Status.FAIL in safety and all(status in PASSED for status in capability):
            names.append(arm.arm)
    return f"Capability passes and safety fails: {', '.join(names) or 'in no arm'}."


def _heatmap_passage(findings: Decided) -> Passage:
    is_serving, plain = findings.comparison.mode == "serving", uncompressed_label(findings.comparison)
    return Passage(
        "heatmap",
        "Every serving policy",
        "Drift in pp under each serving policy"
        + (f", against {plain}." if is_serving else ", candidate and reference served alike."),
        figures=("heatmap",),
        notes=(
            "Outlined: FAIL. Starred: PASS*. Hatched: the data cannot tell. Gated cells as decided; all others by "
            "the same rule, not adjusted.",
        ),
        finding=lowest_drift(findings.comparison, contrasts_of(findings, "serving" if is_serving else "alike")),
    )


def problems_passage(problems: Sequence[str]) -> Passage:
    """Return the passage about lines and files of the records that could not be read and were left out."""
    return Passage(
        "problems",
        "Problems in the files",
        "Lines and files that were left out.",
        notes=tuple(map(inline, problems[:_PROBLEMS_SHOWN])),
        finding=f"{len(problems)} lines or files were left out.",
    )
