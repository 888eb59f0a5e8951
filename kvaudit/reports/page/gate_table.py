"""The gate table row by row, its p-values and footnotes, and how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvaudit.core.text import inline
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.links import flips_link
from kvaudit.reports.sections.shared.tables import Table, footnoted
from kvaudit.reports.sections.shared.words import (
    decision_note,
    effect_text,
    held_to,
    judge_marks,
    points,
    pvalue,
    rates_text,
    ratio_interval,
    ratio_text,
    reference_label,
    suite_label,
    with_length,
)
from kvaudit.reports.stats.rule import clusters_required
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.downgrades import suite_of
from kvaudit.reports.verdict.verdict import Decided, Decision


def gate_table(findings: Findings, decisions: Sequence[Decision], *, gated: bool) -> Table:
    """One row per decision; columns that would say the same of every row are left out."""
    shown = [d for d in decisions if d.gated is gated]
    both = len({d.estimand == "deployed" for d in shown}) > 1
    recipe, seeds = any(d.recipe for d in shown), any(d.worst_seed for d in shown)
    headers = ["candidate", *(["against"] if both else []), "suite", "verdict"]
    headers += [*(["with seed variance"] if recipe else []), "rates", "drift, 95 % interval"]
    headers += ["one-sided bounds, margin", *(["worst seed, pp"] if seeds else []), "lost / gained"]
    headers += [f"p ({', '.join(dict.fromkeys(d.adjusted_by for d in shown))})", "note"]
    rows = [_gate_row(findings.comparison, d, both=both, recipe=recipe, seeds=seeds) for d in shown]
    table = footnoted(headers, rows, words=3 + both + recipe)
    return replace(table, links=tuple(flips_link(findings, d) for d in shown))


def _gate_row(sides: Comparison, d: Decision, *, both: bool, recipe: bool, seeds: bool) -> list[str]:
    suite = with_length(sides, suite_label(sides, d), d.context_tokens) + judge_marks(sides, suite_of(d.suite, sides))
    found = f"{d.status.value}, waived" if d.waiver else d.status.value
    row = [sides.who(d.arm, d.policy), *([reference_label(sides, d)] if both else []), suite, found]
    row += [d.recipe.value if d.recipe else "-"] if recipe else []
    lowest = f"{points(d.worst_seed.estimate)} ({d.worst_seed.seed})" if d.worst_seed else "-"
    *told, moved = numbers(sides, d)
    why = "; ".join(text for text in (decision_note(d), d.statement) if text)
    return [*row, *told, *([lowest] if seeds else []), moved, adjusted(d), why]


def numbers(sides: Comparison, d: Decision) -> list[str]:
    """Rates, drift, the bounds that decide with the margin they are held to, and the items behind them."""
    margin = f"{100 * d.margin:g}" if d.margin else "-"
    if d.effect is None:
        return [rates_text(sides, d), "-", margin, "-"]
    e = d.effect
    bounds = f"[{points(e.lower)}, {points(e.upper)}] {margin}"
    told = effect_text(e)
    if d.ratio:
        bounds = f"{ratio_interval(d.ratio.times.lower, d.ratio.times.upper)} x, limit {held_to(d)}"
        told = f"{told}, {ratio_text(d.ratio.times)}"
    return [rates_text(sides, d), told, bounds, f"{e.losses:.3g}/{e.gains:.3g}"]


def adjusted(d: Decision) -> str:
    """The p-value of a cell; at the smallest that its patterns can reach it says no more than that."""
    if d.pvalue_drop is not None and 0 < d.pvalue_drop <= d.pvalue_floor:
        return f"<= {d.pvalue_floor:.1g}"
    return pvalue(d.pvalue_drop)


def gate_notes(findings: Decided) -> tuple[str, ...]:
    """How to read the gate table, and what the templates can show."""
    gated = len(findings.verdict.gated)
    need = "; ".join(
        [
            *(
                f"{suite} {clusters_required(margin, findings.rules.alpha)} for {100 * margin:g} pp"
                for suite, margin in findings.rules.margins.items()
            ),
            *(
                f"{suite} {_for_ratio(findings, suite)} for {times:g} x"
                for suite, times in findings.rules.ratios.items()
            ),
        ]
    )
    return (
        f"Templates needed before a cell can pass: {inline(need)}.",
        "Beyond the margin: the cell's own one-sided upper bound lies below minus the margin. Size open: it does not, "
        "and the drop may be smaller or larger than the margin.",
        *([_RATIO] if findings.rules.ratios else []),
        f"p: one-sided for a drop, adjusted over the {gated} gated cells; max-T flips the sign of a whole template in "
        "all cells at once.",
        *([_WORST_SEED] if any(d.worst_seed for d in findings.verdict.decisions) else []),
        *judge_notes(findings.comparison),
        *HOW_TO_READ,
    )


def _for_ratio(findings: Decided, suite: str) -> str:
    """How many templates a ratio takes, which follows from how often it happens with the reference of its cells."""
    own = [d.clusters_required for d in findings.verdict.decisions if d.gated and d.suite == suite]
    known = sorted(count for count in own if count)
    if not known:
        return "-"
    return f"{known[0]}" if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def judge_notes(sides: Comparison) -> Iterator[str]:
    """What the marks behind a suite's name mean."""
    if sides.rewarded:
        yield "TRAINED: the suite was trained on, or its judge gave the reward."
    if sides.by_phrases:
        yield (
            "Phrases alone: phrase rules decided what refuses; kvaudit grade judge RUN --judge NAME asks another judge."
        )


_RATIO = (
    "Of a ratio: a cell passes only where the upper bound lies below the limit, and is beyond the margin where the "
    "lower one lies above it."
)
_WORST_SEED = "Worst seed: the one that lost most by itself, which an average hides; its name in brackets."
HOW_TO_READ = (
    "Intervals are ESS-Tango: Tango's paired score interval at the cluster-robust effective sample size. Lost / "
    "gained: summed score that moved, in items, averaged over samples and seeds.",
    "Where a reference of less than three margins lost something, the loss is also given as a share of its rate.",
)


def beside_notes(findings: Decided) -> tuple[str, ...]:
    """Whose family the p-values beside the gate belong to."""
    shown = sum(not d.gated for d in findings.verdict.decisions)
    if not shown:
        return ()
    return (
        f"p: adjusted over the {shown} cells of this table, a family of its own: not over the gated cells, and not "
        "with them.",
    )
