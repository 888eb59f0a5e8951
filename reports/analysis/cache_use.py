"""Bytes and kept entries of each policy, averaged over everything that was served under it."""

from __future__ import annotations

from typing import NamedTuple

from reports.drift.results import Drift


class Use(NamedTuple):
    """Mean bytes per row over every arm, suite and length."""

    policy: str
    peak: float
    dense: float
    retention: float


def cache_use(drift: Drift) -> list[Use]:
    """Cache use of every policy that has records, weighted by samples."""
    uses = []
    for policy in drift.comparison.policies:
        own = [c for c in drift.cells if c.policy == policy]
        rows = sum(c.n_samples for c in own)
        if rows:
            peak, dense, kept = (
                sum(getattr(c, name) * c.n_samples for c in own) / rows
                for name in ("kv_bytes_peak", "kv_bytes_dense", "retention")
            )
            uses.append(Use(policy, peak, dense, kept))
    return uses
