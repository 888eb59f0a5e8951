"""The tables of a report as plain strings; text from records is not escaped yet, only made visible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvaudit.core.text import at_length
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, judge_marks, suite_label, uncompressed_label
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import PRECEDENCE, Decided, Decision, Status, worst


class DecidedLine(NamedTuple):
    """What is decided of an arm, or of a serving policy where nothing was trained."""

    name: str
    status: Status
    recipe: Status | None
    suites: Mapping[str, Status]
    cells: tuple[Decision, ...]


def decided_lines(findings: Decided) -> list[DecidedLine]:
    """The gated cells by what could be released: every arm; of one checkpoint, every policy."""
    gated = findings.verdict.gated
    if findings.comparison.mode == "training":
        return [
            DecidedLine(a.arm, a.status, a.recipe, a.suites, tuple(d for d in gated if d.arm == a.arm))
            for a in findings.verdict.arms
        ]
    lines = []
    for policy in dict.fromkeys(d.policy for d in gated):
        own = tuple(d for d in gated if d.policy == policy)
        suites = {d.suite: worst(other.standing for other in own if other.suite == d.suite) for d in own}
        lines.append(DecidedLine(findings.comparison.label(policy), worst(suites.values()), None, suites, own))
    return lines


def decided_table(findings: Decided) -> Table:
    """Arm or policy, verdicts by suite, the deciding cell, and the worst that a user of the compressed arm meets."""
    sides, gated = findings.comparison, list(dict.fromkeys(d.suite for d in findings.verdict.gated))
    suites = [name for name in gated if name not in sides.facets]
    facets = [name for name in gated if name in sides.facets]
    lines = decided_lines(findings)
    recipe = ["with seed variance"] if any(line.recipe for line in lines) else []
    found = [d for d in deployed(findings) if d.estimand == "deployed"]
    served = [DEPLOYED + ("" if any(d.gated for d in found) else ", not gated")] if found else []
    rows = []
    for line in lines:
        row = [line.name, line.status.value, *([line.recipe.value if line.recipe else "-"] if recipe else [])]
        row += [_worst(line, [suite]) for suite in suites] + ([_worst(line, facets)] if facets else [])
        d = min(line.cells, key=lambda d: (PRECEDENCE.index(d.status), _room(d)))
        row.append(_numbered(sides, d) + (", as deployed" if compressed_as_deployed(sides, d) else ""))
        if served:
            own = deployed(findings, line.name)
            row.append(f"{_numbered(sides, own[0])} {own[0].status.value}" if own else "-")
        rows.append(row)
    headers = ["policy" if sides.mode == "serving" else "arm", "verdict", *recipe]
    headers += [suite + judge_marks(sides, suite) for suite in suites]
    headers += [*(facets if len(facets) == 1 else ["facets"] * bool(facets)), "deciding cell", *served]
    return table_of(headers, rows, words=len(headers))


def _worst(line: DecidedLine, names: Iterable[str]) -> str:
    """The worst verdict of these; several facets share a column, or the table would leave the page."""
    found = [line.suites[name] for name in names if name in line.suites]
    return worst(found).value if found else "-"


DEPLOYED = "worst as deployed"  # compressed candidate against uncompressed reference, whether that is gated or not


def deployed(findings: Decided, arm: str | None = None) -> list[Decision]:
    """What a user of a candidate meets: its cells against the uncompressed reference, the worst first.

    None where only serving policies are compared, or nothing compressed was: every cell is one then.
    """
    found = [d for d in findings.verdict.decisions if d.effect and arm in (None, d.arm)]
    sides = findings.comparison
    if not any(compressed_as_deployed(sides, d) for d in found):
        return []
    alike = [d for d in found if d.estimand == "alike" and sides.is_uncompressed(d.policy)]
    return sorted([d for d in found if d.estimand == "deployed" or d in alike], key=_room)


def compressed_as_deployed(sides: Comparison, d: Decision) -> bool:
    """Whether a cell holds a compressed candidate against the uncompressed reference."""
    return d.estimand == "deployed" and not sides.is_uncompressed(d.policy)


def _numbered(sides: Comparison, d: Decision) -> str:
    """math @ snapkv 96: -8.8 pp [-13.8, -4.0]."""
    where = f"{suite_label(sides, d)} @ {sides.label(d.policy)}"
    return f"{where}: {effect_text(d.effect)}" if d.effect else f"{where}: {d.reasons[0].text}"


def _room(d: Decision) -> float:
    return (d.effect.lower if d.effect else 0.0) + (d.margin or 0.0)


def compared_table(findings: Findings) -> Table:
    """The two sides and the rules, as name and value."""
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
    alone = "; what was trained under one of them under that one and none alone" if sides.unserved else ""
    margins = [f"{s} {100 * own:g} pp{' (default)' * (s in rules.defaults)}" for s, own in rules.margins.items()]
    margins += [f"{metric} {limit:g} x" for metric, limit in rules.ratios.items()]
    rows += [
        ("serving policies", "; ".join(map(sides.label, sides.policies)) + alone),
        ("gated policies", "; ".join(map(sides.label, rules.primary))),
        ("suites", "; ".join(f"{s} {at_length(c)}: {n} items, {k} templates" for s, c, n, k in items)),
        ("margins", "; ".join(margins)),
        ("one-sided level", f"{rules.alpha:.3g}"),
        *_declared(rules),
        ("records", f"{findings.drift.n_records}"),
    ]
    return table_of(["", "value"], rows, words=2)


def _declared(rules: Rules) -> list[tuple[str, str]]:
    found = []
    if rules.sha256 is not None:
        found.append(("gate file", f"{rules.source}, sha256 {rules.sha256}, {rules.declared}"))
    if rules.profile is not None:
        found.append(("profile", f"{rules.profile}: alpha {rules.alpha:g}, INCONCLUSIVE: {rules.on_inconclusive}"))
    if rules.worst_seed:
        found.append(("worst seed", "a cell fails where one training seed by itself fails"))
    return found


def _rollouts(sides: Comparison) -> str:
    """The policy of the compressed rollouts; of a sweep each, with the arms that were trained under it."""
    by_policy: dict[str, list[str]] = {}
    for arm, policy in sides.trained_under.items():
        by_policy.setdefault(policy, []).append(arm)
    if len(by_policy) == 1:
        return next(iter(by_policy))
    return "; ".join(f"{policy} ({', '.join(arms)})" for policy, arms in by_policy.items())


def reproducibility(sides: Comparison, provenance: Mapping[str, Any]) -> tuple[Table, ...]:
    """Provenance flattened to name and value, and the full policy strings."""
    policies = [(sides.labels[policy], policy) for policy in sides.policies]
    facts = table_of(["recorded", "value"], _flat("", provenance), words=2)
    found = (facts, table_of(["policy", "full form"], policies, words=2))
    return tuple(table for table in found if table)


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    else:
        yield prefix, str(value)
