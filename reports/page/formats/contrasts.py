"""contrasts.csv: every contrast and facet of a run, a row each, for a data frame or a spreadsheet."""

from __future__ import annotations

import csv
import io
from typing import Any

from kvaudit.core.text import inline
from kvaudit.reports.layout.rows import COLUMNS, contrast_rows
from kvaudit.reports.page.page import Page

FILE = "contrasts.csv"
_FORMULA = ("=", "+", "-", "@", "\t")  # what a spreadsheet takes for a formula


def render(page: Page) -> str:
    """The rows; what does not exist is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_field(row[name]) for name in COLUMNS] for row in contrast_rows(page.findings))
    return text.getvalue()


def _field(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        shown = inline(value)
        return f"'{shown}" if shown.startswith(_FORMULA) else shown
    return value
