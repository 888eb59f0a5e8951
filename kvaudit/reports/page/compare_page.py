"""The page of a comparison of two result files, for terminal, HTML, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvaudit.core.text import inline
from kvaudit.reports.page.banner import churn_words, make_banner, to_do, unscored_lines, why_quoted
from kvaudit.reports.page.compare_files import MetricComparison, TwoJudges
from kvaudit.reports.page.compare_pairing import CANDIDATE, REFERENCE
from kvaudit.reports.page.facets import EVENT_HEADERS, breakdown, event_notes, event_row, gated_events
from kvaudit.reports.page.page import Banner, Page
from kvaudit.reports.page.remarks import blind_spot_line, broken_template_lines, error_rate_lines, remarks
from kvaudit.reports.page.run_page import FACETS_EXPLAIN, PASSING_RULE, problems_passage
from kvaudit.reports.page.tables import HOW_TO_READ, number_columns, pvalue_text
from kvaudit.reports.records.readers.base import Log
from kvaudit.reports.sections.shared.tables import Passage, Table, footnoted, table_of
from kvaudit.reports.sections.shared.words import decision_note, effect_text, metric_label, percent
from kvaudit.reports.stats.judges import Kappa
from kvaudit.reports.verdict.contrast import CellName
from kvaudit.reports.verdict.verdict import Decision, Status

_FILES = ("compare.html", "compare.md", "compare.json")


def comparison_banner(compared: MetricComparison) -> Banner:
    """Return the banner: the verdict, the drift that decides it, and the lines to read with it."""
    findings, head = compared.findings, compared.verdict.head
    lines = [*breakdown(findings, head), to_do(findings), *map(str, compared.verdict.reasons), *remarks(findings)]
    for d in compared.verdict.gated:
        if d.status is Status.INVALID:
            lines += [f"{_cell(compared, d)}: {reason}" for reason in d.reasons]
    lines += [*compared.notes, *(unscored_lines(findings.comparison, head) if head else ())]
    return make_banner(
        findings,
        f"Comparison of two result files: {findings.drift.run}",
        _about(compared, head) if head and head.effect else compared.direction.sentence(compared.metric),
        lines,
    )


def _about(compared: MetricComparison, d: Decision) -> str:
    assert d.effect is not None
    grouping = f"in {d.effect.n_clusters} templates"
    if compared.findings.drift.unclustered is not None:
        is_declared = compared.findings.rules.items_are_independent
        grouping = "declared independent by the user" if is_declared else "without a named cluster"
    candidate, reference = reversed(compared.sides.names)
    return (
        f"{_cell(compared, d)}, {candidate} minus {reference}: {d.effect.n_items} items {grouping}, 95 % interval, "
        f"{churn_words(compared.findings, d)}. {compared.direction.sentence(compared.metric)}. "
        f"{why_quoted(compared.findings, d)}"
    )


def comparison_cautions(compared: MetricComparison) -> list[str]:
    """Return cautions to read with the quoted drift.

    They are about templates that may have gone unsampled, losses that a few broken templates could hide, and the gate's
    error rates.
    """
    findings = compared.findings
    fewest = compared.records.groupby(["arm", "suite", "context_tokens"])["cluster_id"].nunique().min()
    units = "templates" if findings.drift.unclustered is None else "items"
    blind_spot = blind_spot_line(findings, compared.verdict.head, int(fewest), units)
    return [blind_spot, *broken_template_lines(findings), *error_rate_lines(findings)]


def _cell(compared: MetricComparison, d: Decision) -> str:
    sides = compared.findings.comparison
    name = f"{metric_label(sides, d.suite)}{_at(d)}"
    return name if d.suite in sides.facets else f"{name}, {compared.metric}"


def _at(cell: CellName) -> str:
    return f" at {cell.context_tokens} tokens" if cell.context_tokens else ""


def comparison_table(compared: MetricComparison) -> Table:
    """Return the table of decided cells: one row for each suite and length, and for each facet that has a margin."""
    headers = ["suite", "verdict", "items / templates", "rates", "drift, 95 % interval", "one-sided bounds, margin"]
    headers += ["lost / gained", "p (family)", "note"]
    return footnoted(headers, [_row(compared, d) for d in compared.verdict.gated], words=2)


def _row(compared: MetricComparison, d: Decision) -> list[str]:
    size = "-"
    if d.effect:
        size = f"{d.effect.n_items} / {'none named' if compared.findings.drift.unclustered else d.effect.n_clusters}"
    numbers = number_columns(compared.findings.comparison, d)
    return [_cell(compared, d), d.status.value, size, *numbers, pvalue_text(d), decision_note(d)]


def facets_table(compared: MetricComparison) -> Table:
    """Return the table of facets: one row per facet in the files, gated or not."""
    statuses = {(d.suite, d.context_tokens): d.status.value for d in compared.verdict.gated}
    rows = []
    for event in gated_events(compared.findings):
        c = event.contrast
        rows.append([f"{event.suite}{_at(c)}", *event_row(event), statuses.get((c.suite, c.context_tokens), "-")])
    return table_of(["suite", *EVENT_HEADERS, "gated"], rows, words=2)


def judges_table(two_judges: TwoJudges) -> Table:
    """Return the table of drift and verdict under each judge, for the cells that both have."""
    second = {(d.suite, d.context_tokens): d for d in two_judges.second.verdict.gated}
    pairs = [(d, e) for d in two_judges.first.verdict.gated if (e := second.get((d.suite, d.context_tokens)))]
    rows = [[d.suite, *(effect_text(c.effect) for c in (d, e)), d.status.value, e.status.value] for d, e in pairs]
    first, last = two_judges.first.metric, two_judges.second.metric
    return table_of(["suite", f"under {first}", f"under {last}", f"verdict, {first}", f"verdict, {last}"], rows)


def agreement_notes(two_judges: TwoJudges) -> tuple[str, ...]:
    """Return a sentence for each of the two files with the agreement (Cohen's kappa) of the two judges on it."""
    sides = ((REFERENCE, two_judges.reference), (CANDIDATE, two_judges.candidate))
    return tuple(f"Answers of the {name}: {_kappa(k)}" for name, k in sides)


def _kappa(k: Kappa | None) -> str:
    if k is None:
        return "no answer that both judges scored."
    value = "not defined, a judge gave one label throughout"
    if k.estimate is not None:
        value = f"{k.estimate:.2f}, " + ("interval not defined" if k.low is None else f"[{k.low:.2f}, {k.high:.2f}]")
    return f"kappa {value}; {percent(k.agreement)} of {k.n} labels agree."


def comparison_sections(compared: MetricComparison, two: TwoJudges | None = None) -> list[Passage]:
    """Return the sections of the page in order, without empty ones; ``two`` is given if two judges are compared."""
    cautions = comparison_cautions(compared)
    sections = [
        Passage(
            "gate",
            "What is decided",
            f"Each row is candidate minus reference on the same items: below zero is worse. {PASSING_RULE} All rows "
            "must pass.",
            figures=("forest",),
            tables=(comparison_table(compared),),
            notes=(f"p: one-sided for a drop, adjusted over the {len(compared.verdict.gated)} rows.",),
            first=True,
        ),
        Passage(
            "facets",
            "What moved: facets",
            f"{FACETS_EXPLAIN} A facet decides if --margin names it.",
            tables=(facets_table(compared),),
            notes=event_notes(gated_events(compared.findings)),
            first=True,
        ),
        Passage(
            "limits",
            "Limits",
            "What the number cannot show, and how it was made.",
            notes=(
                *map(inline, cautions),
                *HOW_TO_READ,
                "Repeats of an item are averaged inside it first; unscored answers count as 0.",
            ),
            finding=cautions[0],
        ),
        Passage(
            "files",
            "What was compared",
            f"The first file is the reference. One-sided level {compared.findings.rules.alpha:g}.",
            tables=(_files_table((compared.sides.reference, compared.sides.candidate)),),
            finding=f"{len(compared.records)} answers, scored by {inline(compared.metric)}.",
        ),
        problems_passage(compared.findings.problems),
    ]
    if two:
        judges = Passage(
            "judges",
            "Two judges",
            "The same answers under two judges: the worse verdict counts.",
            tables=(judges_table(two),),
            notes=agreement_notes(two),
            first=True,
        )
        sections.insert(1, judges)
    return [section for section in sections if section.has_content]


def _files_table(logs: Sequence[Log]) -> Table:
    rows = []
    for name, log in zip((REFERENCE, CANDIDATE), logs, strict=True):
        facts = "; ".join(f"{key} {value}" for key, value in log.facts.items())
        rows.append([name, str(log.path), log.reader, str(len(log.rows)), facts])
    return table_of(["side", "file", "read as", "scores", "metadata"], rows, words=3)


def comparison_files(compared: MetricComparison, two: TwoJudges | None = None) -> dict[str, str]:
    """Return the text of each file of the page (HTML, Markdown, JSON) by file name.

    ``two`` is given if two judges are compared; ``compared`` is then the metric with the worse verdict.
    """
    # the formats import matplotlib, which takes a second that the terminal need not wait for
    from kvaudit.reports.page.formats import html, markdown
    from kvaudit.reports.page.formats.json_files import render_drift

    page = comparison_page(compared, two)
    body: dict[str, Any] = json.loads(render_drift(page))
    body["notes"], body["metric"] = [*page.banner.lines, *comparison_cautions(compared)], compared.metric
    better = "lower" if compared.direction.lower_is_better else "higher"
    body["direction"] = {"better": better, "because": compared.direction.because}
    body["files"] = {REFERENCE: str(compared.sides.reference.path), CANDIDATE: str(compared.sides.candidate.path)}
    json_text = json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    return dict(zip(_FILES, (html.render(page), markdown.render(page), json_text), strict=True))


def comparison_page(compared: MetricComparison, two: TwoJudges | None = None) -> Page:
    """Return the page of a comparison of two files, from which HTML, Markdown, JSON and terminal text are rendered."""
    sections = tuple(comparison_sections(compared, two))
    return Page(compared.findings, comparison_banner(compared), sections, tuple(remarks(compared.findings)))
