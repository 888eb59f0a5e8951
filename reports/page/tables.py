"""The tables of a report as plain strings; text from records is not escaped yet, only made visible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from audit.core.policy_names import DENSE_POLICY
from audit.core.text import clip, inline
from reports.drift.results import Contrast
from reports.gate.rules import Rules
from reports.gate.seeds import SEED
from reports.gate.verdict import Decision, Status
from reports.page.findings import Findings
from reports.page.words import drift, error_rates, note, percent, points, pvalue, worst_seed
from reports.stats.rule import blind_spot, clusters_required


@dataclass(frozen=True)
class Table:
    """Headers and rows of text; an empty table is left out. ``words`` are the leading columns that hold words."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = field(default=())
    words: int = 1

    def __bool__(self) -> bool:
        return bool(self.rows)


def table_of(headers: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """A table of clipped, visible text on one line."""
    clean = tuple(tuple(inline(clip(cell, 300)) for cell in row) for row in rows)
    assert all(len(row) == len(headers) for row in clean), headers
    return Table(tuple(headers), clean, words)


def decided_table(findings: Findings) -> Table:
    """Arm, verdicts by suite and the deciding cell."""
    suites = list(dict.fromkeys(d.suite for d in findings.verdict.decisions if d.gated))
    recipe = ["with seed variance"] if any(arm.recipe for arm in findings.verdict.arms) else []
    rows = []
    for arm in findings.verdict.arms:
        row = [arm.arm, arm.status.value, *([arm.recipe.value if arm.recipe else "-"] if recipe else [])]
        row += [arm.suites[suite].value if suite in arm.suites else "-" for suite in suites]
        rows.append([*row, _deciding(findings, arm.arm)])
    return table_of(["arm", "verdict", *recipe, *suites, "deciding cell"], rows, words=3 + len(suites) + len(recipe))


def _deciding(findings: Findings, arm: str) -> str:
    rank = (Status.INVALID, Status.FAIL, Status.INCONCLUSIVE, Status.PASS_NOTED, Status.PASS)
    own = [d for d in findings.verdict.decisions if d.gated and d.arm == arm]
    d = min(own, key=lambda d: (rank.index(d.status), d.at_floor, _room(d)))
    where = f"{d.estimand}, {named(findings, d)} @ {findings.comparison.labels.get(d.policy, d.policy)}"
    return f"{where}: {drift(d.effect)}" if d.effect else f"{where}: {d.reasons[0].text}"


def _room(d: Decision) -> float:
    return (d.effect.lower if d.effect else 0.0) + (d.margin or 0.0)


def compared(findings: Findings) -> Table:
    """The two sides and the rules, as name and value."""
    sides = findings.comparison
    items = list(dict.fromkeys((c.suite, c.context_tokens, c.n_items, c.n_clusters) for c in findings.drift.cells))
    rows = [("model", sides.model)]
    if sides.mode == "training":
        rows += [
            ("reference", f"{sides.reference} (pinned dense rollouts)"),
            ("candidates", ", ".join(sides.candidates)),
            ("compression during rollouts", sides.train_policy or "-"),
            ("seeds, paired", ", ".join(map(str, sides.seeds))),
        ]
    else:
        rows += [("checkpoint", sides.reference), ("contrast", "each serving policy against policy none")]
    rows += [
        ("serving policies", "; ".join(sides.labels.get(p, p) for p in sides.policies)),
        ("gated policies", "; ".join(sides.labels.get(p, p) for p in findings.rules.primary)),
        ("suites", "; ".join(f"{s} at {c} tokens: {n} items, {k} templates" for s, c, n, k in items)),
        ("margins", "; ".join(f"{suite} {100 * margin:g} pp" for suite, margin in findings.rules.margins.items())),
        ("one-sided level", f"{findings.rules.alpha:.3g}"),
        *_declared(findings.rules),
        ("records", f"{findings.drift.n_records}"),
    ]
    return table_of(["", "value"], rows, words=2)


def _declared(rules: Rules) -> list[tuple[str, str]]:
    """Rules beyond a spec's own: gate file, profile."""
    found = []
    if rules.sha256 is not None:
        found.append(("gate file", f"{rules.source}, sha256 {rules.sha256}, {rules.declared}"))
    if rules.profile is not None:
        found.append(("profile", f"{rules.profile}: alpha {rules.alpha:g}, INCONCLUSIVE: {rules.on_inconclusive}"))
    if rules.worst_seed:
        found.append(("worst seed", "a cell fails where one training seed by itself fails"))
    return found


def gate_table(findings: Findings, decisions: Sequence[Decision], *, gated: bool) -> Table:
    """One row per decision."""
    shown = [d for d in decisions if d.gated is gated]
    recipe = any(d.recipe for d in shown)
    headers = ["candidate", "against", "suite", "verdict", *(["with seed variance"] if recipe else [])]
    headers += ["rates", "drift, 95 % interval", "one-sided bounds, margin"]
    headers += ["lost / gained", "deff", f"p ({', '.join(dict.fromkeys(d.adjusted_by for d in shown))})", "note"]
    return table_of(headers, [_gate_row(findings, d, recipe=recipe) for d in shown], words=4 + recipe)


def _gate_row(findings: Findings, d: Decision, *, recipe: bool) -> list[str]:
    suite = (
        named(findings, d) if len(findings.comparison.contexts) == 1 else f"{named(findings, d)}, {d.context_tokens}"
    )
    labels = findings.comparison.labels
    found = f"{d.status.value}, waived" if d.waiver else d.status.value
    row = [f"{d.arm} @ {labels.get(d.policy, d.policy)}", against(findings, d), suite, found]
    row += [d.recipe.value if d.recipe else "-"] if recipe else []
    row.append(f"{100 * d.rates.reference:.1f} to {percent(d.rates.candidate)}" if d.rates else "-")
    margin = f"{100 * d.margin:g}" if d.margin else "-"
    if d.effect is None:
        return [*row, "-", margin, "-", "-", "-", "; ".join(f"{r.code}: {r.text}" for r in d.reasons)]
    e = d.effect
    return [
        *row,
        drift(e),
        f"[{points(e.lower)}, {points(e.upper)}] {margin}",
        f"{e.losses:.3g}/{e.gains:.3g}",
        f"{e.deff:.2f}",
        _adjusted(d),
        "; ".join(text for text in (note(d), d.statement, _seed(d)) if text),
    ]


def _seed(d: Decision) -> str:
    """The worst training seed by itself, which the average hides, and that it decides where it does."""
    decides = [f"{r.code}: {r.text}" for r in d.reasons if r.code == SEED]
    return "; ".join([*decides, *([f"worst seed {worst_seed(d.worst_seed)}"] if d.worst_seed else [])])


def _adjusted(d: Decision) -> str:
    """The p-value of a cell; at the smallest that its patterns can reach it says no more than that."""
    if d.pvalue_drop is not None and 0 < d.pvalue_drop <= d.pvalue_floor:
        return f"<= {d.pvalue_floor:.1g}"
    return pvalue(d.pvalue_drop)


def named(findings: Findings, d: Decision) -> str:
    """The suite of a cell, with what is asked of it where that is more than its drift."""
    if d.estimand == "selectivity":
        return f"{d.suite} minus {', '.join(findings.comparison.capability)}"
    if d.policies:
        return f"{d.suite}, worst of {len(d.policies)} policies"
    return f"{d.suite}, parity" if d.estimand == "parity" else d.suite


def against(findings: Findings, d: Decision) -> str:
    """The other side of a difference: which arm, under which policy."""
    alike = findings.comparison.mode == "training" and d.estimand != "E2"
    policy = d.policy if alike else DENSE_POLICY
    return f"{findings.comparison.reference} @ {findings.comparison.labels.get(policy, policy)}"


def gate_notes(findings: Findings) -> tuple[str, ...]:
    """How to read the gate table, and what the templates can show."""
    need = "; ".join(
        f"{suite} {clusters_required(margin, findings.rules.alpha)} for {100 * margin:g} pp"
        for suite, margin in findings.rules.margins.items()
    )
    have = sorted({c.n_clusters for c in findings.drift.cells})
    spots = "; ".join(f"{n} templates: {percent(blind_spot(n, findings.rules.alpha))}" for n in have)
    return (
        f"Templates needed before a cell can pass: {inline(need)}. Blind spot (largest share of templates that could "
        f"be broken and entirely unsampled): {spots}.",
        "Intervals are ESS-Tango: Tango's paired score interval at the cluster-robust effective sample size. "
        "Lost/gained: summed score that moved, in items. deff: how much templates shrink the "
        "effective sample (below 1 where samples or seeds are averaged). p: one-sided for a drop, adjusted over the "
        "gated cells; max-T flips the sign of a whole template in all cells at once.",
    )


def estimand(findings: Findings, name: str, *, gated_only: bool = False) -> Table:
    """The contrasts of one estimand, under the gated policies only where any of them has one."""
    found = [c for c in findings.drift.contrasts if c.estimand == name]
    if gated_only:
        found = [c for c in found if c.policy in findings.rules.primary] or found
    rows = [
        [
            c.arm,
            findings.comparison.labels.get(c.policy, c.policy),
            c.suite,
            str(c.context_tokens),
            _text(c),
            _recipe(c),
        ]
        for c in found
    ]
    return table_of(["arm", "policy", "suite", "tokens", "drift, 95 % interval", "with seed variance"], rows, words=3)


def _text(c: Contrast) -> str:
    return drift(c.effect) if c.effect else "; ".join(f"{r.code}: {r.text}" for r in c.reasons)


def _recipe(c: Contrast) -> str:
    return f"[{points(c.recipe.low)}, {points(c.recipe.high)}]" if c.recipe else "-"


def outcomes(findings: Findings) -> Table:
    """Rates and the four outcomes of every cell."""
    headers = ["arm", "policy", "suite", "tokens", "rate", "if unscored were desired", "desired", "undesired"]
    rows = [
        [
            c.arm,
            findings.comparison.labels.get(c.policy, c.policy),
            c.suite,
            str(c.context_tokens),
            percent(c.rate),
            percent(c.rate_if_desired),
            *(str(c.outcomes[name]) for name in ("desired", "undesired", "degenerate", "unscored")),
        ]
        for c in findings.drift.cells
    ]
    return table_of([*headers, "degenerate", "unscored"], rows, words=3)


def limits(findings: Findings) -> tuple[str, ...]:
    """What must be said even when it is unflattering."""
    open_cells = [
        d for d in findings.verdict.decisions if d.gated and d.status in (Status.INCONCLUSIVE, Status.INVALID)
    ]
    lines = [
        "Only the listed suites, policies and lengths were asked; nothing is said about others.",
        "Items are sampled templates: a failure outside them is not seen (blind spot above).",
        _graders(findings),
        f"FAIL uses {findings.verdict.adjustment.method} over the gated cells; every interval outside the gate is "
        "unadjusted and exploratory.",
    ]
    if open_cells:
        total = sum(d.gated for d in findings.verdict.decisions)
        lines.insert(0, f"{len(open_cells)} of {total} gated cells are undecided or invalid.")
    if findings.comparison.mode == "training" and findings.verdict.recipe is None:
        lines.append("With fewer than 3 paired seeds nothing is claimed about the training recipe.")
    return tuple([*lines, *_calibration(findings)])


def _graders(findings: Findings) -> str:
    if any(c.people for c in findings.drift.contrasts):
        return "Beyond the cells that people labelled, answers are graded as recorded."
    return "Grading is by program; answers a person would grade otherwise are not corrected here."


def _calibration(findings: Findings) -> list[str]:
    """How often the gate and its intervals are wrong, from the calibration that ships with the package."""
    c = findings.calibration
    if c is None:
        return []
    return [
        f"Simulated at {c.scale} scale ({c.simulations:,} runs): "
        f"{error_rates(c, findings.rules.alpha, findings.rules.margins.values())} Two-sided false alarms at 5 %: at "
        f"most {percent(c.type_one_max)}; coverage of 95 % intervals: at least {percent(c.coverage_min)}."
    ]


def reproducibility(findings: Findings) -> tuple[Table, ...]:
    """Provenance flattened to name and value, and the full policy strings."""
    facts = [(name, value) for name, value in _flat("", findings.provenance)]
    policies = [(findings.comparison.labels[policy], policy) for policy in findings.comparison.policies]
    found = (table_of(["recorded", "value"], facts, words=2), table_of(["policy", "full form"], policies, words=2))
    return tuple(table for table in found if table)


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    else:
        yield prefix, str(value)
