"""The tables behind the verdict: what a run cost and how it trained, and the analyses beside the gate."""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.core.text import clip, inline, length_label, length_of
from kvaudit.reports.analysis.cache_use import cache_use
from kvaudit.reports.analysis.curves import Curve
from kvaudit.reports.analysis.results import DoseCurve, ItemLoss, SafeBudget
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.results import CellName
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.layout.names import place_name
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import (
    NOT_SHOWN,
    drift,
    percent,
    points,
    pvalue,
    scientific,
    size,
    times,
    worst_seed,
)
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.stats.few import no_interval


def training_table(findings: Findings) -> Table:
    """Reward and mismatch of every arm."""
    headers = ["arm", "seeds", "reward, first to last"]
    headers += ["effective sample share", "overlap p5", "masked tokens", "rejected sequences", "entries saved"]
    return table_of(headers, [_training_row(curve) for curve in findings.curves])


def _training_row(curve: Curve) -> list[str]:
    reward = f"{scientific(curve.first.get('reward_mean'))} to {scientific(curve.last.get('reward_mean'))}"
    return [
        curve.arm,
        str(len(curve.seeds)),
        reward,
        scientific(curve.last.get("mismatch/ess")),
        scientific(curve.last.get("mismatch/overlap_p5")),
        percent(curve.last.get("mismatch/masked_tokens")),
        percent(curve.last.get("mismatch/rejected_sequences")),
        percent(curve.last.get("token_savings")),
    ]


def mismatch_table(findings: Findings) -> Table:
    """How far sampler and learner were apart over all steps, beside the same of the dense arm: rounding alone."""
    reference = findings.comparison.reference
    floors = [curve.largest.get("mismatch/max_abs_gap") for curve in findings.curves if curve.arm == reference]
    floor = scientific(floors[0] if floors else None)
    headers = ["arm", "steps", "largest gap, nats", f"{reference}'s own (rounding floor)"]
    headers += ["k3 KL, mean", "k3 KL, largest"]
    rows = [
        [
            curve.arm,
            str(curve.steps[-1]) if curve.steps else "0",
            scientific(curve.largest.get("mismatch/max_abs_gap")),
            floor,
            scientific(curve.mean.get("mismatch/k3_kl")),
            scientific(curve.largest.get("mismatch/k3_kl")),
        ]
        for curve in findings.curves
    ]
    return table_of(headers, rows)


def cache_table(findings: Decided) -> Table:
    """Bytes, retention and survival by role of every policy."""
    roles = list(dict.fromkeys(role for c in findings.drift.cells for role in c.survival))
    rows = []
    for use in cache_use(findings.drift):
        own = [c for c in findings.drift.cells if c.policy == use.policy]
        row = [
            findings.comparison.labels.get(use.policy, use.policy),
            size(use.live),
            times(use.live_share),
            size(use.allocated),
            times(use.allocated_share),
            percent(use.retention) if use.is_shown else NOT_SHOWN,
        ]
        for role in roles:
            known = [(c.survival[role], c.n_samples) for c in own if role in c.survival]
            total = sum(n for _, n in known)
            row.append(percent(sum(v * n for v, n in known) / total) if total else "-")
        rows.append(row)
    kept = [f"{role} kept" for role in roles]
    return table_of(["policy", "live bytes", "of none", "allocated", "of none", "entries kept", *kept], rows)


MOST_ROWS = 20
FEWEST_LOST = 3  # items; below, one template carries half by arithmetic alone
MOST_TIMES = 1e6  # beyond, a ratio to the floor is a power of ten


def safe_table(findings: Findings, axis: str) -> Table:
    """Arm and family by suite: the last budget (or length) that was cleared, and the first that was not."""
    found = [s for s in findings.analysis.safe if s.axis == axis]
    columns = list(dict.fromkeys((s.suite, s.context_tokens) for s in found))
    rows = list(dict.fromkeys((s.arm, s.family) for s in found))
    by_place = {(s.arm, s.family, s.suite, s.context_tokens): s for s in found}
    several = len({context for _, context in columns}) > 1
    heads = [f"{suite}, {length_of(n)}" if several and n is not None else suite for suite, n in columns]
    cells = [
        [arm, family, *(_cleared(by_place.get((arm, family, *column))) for column in columns)] for arm, family in rows
    ]
    return table_of(["arm", "policy family" if axis == "budget" else "policy", *heads], cells, 2 + len(columns))


def _cleared(s: SafeBudget | None) -> str:
    if s is None:
        return "-"
    missed = "" if s.failed is None else f"{s.failed}: {s.statuses[s.amounts.index(s.failed)]}"
    if s.cleared is None:
        return f"none ({missed})"
    return f"to {s.cleared}" + (f" (not {missed})" if missed else ", the last tested")


