"""Holm's step-down adjustment of a family of p-values (Holm 1979).

No statistic: an adjustment of p-values.
"""

from __future__ import annotations

from collections.abc import Sequence


def holm(pvalues: Sequence[float]) -> tuple[float, ...]:
    """Adjusted p-values in the order given: family-wise error holds under any dependence."""
    order = sorted(range(len(pvalues)), key=lambda i: pvalues[i])
    adjusted = [0.0] * len(pvalues)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(pvalues) - rank) * pvalues[index]))
        adjusted[index] = running
    return tuple(adjusted)
