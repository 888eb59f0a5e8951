"""The tables of what a run cost and how it trained: reward, mismatch, cache."""

from __future__ import annotations

from reports.analysis.cache_use import cache_use
from reports.analysis.curves import Curve
from reports.page.findings import Findings
from reports.page.plain import percent, scientific, size
from reports.page.tables import Table, table_of


def training(findings: Findings) -> Table:
    """Reward and mismatch of every arm."""
    headers = ["arm", "seeds", "reward, first to last"]
    headers += ["effective sample share", "overlap p5", "rejected", "tokens saved"]
    return table_of(headers, [_training_row(curve) for curve in findings.curves])


def _training_row(curve: Curve) -> list[str]:
    reward = f"{scientific(curve.first.get('reward_mean'))} to {scientific(curve.last.get('reward_mean'))}"
    return [
        curve.arm,
        str(len(curve.seeds)),
        reward,
        scientific(curve.last.get("mismatch/ess")),
        scientific(curve.last.get("mismatch/overlap_p5")),
        percent(curve.last.get("mismatch/rejection_rate")),
        percent(curve.last.get("token_savings")),
    ]


def mismatch(findings: Findings) -> Table:
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


def cache(findings: Findings) -> Table:
    """Bytes, retention and survival by role of every policy."""
    roles = list(dict.fromkeys(role for c in findings.drift.cells for role in c.survival))
    rows = []
    for use in cache_use(findings.drift):
        own = [c for c in findings.drift.cells if c.policy == use.policy]
        ratio = f"{use.peak / use.dense:.2f}x" if use.dense > 0 else "-"
        row = [
            findings.comparison.labels.get(use.policy, use.policy),
            size(use.peak),
            size(use.dense),
            ratio,
            percent(use.retention),
        ]
        for role in roles:
            known = [(c.survival[role], c.n_samples) for c in own if role in c.survival]
            total = sum(n for _, n in known)
            row.append(percent(sum(v * n for v, n in known) / total) if total else "-")
        rows.append(row)
    kept = [f"{role} kept" for role in roles]
    return table_of(["policy", "peak bytes per row", "uncompressed", "ratio", "entries kept", *kept], rows)