def slope_table(findings: Findings, axis: str) -> Table:
    """Rates by dose, the slope per doubling, and the slope minus the reference's, of families with a gated policy."""
    every = [c for c in findings.analysis.doses if c.axis == axis]
    found = [c for c in every if any(d.policy in findings.rules.primary for d in c.doses)] or every
    what = "budget" if axis == "budget" else "length"
    headers = ["arm", "policy family" if axis == "budget" else "policy", "suite", f"rate by {what}"]
    headers += ["slope per doubling, 95 % interval", f"minus {findings.comparison.reference}'s"]
    return table_of(headers, [_slope_row(c, findings.comparison) for c in found], words=4)


def _slope_row(c: DoseCurve, sides: Comparison) -> list[str]:
    suite = (
        c.suite
        if c.context_tokens is None or len(sides.contexts) == 1
        else f"{c.suite}, {length_label(c.context_tokens)}"
    )
    rates = "; ".join(f"{d.amount}: {percent(d.rate)}" for d in c.doses) or c.reason
    own = drift(c.slope) if c.slope else "-"
    return [c.arm, c.family, suite, rates, own, drift(c.against_reference) if c.against_reference else "-"]


def churn_table(findings: Findings) -> Table:
    """Net drift beside what moved, and what moves by itself where a checkpoint answered more than once."""
    again = any(c.rerun is not None for c in findings.analysis.churn)
    headers = ["cell", "drift, pp", "lost, pp", "gained, pp", "churn", *(["A/A churn"] if again else [])]
    headers += ["any two seeds", "two seeds of one arm"]
    rows = [
        [
            place_name(findings.comparison, c.cell),
            points(c.drift),
            f"{100 * c.losses:.1f}",
            f"{100 * c.gains:.1f}",
            percent(c.churn),
            *([percent(c.rerun)] if again else []),
            percent(c.draws),
            percent(c.draws_rerun),
        ]
        for c in findings.analysis.churn
    ]
    return table_of(headers, rows)


def concentration_table(findings: Findings) -> Table:
    """Where the losses of every cell sit, the most concentrated loss first."""
    found = sorted(findings.analysis.concentration, key=lambda c: -c.losses)
    headers = [
        "cell",
        "items lost",
        "templates that lost",
        "carry half",
        "Gini (by chance)",
        "design effect",
        "worst template",
        "its share",
    ]
    rows = [
        [
            place_name(findings.comparison, c.cell),
            f"{c.losses:.3g}",
            f"{c.n_losing} of {c.n_templates}",
            str(c.carrying_half),
            f"{c.gini:.2f} ({c.chance:.2f})",
            f"{c.deff:.2f}",
            c.templates[0].template,
            percent(c.templates[0].share) + (" (over half)" if c.dominant and c.losses >= FEWEST_LOST else ""),
        ]
        for c in found
    ]
    return table_of(headers, rows)


def losing_items_table(findings: Findings) -> Table:
    """The items that lost most, once each, with the cell that lost them most."""
    found: dict[tuple[str, str], list[tuple[ItemLoss, CellName]]] = {}
    for c in findings.analysis.concentration:
        for item in c.items:
            found.setdefault((c.cell.suite, item.item_id), []).append((item, c.cell))
    worst = [(max(losses, key=lambda entry: entry[0].loss), len(losses)) for losses in found.values()]
    worst.sort(key=lambda entry: (-entry[0][0].loss, -entry[1], entry[0][0].item_id))
    rows = [
        [item.item_id, item.template, place_name(findings.comparison, cell), points(-item.loss), str(count)]
        for (item, cell), count in worst[:MOST_ROWS]
    ]
    return table_of(["item", "template", "lost most by", "change, pp", "cells that lost it"], rows, words=3)


def concentration_notes(findings: Findings) -> tuple[str, ...]:
    """How to read the table; the templates that carry more than half of a cell's losses, unless next to none."""
    if not findings.analysis.concentration:
        return ()
    return (
        "Gini: 0 where templates lose alike, near 1 where one loses all. By chance: the mean Gini of the same losses "
        "fallen at random; only what is beyond it is concentration. Design effect: how many times the templates raise "
        "the variance of the drift, samples and seeds averaged before.",
        *_dominant(findings),
    )


def _dominant(findings: Findings) -> Iterator[str]:
    return (
        inline(
            f"{place_name(findings.comparison, c.cell)}: more than half of the losses sit in one template, "
            f"{clip(c.dominant[0], 80)}."
        )
        for c in findings.analysis.concentration
        if c.dominant and c.losses >= FEWEST_LOST
    )


