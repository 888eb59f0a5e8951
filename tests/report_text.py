"""What a report's page says, as lines of text: a table's row is | a | b |, a heading ## title, a note * text."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from kvaudit.reports.page.formats import formats
from kvaudit.reports.page.page import Page

_LINES = {"p", "tr", "li", "h1", "h2", "h3", "summary", "pre", "div", "dt", "dd", "figure", "section", "title"}
_BEGIN = {"tr": "|", "li": "* ", "h1": "# ", "h2": "## ", "h3": "### "}


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._left_out = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._left_out += tag in ("style", "svg")
        if tag in _LINES:
            self.parts.append("\n" + _BEGIN.get(tag, ""))
        if tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self._left_out -= tag in ("style", "svg")
        self.parts.append(" |" if tag in ("td", "th") else "\n" if tag in _LINES else "")

    def handle_data(self, data: str) -> None:
        if not self._left_out:
            self.parts.append(data.replace("\n", " "))


def page_text(page: Page) -> str:
    """The text of report.html, every section unfolded."""
    return html_text(formats()["report.html"](page))


def run_text(run: Path) -> str:
    """The same of a run whose report is written."""
    return html_text((run / "report" / "report.html").read_text())


def html_text(html: str) -> str:
    parser = _Text()
    parser.feed(html)
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    return "\n".join(line for line in lines if line) + "\n"
