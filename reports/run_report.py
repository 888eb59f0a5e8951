"""A run's report as it is decided: human labels in their place, and no gate file milder than the rules of the run.

A gate file that was declared after the run may be stricter than what the run began with, never milder: the records are
decided under both, and the report is the one with the worse verdict. The other verdict is named in it.
"""

from __future__ import annotations

from dataclasses import replace

from reports.drift import drift_report
from reports.gate import decide
from reports.gate_file import Asked, declares_gate
from reports.judge import with_labels
from reports.load import RunData
from reports.report import OtherRules, Report
from reports.rules import AFTER_RUN
from reports.verdict import PRECEDENCE, Verdict


def run_report(data: RunData, asked: Asked | None = None) -> Report:
    """The report that decides a run, without what stands beside its verdict.

    Raises SpecError for a gate file or waivers that cannot be used, DataError for human labels that do not fit the run.
    """
    asked = asked or Asked()
    report = with_labels(data, drift_report(data, asked))
    if report.plan.rules.declared != AFTER_RUN or not declares_gate(data):
        return report
    own = with_labels(data, drift_report(data, replace(asked, gate=None, pin=None)))
    here, there = decide(report), decide(own)
    if _severity(there) > _severity(here):
        return replace(own, other_rules=_named(report, here))
    return replace(report, other_rules=_named(own, there))


def _severity(verdict: Verdict) -> tuple[int, int]:
    return -PRECEDENCE.index(verdict.status), verdict.exit_code


def _named(report: Report, verdict: Verdict) -> OtherRules:
    rules = report.plan.rules
    return OtherRules(
        rules.source, rules.sha256, rules.declared, rules.changes, verdict.status.value, verdict.exit_code
    )
