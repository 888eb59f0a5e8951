"""The formats of a page, one file each, found by walking this package; each has ``FILE`` and ``render(page)``."""

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
    """Return file name -> renderer of every format."""
    renderers = {}
    for entry in pkgutil.iter_modules(__path__, __name__ + "."):
        module = importlib.import_module(entry.name)
        renderers[str(module.FILE)] = module.render
    return renderers


def write_pages(folder: Path, page: Page) -> None:
    """Write a page in every format, and contrasts.csv; raises RunError if the folder is a file."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{str(folder)!r} is a file, but must be the report's folder; move the file away")
    for name, render in formats().items():
        write_output(folder / name, render(page))
    write_output(folder / CONTRASTS, contrasts_csv(page.findings))
