"""The page of a comparison: the banner, tables and notes that the terminal, HTML, Markdown and JSON share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from audit.core.text import inline
from reports.compare import Comparison, TwoJudges
from reports.gate.decide import Decision, Status
from reports.page.about import churn
from reports.page.advice import note
from reports.page.plain import drift, percent, points, pvalue
from reports.page.section import Section
from reports.page.story import SENTENCES, Banner
from reports.page.tables import Table, table_of
from reports.records.pairing import CANDIDATE, REFERENCE
from reports.records.readers.base import Log
from reports.stats.blindspot import blind_spot
from reports.stats.kappa import Kappa

FILES = ("compare.html", "compare.md", "compare.json")


def comparison_banner(comparison: Comparison) -> Banner:
    """Verdict, the number that decides, and what must be read with it."""
    verdict = comparison.verdict
    head = verdict.decisions[verdict.headline] if verdict.headline is not None else None
    return Banner(
        title=f"Comparison of two result files: {inline(comparison.report.run)}",
        status=verdict.status,
        sentence=SENTENCES[verdict.status],
        number=drift(head.effect) if head and head.effect else "",
        about=_about(comparison, head) if head else "",
        asides=tuple(inline(line) for line in _asides(comparison, head)),
    )


def _about(comparison: Comparison, d: Decision) -> str:
    assert d.effect is not None
    effect, sides = d.effect, comparison.sides
    return inline(
        f"{_cell(comparison, d)}, {sides.names[1]} minus {sides.names[0]}. Margin "
        f"{100 * (d.margin or 0):g} pp, 95 % interval, {effect.n_items} items in {effect.n_clusters} templates, churn "
        f"{churn(comparison.report, d)}."
    )


def _asides(comparison: Comparison, head: Decision | None) -> list[str]:
    lines = [f"{reason.code}: {reason.text}" for reason in comparison.verdict.reasons]
    for d in comparison.verdict.decisions:
        if d.gated and d.status is Status.INVALID:
            lines += [f"{_cell(comparison, d)}: {reason.code}: {reason.text}" for reason in d.reasons]
    report = comparison.report
    spot = percent(blind_spot(_clusters(comparison, head), report.plan.alpha))
    lines.append(f"Blind spot: a failure confined to {spot} of the templates or fewer could be entirely unsampled.")
    lines += comparison.notes
    if report.calibration and comparison.verdict.status is not Status.INVALID:
        lines.append(report.calibration.sentence(report.plan.alpha, report.plan.margins.values()))
    return lines


def _clusters(comparison: Comparison, head: Decision | None) -> int:
    """Templates of the cell that is quoted; without one, of the file, suite and length with the fewest."""
    if head is not None and head.effect:
        return head.effect.n_clusters
    return int(comparison.records.groupby(["arm", "suite", "context_tokens"])["cluster_id"].nunique().min())


def _cell(comparison: Comparison, d: Decision) -> str:
    length = f" at {d.context_tokens} tokens" if d.context_tokens else ""
    return f"{d.suite}{length}, {comparison.metric}"


def cells(comparison: Comparison) -> Table:
    """One row per suite and length."""
    headers = ["suite", "verdict", "rates", "drift, 95 % interval", "one-sided bounds, margin", "items / templates"]
    headers += ["lost / gained", "deff", "p (family)", "note"]
    return table_of(headers, [_row(comparison, d) for d in comparison.verdict.decisions if d.gated], words=2)


def _row(comparison: Comparison, d: Decision) -> list[str]:
    row = [_cell(comparison, d), d.status.value]
    row.append(f"{100 * d.rates.reference:.1f} to {percent(d.rates.candidate)}" if d.rates else "-")
    margin = f"{100 * d.margin:g}" if d.margin else "-"
    if d.effect is None:
        return [*row, "-", margin, "-", "-", "-", "-", "; ".join(f"{r.code}: {r.text}" for r in d.reasons)]
    e = d.effect
    return [
        *row,
        drift(e),
        f"[{points(e.lower)}, {points(e.upper)}] {margin}",
        f"{e.n_items} / {e.n_clusters}",
        f"{e.losses:.3g}/{e.gains:.3g}",
        f"{e.deff:.2f}",
        pvalue(d.pvalue_drop),
        note(d),
    ]


def judges(found: TwoJudges) -> Table:
    """Drift under each judge of the cells that both have, and how far the judges agree."""
    rows = []
    second = {(d.suite, d.context_tokens): d for d in found.second.verdict.decisions if d.gated}
    for d in found.first.verdict.decisions:
        other = second.get((d.suite, d.context_tokens))
        if d.gated and other:
            numbers = [drift(x.effect) if x.effect else "-" for x in (d, other)]
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


def comparison_sections(comparison: Comparison, two: TwoJudges | None = None) -> list[Section]:
    """What the page says, in order."""
    plan = comparison.report.plan
    found = [
        Section(
            "gate",
            "Gate",
            "Each row is candidate minus reference on the same items: below zero is worse, and PASS needs the lower "
            "bound above minus the margin. All rows must pass.",
            tables=(cells(comparison),),
            notes=(
                "Intervals are ESS-Tango: Tango's paired score interval at the cluster-robust effective sample size. "
                "Repeats of an item are averaged inside it first; unscored answers count as 0.",
            ),
        ),
        Section(
            "files",
            "What was compared",
            f"The first file is the reference. One-sided level {plan.alpha:g}.",
            tables=(_files((comparison.sides.reference, comparison.sides.candidate)),),
        ),
        Section(
            "problems",
            "Problems in the files",
            "Lines that were kept out.",
            notes=tuple(inline(problem) for problem in comparison.report.problems[:50]),
            folded=True,
        ),
    ]
    if two:
        found.insert(
            1,
            Section(
                "judges",
                "Two judges",
                "The same answers under two judges: the worse verdict counts.",
                tables=(judges(two),),
                notes=agreement(two),
            ),
        )
    return [section for section in found if any(section.tables) or section.notes]


def _files(logs: Sequence[Log]) -> Table:
    rows = [
        [
            name,
            str(log.path),
            log.reader,
            str(len(log.rows)),
            "; ".join(f"{key} {value}" for key, value in log.facts.items()),
        ]
        for name, log in zip((REFERENCE, CANDIDATE), logs, strict=True)
    ]
    return table_of(["side", "file", "read as", "scores", "says of itself"], rows, words=3)


def pages(comparison: Comparison, two: TwoJudges | None = None) -> dict[str, str]:
    """File name -> text, of the comparison or of the worse of two judges."""
    from reports.page.formats import html, markdown  # they draw figures: a second that the terminal need not wait for
    from reports.page.formats import json as json_format

    top, parts = comparison_banner(comparison), comparison_sections(comparison, two)
    body: dict[str, Any] = json.loads(json_format.render(comparison.report))
    body["notes"], body["metric"] = list(top.asides), comparison.metric
    body["files"] = {REFERENCE: str(comparison.sides.reference.path), CANDIDATE: str(comparison.sides.candidate.path)}
    texts = (
        html.page(top, parts, comparison.report, {}),
        markdown.page(top, parts, comparison.report),
        json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n",
    )
    return dict(zip(FILES, texts, strict=True))
