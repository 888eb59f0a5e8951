"""Bytes and kept entries of each policy, averaged over everything that was served under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvaudit.reports.verdict.contrast import Cell, Drift


class CacheUse(NamedTuple):
    """Mean bytes per row over every arm, suite and length, counted in two ways.

    ``allocated`` has slack and bookkeeping, ``live`` is what the entries themselves took, None where some record does
    not say. Their shares are of ``none`` counted the same way, which is 1 by either; None where that is not known.
    An engine shows nothing of its cache: then all of it is None.
    """

    policy: str
    allocated: float | None
    live: float | None
    dense: float | None  # the entries of the same tokens, uncompressed
    allocated_share: float | None
    live_share: float | None
    retention: float | None

    @property
    def is_shown(self) -> bool:
        """Whether anybody saw the cache."""
        return self.retention is not None


def cache_use(drift: Drift) -> list[CacheUse]:
    """Cache use of every policy that has records, weighted by samples."""
    uses = []
    for policy in drift.comparison.policies:
        own = [c for c in drift.cells if c.policy == policy]
        if own:
            uses.append(
                CacheUse(
                    policy,
                    allocated=_mean([c.kv_bytes_peak for c in own], own),
                    live=_mean([c.kv_bytes_live for c in own], own),
                    dense=_mean([c.kv_bytes_dense for c in own], own),
                    allocated_share=_share([c.kv_ratio for c in own], own),
                    live_share=_share([c.kv_live_ratio for c in own], own),
                    retention=_mean([c.retention for c in own], own),
                )
            )
    return uses


def lacks_live_bytes(drift: Drift) -> bool:
    """Whether bytes were recorded, and not those of the live entries for every policy."""
    return any((use.dense or 0) > 0 and use.live is None for use in cache_use(drift))


def _mean(values: Sequence[float | None], cells: Sequence[Cell]) -> float | None:
    """Weighted by samples; None where one value is not known."""
    return _weighted(values, [float(c.n_samples) for c in cells])


def _share(values: Sequence[float | None], cells: Sequence[Cell]) -> float | None:
    """Weighted by what the cells would take uncompressed, so that it is one of all their bytes."""
    return _weighted(values, [c.n_samples * (c.kv_bytes_dense or 0.0) for c in cells])


def _weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [value for value in values if value is not None]
    total = sum(weights)
    if len(known) < len(values) or total <= 0:
        return None
    return sum(value * weight for value, weight in zip(known, weights, strict=True)) / total
