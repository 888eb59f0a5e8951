"""The page of a run: what it says, in order, as plain values."""

from __future__ import annotations

from kvaudit.core.text import inline
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.drift import AMPLIFICATION
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.gate.rules import DECLARED_AFTER_RUN
from kvaudit.reports.layout.names import plain_words
from kvaudit.reports.page import beside, detail_tables, summaries, tables
from kvaudit.reports.page.about import about, asides, number, verdict_sentence
from kvaudit.reports.page.context_tables import contexts_section
from kvaudit.reports.page.engine_tables import engines_section
from kvaudit.reports.page.facets import facet_notes, facet_table, failed_table, finding
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.floor_tables import floor_section, floor_sentences, gate_floor_table
from kvaudit.reports.page.gate_table import beside_notes, gate_notes, gate_table
from kvaudit.reports.page.guard_tables import guards_section
from kvaudit.reports.page.judge_tables import judges_section
from kvaudit.reports.page.limits import cautions, limits
from kvaudit.reports.page.mechanism_tables import mechanism_section
from kvaudit.reports.page.page import Banner, Page, Section
from kvaudit.reports.page.remarks import late, remarks
from kvaudit.reports.page.remedy_tables import remedies_section


def page_of(findings: Findings) -> Page:
    """The page of a run: what is decided on the first page, then every section that has something to say, folded."""
    parts = [
        *_verdict_sections(findings),
        *_detail_sections(findings),
        *_run_sections(findings),
        *_closing_sections(findings),
    ]
    spoken = tuple(part for part in parts if any(part.tables) or part.figures or part.notes or part.examples)
    return Page(findings, banner(findings), spoken, tuple(remarks(findings)))


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
        asides=tuple(asides(findings, head)),
        alarm=inline(late(findings.rules)),
    )


def _verdict_sections(findings: Findings) -> list[Section]:
    said = cautions(findings, findings.verdict.head)
    one = "policy" if findings.comparison.mode == "serving" else "arm"
    return [
        Section(
            "decided",
            "What is decided",
            f"One line per {one}: its verdict, the verdict of each suite, the cell that decides it"
            + (", and the worst that a user of the compressed arm meets." if tables.deployed(findings) else "."),
            figures=("forest",),
            tables=(tables.decided_table(findings),),
            notes=(
                "PASS: non-inferior within the margin (shaded). PASS*: the same, with a detectable drop. FAIL: "
                "regression detected and not shown within the margin. NOT MEASURABLE: the reference has nothing to "
                "lose here, or cannot do it. INCONCLUSIVE: the data cannot tell. INVALID: no "
                "valid comparison.",
            ),
            first=True,
        ),
        _facet_section(findings),
        Section(
            "limits",
            "Limits",
            "What the number cannot say, even when it is unflattering.",
            notes=(*said, *map(inline, beside.cleared_budgets(findings)), *limits(findings)),
            finding=said[0],
        ),
        _gate_section(findings),
        _beside_section(findings),
        *([remedies] if (remedies := remedies_section(findings)) else []),
        *([contexts] if (contexts := contexts_section(findings)) else []),
        *([floor] if (floor := floor_section(findings)) else []),
        *([engines] if (engines := engines_section(findings)) else []),
        _compared_section(findings),
    ]


def _facet_section(findings: Findings) -> Section:
    table = facet_table(findings)
    return Section(
        "facets",
        "What moved: facets",
        "Each score taken apart into what happened: broken form by itself, and safety among the answers that could be "
        "read.",
        tables=(failed_table(findings), table),
        notes=facet_notes(findings) if table else (),
        finding=finding(findings),
    )


def _gate_section(findings: Findings) -> Section:
    gated = [d for d in findings.verdict.decisions if d.gated]
    serving = findings.comparison.mode == "serving"
    drift_of = f"drift from {plain_words(findings.comparison)}" if serving else "drift of each arm from the reference"
    alone = {d.estimand for d in gated}
    alike = ", both served alike" if alone == {"E1"} else ", uncompressed" if alone == {"E2"} else ""
    return Section(
        "gate",
        "Gate",
        f"Each row is a {drift_of}{alike}: below zero is worse. PASS needs the lower bound above minus the margin, and "
        "templates that could not hide a loss of it.",
        tables=(gate_table(findings, gated, gated=True), gate_floor_table(findings, gated)),
        notes=(*map(inline, floor_sentences(findings)), *gate_notes(findings)),
        finding=summaries.statuses(gated, "gated cells"),
    )


_OTHER_WAY = {  # by what is decided beside the verdict: the cells, and a sentence for a stranger
    "E1": ("cells served alike", "Candidate and reference served alike: what training changed, compression apart."),
    "E2": (
        "cells as deployed",
        "The candidate compressed, the reference not: what a user of the compressed candidate notices.",
    ),
}
_OTHER_WAYS = ("cells beside the verdict", "The same cells against the reference served another way.")


def _beside_section(findings: Findings) -> Section:
    shown = [d for d in findings.verdict.decisions if not d.gated]
    cells, explain = _OTHER_WAY.get("/".join({d.estimand for d in shown}), _OTHER_WAYS)
    return Section(
        "beside",
        "Beside the gate",
        f"{explain} Not part of the verdict.",
        tables=(gate_table(findings, shown, gated=False),),
        notes=beside_notes(findings),
        finding=summaries.statuses(shown, cells),
    )


