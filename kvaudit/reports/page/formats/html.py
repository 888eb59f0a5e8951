"""report.html: a self-contained page without scripts or requests; all text from records is escaped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jinja2

from kvaudit.core.text import clip, visible
from kvaudit.reports.page.findings import flip_link
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.plots import figures
from kvaudit.reports.sections.shared.words import points, shorten
from kvaudit.reports.verdict.verdict import Status

_CLASSES = {status.value: status.name.lower().replace("_", "-") for status in Status}  # of CSS


def render(page: Page) -> str:
    """Return the page as HTML. Only the figures, whose text matplotlib escapes, are inserted as markup."""
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
        link_of=partial(flip_link, page.findings),
    )


FORMATS = {"report.html": render}
