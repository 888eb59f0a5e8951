"""Run folder -> report/: every format found in ``reports/formats``, written whole or not at all."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import reports.formats
from audit.errors import RunError
from reports.drift import drift_report
from reports.examples import largest_losses
from reports.gate import decide
from reports.load import load_run
from reports.report import Report


def write_report(run: Path) -> Report:
    """Read the run, write every format into ``run/report`` and return the report.

    Raises DataError and SpecError for a run that cannot be read, RunError when the folder cannot be written.
    """
    data = load_run(Path(run))
    report = drift_report(data)
    report = replace(report, examples=largest_losses(data, report, decide(report)))
    folder = Path(run) / "report"
    for name, render in formats().items():
        write_whole(folder / name, render(report))
    return report


def formats() -> dict[str, Callable[[Report], str]]:
    """File name -> renderer of every module in ``reports/formats``."""
    found = {}
    for entry in pkgutil.iter_modules(reports.formats.__path__, "reports.formats."):
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
