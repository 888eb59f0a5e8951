"""Every contrast outside the gate, held to a false discovery rate: where to look next, not what was shown.

Benjamini & Hochberg 1995, JRSS B 57:289; intervals are not adjusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from reports.analysis.results import CellName, Exploration, Finding
from reports.gated import is_gated
from reports.plan import DENSE_POLICY, Plan
from reports.report import Contrast
from reports.stats.fdr import benjamini_hochberg

RATE = 0.10


def explore(plan: Plan, contrasts: Iterable[Contrast]) -> Exploration | None:
    """The contrasts outside the gate that stand, smallest p-value first; None without any."""
    tested = [(c, c.effect) for c in contrasts if c.effect and not is_gated(c, plan) and not _is_repeated(c, plan)]
    if not tested:
        return None
    result = benjamini_hochberg([effect.pvalue for _, effect in tested], q=RATE)
    findings = [
        Finding(
            cell=CellName(c.estimand, c.arm, c.policy, c.suite, c.context_tokens),
            estimate=effect.estimate,
            low=effect.low,
            high=effect.high,
            pvalue=effect.pvalue,
            adjusted=float(adjusted),
        )
        for (c, effect), adjusted, stands in zip(tested, result.adjusted, result.discovered, strict=True)
        if stands
    ]
    return Exploration(len(tested), RATE, tuple(sorted(findings, key=lambda f: (f.pvalue, f.cell.suite, f.cell.arm))))


def _is_repeated(c: Contrast, plan: Plan) -> bool:
    """Under policy none E4 and E5 compare a checkpoint with itself, and E2 is E1, which may be gated by that name."""
    if c.policy != DENSE_POLICY:
        return False
    return c.estimand != "E1" or is_gated(replace(c, estimand="E2"), plan)
