"""report.html: one self-contained page, light and dark, no script, no request; all text from records is escaped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jinja2

from kvaudit.core.text import clip, visible
from kvaudit.reports.page.figures import figures
from kvaudit.reports.page.links import COMMAND, flip_link
from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.shared.words import points, shorten
from kvaudit.reports.verdict.verdict import Status

FILE = "report.html"
_CLASSES = {status.value: "status " + status.name.lower().replace("_", "-") for status in Status}


def render(page: Page) -> str:
    """The page as HTML. Only the figures, which this project draws and matplotlib escapes, are trusted markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "points": points, "clip": clip, "shortened": shorten}
    drawn = figures(page.findings) if any(section.figures for section in page.sections) else {}
    return environment.get_template("report.html.j2").render(
        findings=page.findings,
        banner=page.banner,
        screen=page.screen,
        sections=page.sections,
        figures=drawn,
        classes=_CLASSES,
        command=COMMAND,
        link_of=partial(flip_link, page.findings),
    )
