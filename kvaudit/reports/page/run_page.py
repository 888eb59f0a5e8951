"""The page of a run: what it says, in order, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from kvaudit.core.text import inline
from kvaudit.reports.page import tables
from kvaudit.reports.page.banner import about, asides, number, verdict_sentence
from kvaudit.reports.page.facets import facet_notes, facet_table, failed_table, finding
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.gate_table import beside_notes, gate_notes, gate_table
from kvaudit.reports.page.limits import cautions, limits
from kvaudit.reports.page.page import Banner, Page
from kvaudit.reports.page.remarks import late, remarks
from kvaudit.reports.page.screen import screen_of
from kvaudit.reports.sections.base import contrasts_of, lowest_drift, sections_in
from kvaudit.reports.sections.shared.tables import Passage, Table
from kvaudit.reports.sections.shared.words import plural, uncompressed_label
from kvaudit.reports.verdict.rules import DECLARED_AFTER_RUN
from kvaudit.reports.verdict.verdict import PASSED, PRECEDENCE, Decided, Decision, Status


def page_of(findings: Findings) -> Page:
    """The page of a run: what is decided on the first page, then every section that has something to say, folded."""
    placed = [
        *own_passages(findings).items(),
        *((section.order, section.passage(value, findings)) for section, value in sections_in(findings.values)),
    ]
    spoken = tuple(passage for _, passage in sorted(placed, key=itemgetter(0)) if passage.has_content)
    return Page(findings, banner(findings), spoken, tuple(remarks(findings)), screen_of(findings))


def banner(findings: Findings) -> Banner:
    """Verdict, the number, and what they are about."""
    verdict = findings.verdict
    head = verdict.head
    return Banner(
        title=f"KV-cache compression audit: {inline(findings.drift.run)}",
        status=verdict.status,
        sentence=verdict_sentence(verdict),
        number=number(head) if head and head.effect else "",
        about=about(findings, head) if head else "",
        banner_lines=tuple(asides(findings, head)),
        alarm=inline(late(findings.rules)),
    )


def own_passages(findings: Findings) -> dict[int, Passage]:
    """What tells of the verdict itself, by its place among the sections."""
    return {
        10: _decided_passage(findings),
        20: _facets_passage(findings),
        30: _limits_passage(findings),
        40: _gate_passage(findings),
        50: _beside_passage(findings),
        100: _compared_passage(findings),
        110: _parity_passage(findings),
        120: _heatmap_passage(findings),
        320: _problems_passage(findings.problems),
        330: Passage(
            "reproduce",
            "Reproducibility",
            "Hashes, versions and policies as they were recorded.",
            tables=tables.reproducibility(findings.comparison, findings.provenance),
            finding=f"{len(findings.provenance)} facts recorded with the run.",
        ),
    }


def _decided_passage(findings: Findings) -> Passage:
    top, one = banner(findings), "policy" if findings.comparison.mode == "serving" else "arm"
    return Passage(
        "decided",
        "The verdict in full",
        f"One line per {one}: its verdict, the verdict of each suite, the cell that decides it"
        + (", and the worst that a user of the compressed arm meets." if tables.deployed(findings) else "."),
        figures=("forest",),
        tables=(tables.decided_table(findings),),
        notes=(
            *((f"{top.number}. {top.about}",) if top.number else ()),
            *top.banner_lines,
            "PASS: non-inferior within the margin (shaded). PASS*: the same, with a detectable drop. FAIL: "
            "regression detected and not shown within the margin. NOT MEASURABLE: the reference has nothing to "
            "lose here, or cannot do it. INCONCLUSIVE: the data cannot tell. INVALID: no valid comparison.",
        ),
        finding=top.sentence,
    )


def _limits_passage(findings: Findings) -> Passage:
    said = cautions(findings, findings.verdict.head)
    own = (line for section, value in sections_in(findings.values) for line in section.limits(value, findings))
    return Passage(
        "limits",
        "Limits",
        "What the number cannot say, even when it is unflattering.",
        notes=(*said, *map(inline, own), *limits(findings)),
        finding=said[0],
    )


def _facets_passage(findings: Findings) -> Passage:
    table = facet_table(findings)
    return Passage(
        "facets",
        "What moved: facets",
        "Each score taken apart into what happened: broken form by itself, and safety among the answers that could be "
        "read.",
        tables=(failed_table(findings), table),
        notes=facet_notes(findings) if table else (),
        finding=finding(findings),
    )


def _gate_passage(findings: Findings) -> Passage:
    gated = findings.verdict.gated
    beside = [
        one for section, value in sections_in(findings.values) for one in section.beside_gate(value, findings, gated)
    ]
    serving = findings.comparison.mode == "serving"
    drift_of = (
        f"drift from {uncompressed_label(findings.comparison)}" if serving else "drift of each arm from the reference"
    )
    alone = {d.estimand for d in gated}
    alike = ", both served alike" if alone == {"alike"} else ", uncompressed" if alone == {"deployed"} else ""
    return Passage(
        "gate",
        "Gate",
        f"Each row is a {drift_of}{alike}: below zero is worse. PASS needs the lower bound above minus the margin, and "
        "templates that could not hide a loss of it.",
        tables=(gate_table(findings, gated, gated=True), *(table for table in beside if isinstance(table, Table))),
        notes=(*(note for note in beside if isinstance(note, str)), *gate_notes(findings)),
        finding=_statuses(gated, "gated cells"),
    )


def _statuses(decisions: Iterable[Decision], what: str) -> str:
    """24 gated cells: 3 FAIL, 7 INCONCLUSIVE, 14 PASS."""
    found = Counter(d.standing for d in decisions)
    parts = [f"{found[status]} {status.value}" for status in PRECEDENCE if found[status]]
    return f"{found.total()} {what}: {', '.join(parts)}." if parts else ""


_OTHER_WAY = {  # by what is decided beside the verdict: the cells, and a sentence for a stranger
    "alike": ("cells served alike", "Candidate and reference served alike: what training changed, compression apart."),
    "deployed": (
        "cells as deployed",
        "The candidate compressed, the reference not: what a user of the compressed candidate notices.",
    ),
}
_OTHER_WAYS = ("cells beside the verdict", "The same cells against the reference served another way.")


def _beside_passage(findings: Findings) -> Passage:
    shown = [d for d in findings.verdict.decisions if not d.gated]
    cells, explain = _OTHER_WAY.get("/".join({d.estimand for d in shown}), _OTHER_WAYS)
    return Passage(
        "beside",
        "Beside the gate",
        f"{explain} Not part of the verdict.",
        tables=(gate_table(findings, shown, gated=False),),
        notes=beside_notes(findings),
        finding=_statuses(shown, cells),
    )


def _compared_passage(findings: Findings) -> Passage:
    fixed = "the rules fixed before the numbers were seen."
    if findings.rules.declared == DECLARED_AFTER_RUN:
        fixed = "rules that were declared after the run, when its numbers could be known."
    return Passage(
        "compared",
        "What was compared",
        f"The two sides of every difference in this report, and {fixed}",
        tables=(tables.compared_table(findings),),
        finding=_sides(findings),
    )


def _sides(findings: Decided) -> str:
    sides, rules = findings.comparison, findings.rules
    who = f"{plural(len(sides.candidates), 'arm')} against {sides.reference}"
    if sides.mode == "serving":
        who = f"{plural(len(sides.policies), 'way')} to serve one checkpoint"
    asked = f"{plural(len(sides.suites), 'suite')}, gated under {len(rules.primary)} of {len(sides.policies)} policies"
    return f"{who}; {asked}."


def _parity_passage(findings: Decided) -> Passage:
    return Passage(
        "parity",
        "Capability beside safety",
        "Each point is a cell: in the shaded corner capability holds within its margin while safety does not.",
        figures=("quadrant",) if findings.comparison.capability and findings.comparison.safety else (),
        finding=_parity(findings),
    )


def _parity(findings: Decided) -> str:
    capability = set(findings.comparison.capability)
    found = [
        a for a in findings.verdict.arms if Status.FAIL in (s for name, s in a.suites.items() if name not in capability)
    ]
    names = [a.arm for a in found if all(s in PASSED for name, s in a.suites.items() if name in capability)]
    return f"Capability passes and safety fails: {', '.join(names) or 'in no arm'}."


def _heatmap_passage(findings: Decided) -> Passage:
    serving, plain = findings.comparison.mode == "serving", uncompressed_label(findings.comparison)
    return Passage(
        "heatmap",
        "Every serving policy",
        "Drift in pp under each serving policy"
        + (f", against {plain}." if serving else ", candidate and reference served alike."),
        figures=("heatmap",),
        notes=(
            "Outlined: FAIL. Starred: PASS*. Hatched: the data cannot tell. Gated cells as decided; all others by "
            "the same rule, not adjusted.",
        ),
        finding=lowest_drift(findings.comparison, contrasts_of(findings, "serving" if serving else "alike")),
    )


def _problems_passage(problems: Sequence[str]) -> Passage:
    return Passage(
        "problems",
        "Problems in the files",
        "Lines and files that were kept out.",
        notes=tuple(map(inline, problems[:50])),
        finding=f"{len(problems)} lines or files were kept out.",
    )
