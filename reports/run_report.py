"""A run's report as it is decided: human labels in the place of the judge's."""

from __future__ import annotations

from reports.drift import drift_report
from reports.gate_file import Asked
from reports.judge import with_labels
from reports.load import RunData
from reports.report import Report


def run_report(data: RunData, asked: Asked | None = None) -> Report:
    """The report that decides a run, without what stands beside its verdict.

    Raises SpecError for a gate file or waivers that cannot be used, DataError for human labels that do not fit the run.
    """
    return with_labels(data, drift_report(data, asked or Asked()))
