"""summary.md: the few lines that a CI shows beside a run, as its step summary or a comment."""

from __future__ import annotations

from kvaudit.reports.page.disclosure import disclosure_of
from kvaudit.reports.page.formats.markdown import escape
from kvaudit.reports.page.page import Page

FILE = "summary.md"
_SHOWN = 12  # cells that do not pass


def render(page: Page) -> str:
    """Verdict, number, remarks, the gated cells that do not pass, and where the rest is."""
    told, top = disclosure_of(page), page.banner
    cells = [m for m in told.drift if m.verdict != "not gated"]
    bad = [m for m in cells if not m.verdict.startswith("PASS")]
    parts = [f"### {escape(top.title)}", f"**{escape(top.status.value)}**: {escape(top.sentence)}"]
    parts += [f"> **{escape(top.alarm)}**"] if top.alarm else []
    parts += [f"{escape(top.number)}. {escape(top.about)}"] if top.number else []
    parts += ["\n".join(f"* {escape(line)}" for line in page.remarks)] if page.remarks else []
    arms = ", ".join(escape(recipe.arm) for recipe in told.recipes)
    parts.append(f"{len(cells) - len(bad)} of {len(cells)} gated cells pass. Arms: {arms}.")
    if bad:
        rows = "\n".join(f"| {escape(m.slice)} | {escape(m.number)} | {escape(m.verdict)} |" for m in bad[:_SHOWN])
        parts.append(f"| cell | drift | verdict |\n| --- | --- | --- |\n{rows}")
    if len(bad) > _SHOWN:
        parts.append(f"and {len(bad) - _SHOWN} more in report.html")
    return "\n\n".join(parts) + "\n"
