"""Benjamini-Hochberg for the exploratory grid: a list of cells worth a second look, not a list of findings.

Benjamini & Hochberg 1995, JRSS-B 57:289; Benjamini & Yekutieli 2001 for any dependence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fdr:
    """Adjusted p-values in the order given and which of them are at most ``q``."""

    adjusted: tuple[float, ...]
    discovered: tuple[bool, ...]
    q: float
    method: str
    source: str


def benjamini_hochberg(pvalues: Sequence[float], *, q: float = 0.10, dependent: bool = False) -> Fdr:
    """False discovery rate at ``q``; ``dependent`` takes Benjamini-Yekutieli, valid under any dependence."""
    from scipy.stats import false_discovery_control  # slow to import, and only this needs it

    assert 0 < q < 1, q
    method = "by" if dependent else "bh"
    adjusted = tuple(false_discovery_control(pvalues, method=method).tolist()) if pvalues else ()
    return Fdr(
        adjusted=adjusted,
        discovered=tuple(p <= q for p in adjusted),
        q=q,
        method="Benjamini-Yekutieli" if dependent else "Benjamini-Hochberg",
        source="Benjamini & Yekutieli 2001" if dependent else "Benjamini & Hochberg 1995",
    )
