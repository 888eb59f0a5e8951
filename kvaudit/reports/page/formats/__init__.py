"""The formats of a page, one module each; ``FORMATS`` of a module maps file names to functions that render a page."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from kvaudit.core.errors import RunError
from kvaudit.core.files import write_output
from kvaudit.reports.page.page import Page
from kvaudit.reports.verdict.row import CONTRASTS, contrasts_csv


def formats() -> dict[str, Callable[[Page], str]]:
    """Return a mapping from the file name of every format to the function that renders it."""
    modules = (importlib.import_module(entry.name) for entry in pkgutil.iter_modules(__path__, __name__ + "."))
    return {file: render for module in modules for file, render in module.FORMATS.items()}


def write_pages(folder: Path, page: Page) -> None:
    """Write a page in every format, and contrasts.csv; raises RunError if the folder is a file."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{str(folder)!r} is a file, but must be the report's folder; move the file away")
    for name, render in formats().items():
        write_output(folder / name, render(page))
    write_output(folder / CONTRASTS, contrasts_csv(page.findings))
