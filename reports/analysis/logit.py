"""The interaction on the log-odds scale: near a ceiling its sign can depend on the scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from reports.analysis.cells import sides
from reports.analysis.results import CellName, LogitCheck
from reports.panel import Panel
from reports.plan import Plan
from reports.report import Contrast
from reports.stats.logit_did import logit_did


def logit_checks(
    plan: Plan, tables: Mapping[tuple[str, int], Panel], contrasts: Iterable[Contrast]
) -> Iterator[LogitCheck]:
    """The check of every interaction under a gated policy that has a number."""
    for c in contrasts:
        if c.estimand == "E5" and c.effect and c.policy in plan.primary:
            check = _check(plan, tables[c.suite, c.context_tokens], c)
            if check:
                yield check


def _check(plan: Plan, panel: Panel, c: Contrast) -> LogitCheck | None:
    """The four rates of an interaction: both arms compressed (E1) and both uncompressed (E1 at none)."""
    name = CellName("E1", c.arm, c.policy, c.suite, c.context_tokens)
    compressed = sides(panel, plan, name)
    dense = sides(panel, plan, CellName("E1", c.arm, "none", c.suite, c.context_tokens))
    if compressed is None or dense is None or compressed.items != dense.items:
        return None
    found = logit_did(compressed.candidate, dense.candidate, compressed.reference, dense.reference, compressed.clusters)
    return LogitCheck(
        cell=CellName("E5", c.arm, c.policy, c.suite, c.context_tokens),
        difference=float(np.mean(compressed.difference - dense.difference)),
        logit=found.estimate,
        low=found.low,
        high=found.high,
        pvalue=found.pvalue,
        ceiling_driven=found.ceiling_driven,
    )
