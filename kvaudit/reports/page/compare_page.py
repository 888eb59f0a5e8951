"""The page of a comparison: the banner, tables and notes that the terminal, HTML, Markdown and JSON share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvaudit.core.text import inline
from kvaudit.reports.page.banner import churn_words, number, to_do, unscored, verdict_sentence, why_quoted
from kvaudit.reports.page.compare_files import Compared, TwoJudges
from kvaudit.reports.page.compare_pairing import CANDIDATE, REFERENCE
from kvaudit.reports.page.facets import shown, taken_apart
from kvaudit.reports.page.gate_table import HOW_TO_READ, adjusted, numbers
from kvaudit.reports.page.limits import calibrated, hidden
from kvaudit.reports.page.page import Banner, Page
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.records.readers.base import Log
from kvaudit.reports.sections.shared.events import EVENT_HEADERS, event_notes, event_row
from kvaudit.reports.sections.shared.tables import Passage, Table, footnoted, table_of
from kvaudit.reports.sections.shared.words import blind_spot_text, decision_note, effect_text, metric_label, percent
from kvaudit.reports.stats.judges import Kappa
from kvaudit.reports.stats.rule import blind_spot
from kvaudit.reports.verdict.contrast import CellName
from kvaudit.reports.verdict.verdict import Decision, Status

_FILES = ("compare.html", "compare.md", "compare.json")


def comparison_banner(compared: Compared) -> Banner:
    """Verdict, the number that decides, and what must be read with it."""
    verdict = compared.verdict
    head = verdict.head
    return Banner(
        title=f"Comparison of two result files: {inline(compared.findings.drift.run)}",
        status=verdict.status,
        sentence=verdict_sentence(verdict),
        number=number(head) if head and head.effect else "",
        about=_about(compared, head) if head and head.effect else inline(compared.direction.sentence(compared.metric)),
        banner_lines=tuple(inline(line) for line in _asides(compared, head)),
    )


def _about(compared: Compared, d: Decision) -> str:
    assert d.effect is not None
    effect, sides = d.effect, compared.sides
    items = f"{effect.n_items} items {_grouped(compared, effect.n_clusters)}"
    return inline(
        f"{_cell(compared, d)}, {sides.names[1]} minus {sides.names[0]}: {items}, 95 % interval, "
        f"{churn_words(compared.findings, d)}. {compared.direction.sentence(compared.metric)}. "
        f"{why_quoted(compared.findings, d)}"
    )


def _grouped(compared: Compared, clusters: int) -> str:
    """What the items stand in; nobody is told of templates where none was named."""
    if compared.findings.drift.unclustered is None:
        return f"in {clusters} templates"
    declared = compared.findings.rules.items_are_independent
    return "declared independent by the user" if declared else "without a named cluster"


def _asides(compared: Compared, head: Decision | None) -> list[str]:
    lines = [to_do(compared.findings), *map(str, compared.verdict.reasons)]
    lines += remarks(compared.findings)
    for d in compared.verdict.decisions:
        if d.gated and d.status is Status.INVALID:
            lines += [f"{_cell(compared, d)}: {reason}" for reason in d.reasons]
    return [
        *taken_apart(compared.findings, head),
        *lines,
        *compared.notes,
        *(unscored(compared.findings.comparison, head) if head else ()),
    ]


def comparison_cautions(compared: Compared) -> list[str]:
    """What the number cannot say: what was not sampled, and how often the gate is wrong."""
    head, alpha = compared.verdict.head, compared.findings.rules.alpha
    clusters = _clusters(compared, head)
    spot = head.blind_spot if head and head.blind_spot is not None else blind_spot(clusters, alpha)
    units = "templates" if compared.findings.drift.unclustered is None else "items"
    return [blind_spot_text(spot, alpha, clusters, units), *hidden(compared.findings), *calibrated(compared.findings)]


def _clusters(compared: Compared, head: Decision | None) -> int:
    """Templates of the cell that is quoted; without one, of the file, suite and length with the fewest."""
    if head is not None and head.effect:
        return head.effect.n_clusters
    return int(compared.records.groupby(["arm", "suite", "context_tokens"])["cluster_id"].nunique().min())


def _cell(compared: Compared, d: Decision) -> str:
    sides = compared.findings.comparison
    named = f"{metric_label(sides, d.suite)}{_at(d)}"
    return named if d.suite in sides.facets else f"{named}, {compared.metric}"


def _at(cell: CellName) -> str:
    return f" at {cell.context_tokens} tokens" if cell.context_tokens else ""


def comparison_table(compared: Compared) -> Table:
    """One row per suite and length, and per facet that has a margin."""
    headers = ["suite", "verdict", "items / templates", "rates", "drift, 95 % interval", "one-sided bounds, margin"]
    headers += ["lost / gained", "p (family)", "note"]
    return footnoted(headers, [_row(compared, d) for d in compared.verdict.gated], words=2)


def _row(compared: Compared, d: Decision) -> list[str]:
    size = "-"
    if d.effect:
        size = f"{d.effect.n_items} / {'none named' if compared.findings.drift.unclustered else d.effect.n_clusters}"
    return [
        _cell(compared, d),
        d.status.value,
        size,
        *numbers(compared.findings.comparison, d),
        adjusted(d),
        decision_note(d),
    ]


def facets(compared: Compared) -> Table:
    """One row per facet that the files hold, whether it has a margin or not."""
    findings = compared.findings
    decided = {(d.suite, d.context_tokens): d.status.value for d in compared.verdict.gated}
    rows = []
    for event in shown(findings):
        c = event.contrast
        rows.append([f"{event.suite}{_at(c)}", *event_row(event), decided.get((c.suite, c.context_tokens), "-")])
    return table_of(["suite", *EVENT_HEADERS, "gated"], rows, words=2)


def judges(found: TwoJudges) -> Table:
    """Drift under each judge of the cells that both have, and how far the judges agree."""
    rows = []
    second = {(d.suite, d.context_tokens): d for d in found.second.verdict.gated}
    for d in found.first.verdict.decisions:
        other = second.get((d.suite, d.context_tokens))
        if d.gated and other:
            numbers = [effect_text(x.effect) for x in (d, other)]
            rows.append([d.suite, *numbers, d.status.value, other.status.value])
    first, last = found.first.metric, found.second.metric
    return table_of(["suite", f"under {first}", f"under {last}", f"verdict, {first}", f"verdict, {last}"], rows)


def agreement(found: TwoJudges) -> tuple[str, ...]:
    """Kappa on either side, in a sentence each."""
    sides = ((REFERENCE, found.reference), (CANDIDATE, found.candidate))
    return tuple(f"Answers of the {name}: {_kappa(k)}" for name, k in sides)


def _kappa(k: Kappa | None) -> str:
    if k is None:
        return "no answer that both judges scored."
    value = "not defined, a judge gave one label throughout"
    if k.estimate is not None:
        value = f"{k.estimate:.2f}, " + ("interval not defined" if k.low is None else f"[{k.low:.2f}, {k.high:.2f}]")
    return f"kappa {value}; {percent(k.agreement)} of {k.n} labels agree."


def comparison_sections(compared: Compared, two: TwoJudges | None = None) -> list[Passage]:
    """What the page says, in order."""
    said = comparison_cautions(compared)
    gated = sum(d.gated for d in compared.verdict.decisions)
    found = [
        Passage(
            "gate",
            "What is decided",
            "Each row is candidate minus reference on the same items: below zero is worse. PASS needs the lower bound "
            "above minus the margin, and templates that could not hide a loss of it. All rows must pass.",
            figures=("forest",),
            tables=(comparison_table(compared),),
            notes=(f"p: one-sided for a drop, adjusted over the {gated} rows.",),
            first=True,
        ),
        Passage(
            "facets",
            "What moved: facets",
            "The score taken apart into what happened: broken form by itself, and safety among the answers that could "
            "be read. A facet decides where --margin names it.",
            tables=(facets(compared),),
            notes=event_notes(shown(compared.findings)),
            first=True,
        ),
        Passage(
            "limits",
            "Limits",
            "What the number cannot say, and how it was made.",
            notes=(
                *map(inline, said),
                *HOW_TO_READ,
                "Repeats of an item are averaged inside it first; unscored answers count as 0.",
            ),
            finding=said[0],
        ),
        Passage(
            "files",
            "What was compared",
            f"The first file is the reference. One-sided level {compared.findings.rules.alpha:g}.",
            tables=(_files((compared.sides.reference, compared.sides.candidate)),),
            finding=f"{len(compared.records)} answers, scored by {inline(compared.metric)}.",
        ),
        Passage(
            "problems",
            "Problems in the files",
            "Lines that were kept out.",
            notes=tuple(inline(problem) for problem in compared.findings.problems[:50]),
            finding=f"{len(compared.findings.problems)} lines were kept out.",
        ),
    ]
    if two:
        found.insert(
            1,
            Passage(
                "judges",
                "Two judges",
                "The same answers under two judges: the worse verdict counts.",
                tables=(judges(two),),
                notes=agreement(two),
                first=True,
            ),
        )
    return [section for section in found if any(section.tables) or section.notes]


def _files(logs: Sequence[Log]) -> Table:
    rows = []
    for name, log in zip((REFERENCE, CANDIDATE), logs, strict=True):
        facts = "; ".join(f"{key} {value}" for key, value in log.facts.items())
        rows.append([name, str(log.path), log.reader, str(len(log.rows)), facts])
    return table_of(["side", "file", "read as", "scores", "says of itself"], rows, words=3)


def comparison_files(compared: Compared, two: TwoJudges | None = None) -> dict[str, str]:
    """File name -> text, of the comparison or of the worse of two judges."""
    # they draw figures: a second that the terminal need not wait for
    from kvaudit.reports.page.formats import drift, html, markdown

    page = comparison_page(compared, two)
    body: dict[str, Any] = json.loads(drift.render(page))
    body["notes"], body["metric"] = [*page.banner.banner_lines, *comparison_cautions(compared)], compared.metric
    better = "lower" if compared.direction.lower_is_better else "higher"
    body["direction"] = {"better": better, "because": compared.direction.because}
    body["files"] = {REFERENCE: str(compared.sides.reference.path), CANDIDATE: str(compared.sides.candidate.path)}
    told = json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    return dict(zip(_FILES, (html.render(page), markdown.render(page), told), strict=True))


def comparison_page(compared: Compared, two: TwoJudges | None = None) -> Page:
    """The page that every format renders."""
    sections = tuple(comparison_sections(compared, two))
    return Page(compared.findings, comparison_banner(compared), sections, tuple(remarks(compared.findings)))
