"""summary.md: the answers and the grid, as a CI shows them beside a run: its step summary or a comment."""

from __future__ import annotations

from kvaudit.reports.page.formats.markdown import escape, screen_parts
from kvaudit.reports.page.page import Page
from kvaudit.reports.verdict.verdict import PASSED

FILE = "summary.md"
_WORDS = 350  # of the grid


def render(page: Page) -> str:
    """The first screen, the remarks, and where the rest is."""
    if page.screen is None:
        return f"**{escape(page.banner.status.value)}**: {escape(page.banner.sentence)}\n"
    parts = [*screen_parts(page.screen, _WORDS)]
    parts += ["\n".join(f"* {escape(line)}" for line in page.remarks)] if page.remarks else []
    passed = page.findings.verdict.gated
    well = sum(d.status in PASSED for d in passed)
    parts.append(f"{well} of {len(passed)} gated cells hold. The rest stands in report/report.html.")
    # below the headings of the page that it is put into
    return "\n\n".join(part.replace("# ", "### ", 1) if part.startswith("# ") else part for part in parts) + "\n"
