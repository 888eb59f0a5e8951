"""Bytes and kept entries of the cache of each policy, averaged over all its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvaudit.reports.verdict.contrast import Cell, Drift


class CacheUse(NamedTuple):
    """Mean cache bytes per row (one sequence of a batch) over every arm, suite and length, counted in two ways.

    ``allocated`` includes slack and bookkeeping; ``live`` counts only the entries, None if some record lacks it. The
    shares are relative to policy ``none`` counted the same way, None if that is unknown. For an engine that does not
    show its cache every number is None.
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
        """Whether the engine shows its cache, so that it could be measured."""
        return self.retention is not None


def cache_use(drift: Drift) -> list[CacheUse]:
    """Return the mean cache use of every policy that has records, weighted by their number."""
    uses = []
    for policy in drift.comparison.policies:
        cells = [c for c in drift.cells if c.policy == policy]
        if cells:
            uses.append(
                CacheUse(
                    policy,
                    allocated=_mean([c.kv_bytes_peak for c in cells], cells),
                    live=_mean([c.kv_bytes_live for c in cells], cells),
                    dense=_mean([c.kv_bytes_dense for c in cells], cells),
                    allocated_share=_share([c.kv_ratio for c in cells], cells),
                    live_share=_share([c.kv_live_ratio for c in cells], cells),
                    retention=_mean([c.retention for c in cells], cells),
                )
            )
    return uses


def lacks_live_bytes(drift: Drift) -> bool:
    """Return whether, for some policy, records state bytes of the cache but not those of its live entries."""
    return any((use.dense or 0) > 0 and use.live is None for use in cache_use(drift))


def _mean(values: Sequence[float | None], cells: Sequence[Cell]) -> float | None:
    return _weighted(values, [float(c.n_samples) for c in cells])


def _share(values: Sequence[float | None], cells: Sequence[Cell]) -> float | None:
    # weighted by uncompressed bytes, so that the result is the share of all bytes
    return _weighted(values, [c.n_samples * (c.kv_bytes_dense or 0.0) for c in cells])


def _weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted mean; None if one of the values is unknown (None)."""
    numbers = [value for value in values if value is not None]
    total = sum(weights)
    if len(numbers) < len(values) or total <= 0:
        return None
    return sum(value * weight for value, weight in zip(numbers, weights, strict=True)) / total