def _compared_section(findings: Decided) -> Section:
    fixed = "the rules fixed before the numbers were seen."
    if findings.rules.declared == DECLARED_AFTER_RUN:
        fixed = "rules that were declared after the run, when its numbers could be known."
    return Section(
        "compared",
        "What was compared",
        f"The two sides of every difference in this report, and {fixed}",
        tables=(tables.compared_table(findings),),
        finding=summaries.compared(findings),
    )


def _detail_sections(findings: Findings) -> list[Section]:
    serving, plain = findings.comparison.mode == "serving", plain_words(findings.comparison)
    return [
        Section(
            "parity",
            "Capability beside safety",
            "Each point is a cell: in the shaded corner capability holds within its margin while safety does not.",
            figures=("quadrant",) if _both_kinds(findings.comparison) else (),
            finding=summaries.parity(findings),
        ),
        Section(
            "heatmap",
            "Every serving policy",
            "Drift in pp under each serving policy"
            + (f", against {plain}." if serving else ", candidate and reference served alike."),
            figures=("heatmap",),
            notes=(
                "Outlined: FAIL. Starred: PASS*. Hatched: the data cannot tell. Gated cells as decided; all others by "
                "the same rule, not adjusted.",
            ),
            finding=summaries.estimand(findings, "E4" if serving else "E1"),
        ),
        Section(
            "interaction",
            "Interaction",
            f"Did training change how much serving compression hurts? The candidate's change from {plain} minus "
            "the reference's own: below zero, training made the model more fragile to compression.",
            tables=(tables.estimand_table(findings, "E5", gated_only=True),),
            notes=("Shown for the gated policies; drift.json holds all.",) if not serving else (),
            finding=summaries.estimand(findings, "E5", gated_only=True),
        ),
        *_amplification_section(findings),
        Section(
            "sensitivity",
            "Serving sensitivity",
            "Each checkpoint served under a policy minus itself uncompressed.",
            tables=(tables.estimand_table(findings, "E4"),) if not serving else (),
            finding=summaries.estimand(findings, "E4"),
        ),
        *beside.dose_sections(findings),
        *beside.loss_sections(findings),
        *([mechanism] if (mechanism := mechanism_section(findings)) else []),
        beside.seed_section(findings),
        *([judge] if (judge := beside.judge_section(findings)) else []),
        *([judges] if (judges := judges_section(findings)) else []),
        *([guards] if (guards := guards_section(findings)) else []),
        beside.displacement_section(findings),
        *beside.method_sections(findings),
    ]


def _amplification_section(findings: Decided) -> list[Section]:
    if not any(c.estimand == AMPLIFICATION for c in findings.contrasts):
        return []
    return [
        Section(
            "amplification",
            "Amplification",
            "Did training under a policy cost more than serving under it? Candidate uncompressed minus the reference "
            "served under the policy that the candidate was trained under: below zero, training cost more.",
            tables=(tables.estimand_table(findings, AMPLIFICATION),),
            finding=summaries.estimand(findings, AMPLIFICATION),
        )
    ]


def _both_kinds(sides: Comparison) -> bool:
    """Whether the run asked for capability and for something else."""
    capability = set(sides.capability)
    return bool(capability) and bool(set(sides.suites) - capability)


def _run_sections(findings: Findings) -> list[Section]:
    return [
        Section(
            "outcomes",
            "Rates and outcomes",
            "How often each cell did the desired thing; degenerate (empty, looping), truncated and unscored answers "
            "count as 0.",
            tables=(tables.outcomes_table(findings),),
            finding=summaries.outcomes(findings),
        ),
        Section(
            "training",
            "Training",
            "Reward, and how far the probabilities of the sampler and of the learner's view were apart "
            "(lines: mean over seeds, bands: lowest to highest).",
            figures=("training",) if findings.curves else (),
            tables=(detail_tables.training_table(findings), detail_tables.mismatch_table(findings)),
            notes=(
                "Gap: largest difference of log-probabilities of one token, over all steps and seeds. The uncompressed "
                "arm's own gap is what rounding alone does.",
            )
            if findings.curves
            else (),
            finding=summaries.training(findings),
        ),
        Section(
            "cache",
            "KV cache",
            "What compression saved at the peak of a row, each way of counting held against policy none counted the "
            "same way, and which roles of the conversation stayed cached.",
            figures=("cache",),
            tables=(detail_tables.cache_table(findings),),
            notes=(
                "Live: keys, values and codes of the entries held while an answer was decoded. Allocated: at any time, "
                "with the slack and the bookkeeping that this implementation adds, uncompressed too. Both per token, "
                "so that longer answers count as nothing saved or spent.",
            ),
            finding=summaries.cache(findings),
        ),
    ]


def _closing_sections(findings: Findings) -> list[Section]:
    return [
        Section(
            "examples",
            "Largest losses",
            "Items the reference got right and the candidate lost; model output is shown as it was, control characters "
            "made visible.",
            examples=bool(findings.examples),
            finding=f"{len(findings.examples)} answers in full.",
        ),
        Section(
            "problems",
            "Problems in the files",
            "Lines and files that were kept out.",
            notes=tuple(inline(problem) for problem in findings.problems[:50]),
            finding=f"{len(findings.problems)} lines or files were kept out.",
        ),
        Section(
            "reproduce",
            "Reproducibility",
            "Hashes, versions and policies as they were recorded.",
            tables=tables.reproducibility(findings),
            finding=f"{len(findings.provenance)} facts recorded with the run.",
        ),
    ]
