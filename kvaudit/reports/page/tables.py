"""The tables of a report as plain strings, not escaped for any format yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvaudit.core.facets import DEPLOYED, suite_of
from kvaudit.core.text import at_length, inline
from kvaudit.reports.page.findings import Findings, flips_link
from kvaudit.reports.sections.shared.tables import Table, footnoted, table_of
from kvaudit.reports.sections.shared.words import (
    decision_note,
    effect_text,
    held_to,
    is_serving,
    judge_marks,
    points,
    pvalue,
    rates_text,
    ratio_interval,
    ratio_text,
    reference_of,
    suite_label,
    uncompressed_label,
    with_length,
)
from kvaudit.reports.stats.rule import clusters_required
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import PRECEDENCE, Decided, Decision, Status, worst


class VerdictLine(NamedTuple):
    """The verdict of an arm, or of a serving policy if nothing was trained."""

    name: str
    status: Status
    recipe: Status | None
    suites: Mapping[str, Status]
    cells: tuple[Decision, ...]


def verdict_lines(findings: Decided) -> list[VerdictLine]:
    """Return the verdict of every arm, or of every policy if nothing was trained."""
    gated = findings.verdict.gated
    if findings.comparison.mode == "training":
        return [
            VerdictLine(a.arm, a.status, a.recipe, a.suites, tuple(d for d in gated if d.arm == a.arm))
            for a in findings.verdict.arms
        ]
    lines = []
    for policy in dict.fromkeys(d.policy for d in gated):
        cells = tuple(d for d in gated if d.policy == policy)
        suites = {d.suite: worst(cell.standing for cell in cells if cell.suite == d.suite) for d in cells}
        lines.append(VerdictLine(findings.comparison.label(policy), worst(suites.values()), None, suites, cells))
    return lines


def verdict_table(findings: Decided) -> Table:
    """Return the table of arms or policies: verdicts by suite, the deciding cell, and the worst cell as deployed."""
    sides, gated = findings.comparison, list(dict.fromkeys(d.suite for d in findings.verdict.gated))
    suites = [name for name in gated if name not in sides.facets]
    facets = [name for name in gated if name in sides.facets]
    lines = verdict_lines(findings)
    recipe = ["with seed variance"] if any(line.recipe for line in lines) else []
    deployment_cells = [d for d in deployed_cells(findings) if d.estimand == "deployed"]
    served = []
    if deployment_cells:
        served = ["worst as deployed" + ("" if any(d.gated for d in deployment_cells) else ", not gated")]
    rows = []
    for line in lines:
        row = [line.name, line.status.value, *([line.recipe.value if line.recipe else "-"] if recipe else [])]
        row += [_worst(line, [suite]) for suite in suites] + ([_worst(line, facets)] if facets else [])
        d = min(line.cells, key=lambda d: (PRECEDENCE.index(d.status), d.room))
        row.append(_cell_and_drift(sides, d) + (", as deployed" if is_compressed_deployment(sides, d) else ""))
        if served:
            arm_cells = deployed_cells(findings, line.name)
            row.append(f"{_cell_and_drift(sides, arm_cells[0])} {arm_cells[0].status.value}" if arm_cells else "-")
        rows.append(row)
    headers = ["policy" if sides.mode == "serving" else "arm", "verdict", *recipe]
    headers += [suite + judge_marks(sides, suite) for suite in suites]
    headers += [*(facets if len(facets) == 1 else ["facets"] * bool(facets)), "deciding cell", *served]
    return table_of(headers, rows, words=len(headers))


def _worst(line: VerdictLine, names: Iterable[str]) -> str:
    statuses = [line.suites[name] for name in names if name in line.suites]
    return worst(statuses).value if statuses else "-"


def deployed_cells(findings: Decided, arm: str | None = None) -> list[Decision]:
    """Return the cells whose reference is uncompressed, the worst first.

    The list is empty unless the candidate of one of them is compressed.
    """
    cells = [d for d in findings.verdict.decisions if d.effect and arm in (None, d.arm)]
    sides = findings.comparison
    if not any(is_compressed_deployment(sides, d) for d in cells):
        return []
    uncompressed = [d for d in cells if d.estimand == "alike" and sides.is_uncompressed(d.policy)]
    return sorted([d for d in cells if d.estimand == "deployed" or d in uncompressed], key=lambda d: d.room)


def is_compressed_deployment(sides: Comparison, d: Decision) -> bool:
    """Return whether a cell compares a compressed candidate with the uncompressed reference."""
    return d.estimand == "deployed" and not sides.is_uncompressed(d.policy)


def _cell_and_drift(sides: Comparison, d: Decision) -> str:
    """Return a cell and its drift, such as: math @ snapkv 96: -8.8 pp [-13.8, -4.0]."""
    cell_name = f"{suite_label(sides, d)} @ {sides.label(d.policy)}"
    return f"{cell_name}: {effect_text(d.effect)}" if d.effect else f"{cell_name}: {d.reasons[0].text}"


def compared_table(findings: Findings) -> Table:
    """Return the table of the two sides and the rules, as name and value."""
    sides = findings.comparison
    items = list(dict.fromkeys((c.suite, c.context_tokens, c.n_items, c.n_clusters) for c in findings.drift.cells))
    rows = [("model", findings.model)]
    if sides.mode == "training":
        rows += [
            ("reference", f"{sides.reference} (pinned dense rollouts)"),
            ("candidates", ", ".join(sides.candidates)),
            ("compression during rollouts", _rollouts(sides) or "-"),
            ("seeds, paired", ", ".join(map(str, sides.seeds))),
        ]
    else:
        rows += [
            ("checkpoint", sides.reference),
            ("contrast", f"each serving policy against {uncompressed_label(sides)}"),
        ]
    rules = findings.rules
    unserved = "; an arm trained under one of them is served under that one and none only" if sides.unserved else ""
    margins = [f"{s} {100 * margin:g} pp{' (default)' * (s in rules.defaults)}" for s, margin in rules.margins.items()]
    margins += [f"{metric} {limit:g} x" for metric, limit in rules.ratios.items()]
    rows += [
        ("serving policies", "; ".join(map(sides.label, sides.policies)) + unserved),
        ("gated policies", "; ".join(map(sides.label, rules.primary))),
        ("suites", "; ".join(f"{s} {at_length(c)}: {n} items, {k} templates" for s, c, n, k in items)),
        ("margins", "; ".join(margins)),
        ("one-sided level", f"{rules.alpha:.3g}"),
        *_declared_rows(rules),
        ("records", f"{findings.drift.n_records}"),
    ]
    return table_of(["", "value"], rows, words=2)


def _declared_rows(rules: Rules) -> list[tuple[str, str]]:
    rows = []
    if rules.sha256 is not None:
        rows.append(("gate file", f"{rules.source}, sha256 {rules.sha256}, {rules.declared}"))
    if rules.profile is not None:
        rows.append(("profile", f"{rules.profile}: alpha {rules.alpha:g}, INCONCLUSIVE: {rules.on_inconclusive}"))
    if rules.worst_seed:
        rows.append(("worst seed", "a cell fails if one training seed alone fails"))
    return rows


def _rollouts(sides: Comparison) -> str:
    """Return as text the rollout policies of the trained arms: one alone if all share it, else each with its arms."""
    by_policy: dict[str, list[str]] = {}
    for arm, policy in sides.trained_under.items():
        by_policy.setdefault(policy, []).append(arm)
    if len(by_policy) == 1:
        return next(iter(by_policy))
    return "; ".join(f"{policy} ({', '.join(arms)})" for policy, arms in by_policy.items())


def reproducibility(sides: Comparison, provenance: Mapping[str, Any]) -> tuple[Table, ...]:
    """Return two tables: the provenance as names and values, and the full string of every policy."""
    policies = [(sides.labels[policy], policy) for policy in sides.policies]
    facts = table_of(["recorded", "value"], _flatten("", provenance), words=2)
    tables = (facts, table_of(["policy", "full form"], policies, words=2))
    return tuple(table for table in tables if table)


def _flatten(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    else:
        yield prefix, str(value)


def gate_table(findings: Findings, decisions: Sequence[Decision], *, gated: bool) -> Table:
    """Return the table of those decisions that are ``gated``, or of those that are not, one row each.

    Columns whose value does not vary are left out.
    """
    sides, cells = findings.comparison, [d for d in decisions if d.gated is gated]
    columns = {"candidate": [sides.who(d.arm, d.policy) for d in cells]}
    if len({(d.estimand == DEPLOYED, is_serving(sides, d)) for d in cells}) > 1:
        columns["against"] = [sides.who(*reference_of(sides, d)) for d in cells]
    columns["suite"] = [
        with_length(sides, suite_label(sides, d), d.context_tokens) + judge_marks(sides, suite_of(d.suite))
        for d in cells
    ]
    columns["verdict"] = [f"{d.status.value}, waived" if d.waiver else d.status.value for d in cells]
    if any(d.recipe for d in cells):
        columns["with seed variance"] = [d.recipe.value if d.recipe else "-" for d in cells]
    words = len(columns)
    numbers = [number_columns(sides, d) for d in cells]
    for place, header in enumerate(("rates", "drift, 95 % interval", "one-sided bounds, margin")):
        columns[header] = [row[place] for row in numbers]
    if any(d.worst_seed for d in cells):
        seeds = [d.worst_seed for d in cells]
        columns["worst seed, pp"] = [f"{points(seed.estimate)} ({seed.seed})" if seed else "-" for seed in seeds]
    columns["lost / gained"] = [row[3] for row in numbers]
    columns[f"p ({', '.join(dict.fromkeys(d.adjusted_by for d in cells))})"] = [pvalue_text(d) for d in cells]
    columns["note"] = ["; ".join(text for text in (decision_note(d), d.statement) if text) for d in cells]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return replace(footnoted(list(columns), rows, words=words), links=tuple(flips_link(findings, d) for d in cells))


def number_columns(sides: Comparison, d: Decision) -> list[str]:
    """Return four columns as texts: both rates, the drift, the deciding bounds with their margin, items lost/gained."""
    margin = f"{100 * d.margin:g}" if d.margin else "-"
    if d.effect is None:
        return [rates_text(sides, d), "-", margin, "-"]
    e = d.effect
    bounds = f"[{points(e.lower)}, {points(e.upper)}] {margin}"
    drift_text = effect_text(e)
    if d.ratio:
        bounds = f"{ratio_interval(d.ratio.times.lower, d.ratio.times.upper)} x, limit {held_to(d)}"
        drift_text = f"{drift_text}, {ratio_text(d.ratio.times)}"
    return [rates_text(sides, d), drift_text, bounds, f"{e.losses:.3g}/{e.gains:.3g}"]


def pvalue_text(d: Decision) -> str:
    """Return the p-value of a cell as text, with "<=" at the smallest value that the sign-flip test can give."""
    if d.pvalue_drop is not None and 0 < d.pvalue_drop <= d.pvalue_floor:
        return f"<= {d.pvalue_floor:.1g}"
    return pvalue(d.pvalue_drop)


def gate_notes(findings: Decided) -> tuple[str, ...]:
    """Return notes on how to read the gate table, and how many templates a PASS needs."""
    rules = findings.rules
    required = [
        *(f"{suite} {clusters_required(m, rules.alpha)} for {100 * m:g} pp" for suite, m in rules.margins.items()),
        *(f"{suite} {_required_for_ratio(findings, suite)} for {times:g} x" for suite, times in rules.ratios.items()),
    ]
    return (
        f"Templates needed before a cell can pass: {inline('; '.join(required))}.",
        "Beyond the margin: the cell's own one-sided upper bound lies below minus the margin. Size open: it does not, "
        "and the drop may be smaller or larger than the margin.",
        *([_RATIO] if rules.ratios else []),
        f"p: one-sided for a drop, adjusted over the {len(findings.verdict.gated)} gated cells; max-T flips the sign "
        "of a whole template in all cells at once.",
        *([_WORST_SEED] if any(d.worst_seed for d in findings.verdict.decisions) else []),
        *_judge_notes(findings.comparison),
        *HOW_TO_READ,
    )


def _required_for_ratio(findings: Decided, suite: str) -> str:
    """Return as text how many templates a PASS by a ratio needs; a range, since it depends on the reference's rate."""
    counts = [d.clusters_required for d in findings.verdict.gated if d.suite == suite]
    required = sorted(count for count in counts if count)
    if not required:
        return "-"
    return f"{required[0]}" if required[0] == required[-1] else f"{required[0]} to {required[-1]}"


def _judge_notes(sides: Comparison) -> Iterator[str]:
    """Yield notes on the marks after a suite's name, such as TRAINED."""
    if sides.rewarded:
        yield "TRAINED: the suite was trained on, or its judge gave the reward."
    if sides.by_phrases:
        yield "Phrases alone: phrase rules detect refusals; kvaudit grade judge RUN --judge NAME asks another judge."


_RATIO = (
    "Ratio: a cell passes only if the upper bound lies below the limit, and is beyond the margin if the lower bound "
    "lies above it."
)
_WORST_SEED = "Worst seed: the seed that lost most, which an average hides; its number in brackets."
HOW_TO_READ = (
    "Intervals are ESS-Tango: Tango's paired score interval at the cluster-robust effective sample size. Lost / "
    "gained: sum of the scores that changed, in items, averaged over samples and seeds.",
    "If a reference below three margins lost something, the loss is also given as a share of its rate.",
)


def ungated_notes(findings: Decided) -> tuple[str, ...]:
    """Return a note on how the p-values of the cells outside the gate are adjusted."""
    count = sum(not d.gated for d in findings.verdict.decisions)
    if not count:
        return ()
    return (f"p: adjusted over the {count} cells of this table, separately from the gated cells.",)
