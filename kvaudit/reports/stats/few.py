"""Too few templates for an interval: what is said in its place, and the estimate that stands alone.

No statistic: nothing is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean paired difference of too few clusters for an interval, in score units; it shows nothing."""

    estimate: float
    n_items: int
    n_clusters: int
    low: None = None
    high: None = None


def no_interval(clusters: int) -> str:
    """What stands in place of an interval below ``FEWEST_CLUSTERS``, wherever one is shown."""
    return f"too few templates for an interval ({clusters}, wanted {FEWEST_CLUSTERS})"