def seed_table(findings: Findings) -> Table:
    """Drift by training seed, how far the seeds lie apart, and the drift with their variance added."""
    known = {(c.estimand, c.arm, c.policy, c.suite, c.context_tokens): c for c in findings.drift.contrasts}
    rows = []
    for s in findings.analysis.seeds:
        c = known[s.cell.estimand, s.cell.arm, s.cell.policy, s.cell.suite, s.cell.context_tokens]
        each = ", ".join(f"{seed}: {points(value)}" for seed, value in zip(s.seeds, s.estimates, strict=True))
        sd = "-" if s.sd is None else f"{100 * s.sd:.1f} pp [{100 * (s.low or 0):.1f}, {100 * (s.high or 0):.1f}]"
        recipe = drift(c.recipe) if c.recipe else "recipe claim not supported"
        worst = worst_seed(min(c.by_seed, key=lambda seed: seed.estimate)) if c.by_seed else "-"
        rows.append(
            [place_name(findings.comparison, s.cell), each, drift(c.effect) if c.effect else "-", worst, sd, recipe]
        )
    headers = ["cell", "drift by seed, pp", "averaged", "worst seed, 95 % interval", "SD over seeds, 95 % interval"]
    headers.append("with seed variance")
    return table_of(headers, rows)


def reach_table(findings: Findings) -> Table:
    """The smallest drop each gated cell would have found, against its margin."""
    rows = [
        [
            place_name(findings.comparison, r.cell),
            str(r.n_clusters),
            f"{100 * r.margin:g}",
            f"{100 * r.detectable:.1f}",
            r.larger or "-",
        ]
        for r in findings.analysis.reach
    ]
    headers = [
        "cell",
        "templates",
        "margin, pp",
        "smallest drop found with power .8, pp",
        "templates that would pass if nothing was lost",
    ]
    return table_of(headers, rows)


def methods_table(findings: Findings) -> Table:
    """What each other way of analysing would have said of the run."""
    rows = [
        [m.method, m.status, "FLIPS the verdict" if m.flips else "same verdict", str(m.cells)]
        for m in findings.analysis.methods
    ]
    return table_of(["analysis", "verdict", "against the declared one", "cells that differ"], rows, words=3)


def sensitivity_table(findings: Findings) -> Table:
    """Every gated cell under every method: verdict, with the interval or the p-value of a drop."""
    cells = findings.analysis.sensitivity
    names = [v.method for v in cells[0].variants] if cells else []
    rows = []
    for c in cells:
        declared = c.variants[0].status.rstrip("*")
        row = [place_name(findings.comparison, c.cell)]
        for v in c.variants:
            mark = "" if v.status.rstrip("*") == declared else " (differs)"
            row.append(f"{v.status}{mark} {_numbers(v.estimate, v.low, v.high, v.pvalue_drop)}")
        rows.append(row)
    return table_of(["cell", *names], rows, words=1 + len(names))


def _numbers(estimate: float, low: float | None, high: float | None, p: float | None) -> str:
    if low is not None and high is not None:
        return f"{points(estimate)} [{points(low)}, {points(high)}]"
    return f"{points(estimate)}, p {pvalue(p)}" if p is not None else ""


def displacement_table(findings: Findings) -> Table:
    """Token distributions against the reference's, floors first."""
    headers = ["arm", "policy", "suite", "tokens", "mean KL, nats, 95 % interval", "median", "p99", "p99.9", "max"]
    headers += ["same top-1", "RMS dp", "refusal log-odds", "times the floor"]
    rows = []
    for d in findings.displacement:
        arm = f"{d.arm} again (A/A floor)" if d.floor else f"{d.arm} seed {d.seed}"
        between = f", {no_interval(d.clusters)}" if d.low is None else f" [{d.low:.3g}, {d.high:.3g}]"
        kl = f"{d.mean_kl:.3g}{between}"
        row = [
            arm,
            findings.comparison.labels.get(d.policy, d.policy),
            f"{d.suite}, {length_label(d.context_tokens)}",
            str(d.tokens),
            kl,
        ]
        row += [f"{v:.3g}" for v in (d.median_kl, d.p99_kl, d.p99_9_kl, d.max_kl)]
        row += [percent(d.same_top1), percent(d.rms_dp)]
        row.append("-" if d.refusal_margin is None else f"{d.refusal_margin:+.2f}")
        row.append("-" if d.ratio is None else f"{d.ratio:.1f}x" if d.ratio < MOST_TIMES else f"{d.ratio:.0e}x")
        rows.append(row)
    return table_of(headers, rows, words=3)
