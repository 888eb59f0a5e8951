"""summary.md: the answers and the grid, for the step summary or comment of a CI."""

from __future__ import annotations

from kvaudit.reports.page.formats.markdown import escape, screen_parts
from kvaudit.reports.page.page import Page
from kvaudit.reports.verdict.verdict import PASSED

FILE = "summary.md"
_WORDS = 350  # of the grid


def render(page: Page) -> str:
    """Return the first screen and the remarks."""
    if page.screen is None:
        return f"**{escape(page.banner.status.value)}**: {escape(page.banner.sentence)}\n"
    parts = [*screen_parts(page.screen, _WORDS)]
    parts += ["\n".join(f"* {escape(line)}" for line in page.remarks)] if page.remarks else []
    gated = page.findings.verdict.gated
    passed = sum(d.status in PASSED for d in gated)
    parts.append(f"{passed} of {len(gated)} gated cells hold. The full report is report/report.html.")
    # smaller headings, since it is inserted into a page
    return "\n\n".join(part.replace("# ", "### ", 1) if part.startswith("# ") else part for part in parts) + "\n"
