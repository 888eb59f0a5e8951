"""junit.xml: one test case per gated cell, for a CI that shows tests."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from kvaudit.core.text import inline
from kvaudit.reports.page.answers import answers, cell_title, cell_message
from kvaudit.reports.page.page import Page
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import Status, exit_code

FILE = "junit.xml"
_FAILURE, _ERROR, _SKIPPED = "failure", "error", "skipped"  # elements of a test case


def render(page: Page) -> str:
    """The gated cells as test cases, and the verdict as the last: each as the gate would exit on it alone."""
    banner, rules, sides = page.banner, page.findings.rules, page.findings.comparison
    suite = ElementTree.Element("testsuite", name=inline(banner.title))
    lines = (*(answer.line for answer in answers(page.findings) if answer.groups), banner.alarm, *page.remarks)
    gated = page.findings.verdict.gated
    cells = [(cell_title(sides, d), d.arm, d.standing, cell_message(sides, d)) for d in gated]
    cells.append(("verdict", "verdict", banner.status, " ".join(line for line in lines if line)))
    found = Counter[str]()
    for name, group, status, said in cells:
        kind = _kind(status, rules)
        found[kind] += 1
        _case(suite, (name, group), status, said, kind)
    counts = {"tests": len(cells), "failures": found[_FAILURE], "errors": found[_ERROR], "skipped": found[_SKIPPED]}
    suite.attrib |= {**{name: str(number) for name, number in counts.items()}, "time": "0"}
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _kind(status: Status, rules: Rules) -> str:
    """A FAIL fails, what else stops the gate is an error, and what it lets through without a finding is skipped."""
    if status is Status.FAIL:
        return _FAILURE
    if exit_code(status, rules):
        return _ERROR
    return _SKIPPED if status in (Status.INCONCLUSIVE, Status.NOT_MEASURABLE) else ""


def _case(suite: ElementTree.Element, names: tuple[str, str], status: Status, said: str, kind: str) -> None:
    name, group = map(inline, names)
    case = ElementTree.SubElement(suite, "testcase", name=name, classname=f"kvaudit.{group}", time="0")
    text = f"{status.value}: {inline(said)}"
    if kind:
        result = ElementTree.SubElement(case, kind, message=text)
        if kind != _SKIPPED:
            result.set("type", status.value)
    ElementTree.SubElement(case, "system-out").text = text
