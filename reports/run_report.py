"""A run's report as it is decided: human labels in the place of the judge's."""

from __future__ import annotations

from reports.drift.drift import drift_report
from reports.drift.report import Report
from reports.gate.gate_file import Asked
from reports.labels.corrected import with_labels
from reports.records.load import RunData


def run_report(data: RunData, asked: Asked | None = None) -> Report:
    """The report that decides a run, without what stands beside its verdict.

    Raises SpecError for a gate file or waivers that cannot be used, DataError for human labels that do not fit the run.
    """
    return with_labels(data, drift_report(data, asked or Asked()))
