"""report.html: one self-contained page, light and dark, no script, no request; all text from records is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from audit.core.text import clip, visible
from reports.drift.report import Report
from reports.gate.decide import Status, decide
from reports.page.figures import figures
from reports.page.figures.canvas import Drawing
from reports.page.plain import points
from reports.page.section import Section
from reports.page.story import Banner, banner, sections

FILE = "report.html"
_CLASSES = {status.value: "status " + status.name.lower().replace("_", "-") for status in Status}


def render(report: Report) -> str:
    """The report as HTML."""
    verdict = decide(report)
    return page(banner(report, verdict), sections(report, verdict), report, figures(report, verdict))


def page(top: Banner, parts: Sequence[Section], report: Report, drawn: Mapping[str, Drawing]) -> str:
    """A page of sections. Only the figures, which this project draws and matplotlib escapes, are trusted markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "points": points, "clip": clip}
    return environment.get_template("report.html.j2").render(
        report=report, banner=top, sections=parts, figures=drawn, classes=_CLASSES
    )
