"""How a page is written: one file per format, found by walking this package. Each has ``FILE`` and ``render(page)``."""

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
    """File name -> renderer of every format."""
    found = {}
    for entry in pkgutil.iter_modules(__path__, __name__ + "."):
        module = importlib.import_module(entry.name)
        found[str(module.FILE)] = module.render
    return found


def write_pages(folder: Path, page: Page) -> None:
    """Write a page in every format, its contrasts beside, each file whole or not at all.

    Raises RunError where the folder takes none.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{str(folder)!r} is a file, and the report's folder belongs there; move it away")
    for name, render in formats().items():
        write_output(folder / name, render(page))
    write_output(folder / CONTRASTS, contrasts_csv(page.findings))
