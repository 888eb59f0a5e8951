"""Run folder -> report/: every format found in ``reports/formats``, written whole or not at all."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import reports.page.formats
from audit.core.errors import DataError, RunError
from reports.analysis.displacement import load_displacement
from reports.analysis.examples import largest_losses
from reports.calibration.stamp import stamp
from reports.drift.report import Report
from reports.gate.decide import decide
from reports.gate.gate_file import Asked
from reports.records.load import RunData, load_run
from reports.run_report import run_report

T = TypeVar("T")


def write_report(run: Path, asked: Asked | None = None) -> Report:
    """Read the run, write every format into ``run/report`` and return the report, decided by its spec or as ``asked``.

    Raises DataError and SpecError for a run that cannot be read, RunError when the folder cannot be written.
    """
    data = load_run(Path(run))
    report = with_details(data, run_report(data, asked))
    folder = Path(run) / "report"
    for name, render in formats().items():
        write_whole(folder / name, render(report))
    return report


def with_details(data: RunData, report: Report) -> Report:
    """The report with what stands beside its verdict: examples, analyses, displacement, calibration.

    A file of these that cannot be used decides nothing, so it is named among the problems and left out.
    """
    from reports.analysis.analyse import analyse  # scipy's optimisers take a while to import

    verdict = decide(report)
    problems = list(report.problems)
    return replace(
        report,
        examples=largest_losses(data, report, verdict),
        analysis=analyse(report, data.panels, verdict),
        displacement=_or_problem(lambda: load_displacement(data.run), (), problems),
        calibration=stamp(),
        problems=tuple(problems),
    )


def _or_problem(load: Callable[[], T], otherwise: T, problems: list[str]) -> T:
    try:
        return load()
    except DataError as error:
        problems.append(str(error))
        return otherwise


def formats() -> dict[str, Callable[[Report], str]]:
    """File name -> renderer of every module in ``reports/formats``."""
    found = {}
    for entry in pkgutil.iter_modules(reports.page.formats.__path__, "reports.page.formats."):
        module = importlib.import_module(entry.name)
        found[str(module.FILE)] = module.render
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; raises RunError where the folder cannot be written."""
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); free the disk or make the folder writable"
        ) from None
