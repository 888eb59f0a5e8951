"""The files for a CI: junit.xml for its tests, gate.sarif for its code scanning, summary.md for its step summary."""

from __future__ import annotations

from collections import Counter
from typing import Any
from xml.etree import ElementTree

from kvaudit.core.text import inline
from kvaudit.reports.page.answers import answers, cell_message, cell_title
from kvaudit.reports.page.formats.markdown import escape, screen_parts
from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.shared.words import dump_json
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import PASSED, Status, exit_code

_FAILURE, _ERROR, _SKIPPED = "failure", "error", "skipped"  # elements of a test case
_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {
    Status.FAIL: "error",
    Status.INVALID: "error",
    Status.NOT_MEASURABLE: "error",
    Status.INCONCLUSIVE: "warning",
}
_SARIF_RULES = {
    Status.FAIL.value: "Worse, by a loss that may exceed the declared margin.",
    Status.INVALID.value: "The records do not allow a valid comparison.",
    Status.NOT_MEASURABLE.value: "The reference has nothing to lose here, or cannot do it.",
    Status.INCONCLUSIVE.value: "The data cannot tell.",
    Status.WAIVED.value: "Let through by a named person, not by the data.",
    "VERDICT": "The verdict of the run.",
}
_GRID_WORDS = 350  # of the grid in summary.md


def render_junit(page: Page) -> str:
    """Return junit.xml: a test case for each gated cell and one for the verdict.

    The status of the cell or of the verdict gives the result of the case.
    """
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
    """Return the JUnit element for a status: "failure" for FAIL, "" for a pass.

    A status that the gate lets through with a warning is "skipped"; any other status that stops the gate is "error".
    """
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


def render_sarif(page: Page) -> str:
    """Return gate.sarif: one result for the verdict and one per gated cell that does not pass."""
    banner, sides = page.banner, page.findings.comparison
    open_cells = [d for d in page.findings.verdict.gated if d.standing not in PASSED]
    answer_lines = [answer.line for answer in answers(page.findings) if answer.groups]
    lines = (f"{banner.status.value}:", *answer_lines, banner.alarm, *page.remarks)
    results = [_sarif_result("VERDICT", banner.status, " ".join(line for line in lines if line))]
    results += [
        _sarif_result(d.standing.value, d.standing, f"{cell_title(sides, d)}: {cell_message(sides, d)}")
        for d in open_cells
    ]
    driver = {
        "name": "kvaudit",
        "rules": [
            {"id": _sarif_rule(name), "shortDescription": {"text": text}, "fullDescription": {"text": text}}
            for name, text in _SARIF_RULES.items()
        ],
    }
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "results": results,
        "properties": {"run": inline(banner.title), "arms": [inline(arm) for arm in sides.arms]},
    }
    return dump_json({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]})


def _sarif_rule(name: str) -> str:
    return f"KVAUDIT-{name.replace(' ', '-')}"


def _sarif_result(rule: str, status: Status, text: str) -> dict[str, Any]:
    # no source file is at fault, so results point at the spec that declared the gate
    place = {"physicalLocation": {"artifactLocation": {"uri": "spec.yaml"}}}
    level, message = _LEVELS.get(status, "note"), {"text": inline(text)}
    return {"ruleId": _sarif_rule(rule), "level": level, "message": message, "locations": [place]}


def render_summary(page: Page) -> str:
    """Return summary.md: the first screen of the report and the remarks."""
    if page.screen is None:
        return f"**{escape(page.banner.status.value)}**: {escape(page.banner.sentence)}\n"
    parts = [*screen_parts(page.screen, _GRID_WORDS)]
    parts += ["\n".join(f"* {escape(line)}" for line in page.remarks)] if page.remarks else []
    gated = page.findings.verdict.gated
    passed = sum(d.status in PASSED for d in gated)
    parts.append(f"{passed} of {len(gated)} gated cells hold. The full report is report/report.html.")
    # smaller headings, since it is inserted into a page
    return "\n\n".join(part.replace("# ", "### ", 1) if part.startswith("# ") else part for part in parts) + "\n"


FORMATS = {"junit.xml": render_junit, "gate.sarif": render_sarif, "summary.md": render_summary}
