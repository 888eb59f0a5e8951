"""Everything that stands beside the gate, in one value. No analysis changes the verdict."""

from __future__ import annotations

from kvaudit.reports.analysis.cells import cell_churn, cell_concentration, reached, seed_spreads
from kvaudit.reports.analysis.dose import dose_curves
from kvaudit.reports.analysis.results import Analysis
from kvaudit.reports.analysis.safe import safe_budgets
from kvaudit.reports.analysis.sensitivity import sensitivity
from kvaudit.reports.drift.results import Drift
from kvaudit.reports.gate.rules import Rules
from kvaudit.reports.gate.verdict import Verdict
from kvaudit.reports.records.rows import Panels


def analyse(drift: Drift, rules: Rules, verdict: Verdict, tables: Panels) -> Analysis:
    """The analyses of a decided drift, from its score tables."""
    sides, decisions = drift.comparison, verdict.decisions
    cells, methods = sensitivity(drift, tables, verdict)
    return Analysis(
        doses=dose_curves(drift, tables),
        safe=safe_budgets(drift, rules),
        churn=tuple(cell_churn(sides, tables, decisions)),
        concentration=tuple(cell_concentration(sides, tables, decisions)),
        sensitivity=cells,
        methods=methods,
        seeds=tuple(seed_spreads(drift.contrasts, decisions)),
        reach=tuple(reached(decisions, verdict.adjustment)),
    )
