"""The text in place of an interval if there are too few templates, and an estimate without an interval.

No statistic: nothing is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean paired difference in score units, of too few clusters for an interval."""

    estimate: float
    n_items: int
    n_clusters: int
    low: None = None
    high: None = None


def no_interval(clusters: int) -> str:
    """Return the text in place of an interval below ``FEWEST_CLUSTERS``."""
    return f"too few templates for an interval ({clusters}, wanted {FEWEST_CLUSTERS})"
