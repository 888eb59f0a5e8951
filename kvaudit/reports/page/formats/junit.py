"""junit.xml: one test case per gated cell, for a CI that shows tests."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from kvaudit.core.text import inline
from kvaudit.reports.page.answers import answers, cell_message, cell_title
from kvaudit.reports.page.page import Page
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import Status, exit_code

FILE = "junit.xml"
_FAILURE, _ERROR, _SKIPPED = "failure", "error", "skipped"  # elements of a test case


def render(page: Page) -> str:
    """Return a test case per gated cell and one for the verdict, each with the result of the gate on it alone."""
    banner, rules, sides = page.banner, page.findings.rules, page.findings.comparison
    suite = ElementTree.Element("testsuite", name=inline(banner.title))
    lines = (*(answer.line for answer in answers(page.findings) if answer.groups), banner.alarm, *page.remarks)
    gated = page.findings.verdict.gated
    cells = [(cell_title(sides, d), d.arm, d.standing, cell_message(sides, d)) for d in gated]
    cells.append(("verdict", "verdict", banner.status, " ".join(line for line in lines if line)))
    kinds = Counter[str]()
    for name, group, status, message in cells:
        kind = _kind(status, rules)
        kinds[kind] += 1
        _case(suite, (name, group), status, message, kind)
    counts = {"tests": len(cells), "failures": kinds[_FAILURE], "errors": kinds[_ERROR], "skipped": kinds[_SKIPPED]}
    suite.attrib |= {**{name: str(number) for name, number in counts.items()}, "time": "0"}
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _kind(status: Status, rules: Rules) -> str:
    """Return the element for a status: failure for FAIL, error for others that stop the gate, skipped for a warning."""
    if status is Status.FAIL:
        return _FAILURE
    if exit_code(status, rules):
        return _ERROR
    return _SKIPPED if status in (Status.INCONCLUSIVE, Status.NOT_MEASURABLE) else ""


def _case(suite: ElementTree.Element, names: tuple[str, str], status: Status, message: str, kind: str) -> None:
    name, group = map(inline, names)
    case = ElementTree.SubElement(suite, "testcase", name=name, classname=f"kvaudit.{group}", time="0")
    text = f"{status.value}: {inline(message)}"
    if kind:
        result = ElementTree.SubElement(case, kind, message=text)
        if kind != _SKIPPED:
            result.set("type", status.value)
    ElementTree.SubElement(case, "system-out").text = text
