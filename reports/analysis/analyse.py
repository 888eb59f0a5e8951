"""Everything that stands beside the gate, in one value. No analysis changes the verdict."""

from __future__ import annotations

from collections.abc import Mapping

from reports.analysis.churn import cell_churn
from reports.analysis.concentrated import cell_concentration
from reports.analysis.dose import dose_curves
from reports.analysis.reach import reached
from reports.analysis.results import Analysis
from reports.analysis.safe import safe_budgets
from reports.analysis.seed_spread import seed_spreads
from reports.analysis.sensitivity import sensitivity
from reports.drift.report import Report
from reports.gate.verdict import Verdict
from reports.records.panel import Panel


def analyse(report: Report, tables: Mapping[tuple[str, int], Panel], verdict: Verdict) -> Analysis:
    """The analyses of a report from its score tables; ``verdict`` is that of the report."""
    plan = report.plan
    cells, methods = sensitivity(plan, tables, verdict)
    return Analysis(
        doses=dose_curves(plan, tables),
        safe=safe_budgets(plan, report.contrasts),
        churn=tuple(cell_churn(plan, tables, verdict.decisions)),
        concentration=tuple(cell_concentration(plan, tables, verdict.decisions)),
        sensitivity=cells,
        methods=methods,
        seeds=tuple(seed_spreads(report.contrasts, verdict.decisions)),
        reach=tuple(reached(verdict.decisions)),
    )
