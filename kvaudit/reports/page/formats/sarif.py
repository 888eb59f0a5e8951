"""gate.sarif: the gated cells that do not pass, as SARIF 2.1.0 results for a code-scanning page."""

from __future__ import annotations

from typing import Any

from kvaudit.core.text import inline
from kvaudit.reports.page.answers import answers, cell_message, cell_title
from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.shared.words import dump_json
from kvaudit.reports.verdict.verdict import PASSED, Status

FILE = "gate.sarif"
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {
    Status.FAIL.value: "error",
    Status.INVALID.value: "error",
    Status.NOT_MEASURABLE.value: "error",
    Status.INCONCLUSIVE.value: "warning",
}
_SAYS = {
    Status.FAIL.value: "Worse, by a loss that may exceed the declared margin.",
    Status.INVALID.value: "The records do not allow a valid comparison.",
    Status.NOT_MEASURABLE.value: "The reference has nothing to lose here, or cannot do it.",
    Status.INCONCLUSIVE.value: "The data cannot tell.",
    Status.WAIVED.value: "Let through by a named person, not by the data.",
    "VERDICT": "The verdict of the run.",
}


def render(page: Page) -> str:
    """Return one result for the verdict and one per gated cell that does not pass."""
    banner, sides = page.banner, page.findings.comparison
    open_cells = [d for d in page.findings.verdict.gated if d.standing not in PASSED]
    answer_lines = [answer.line for answer in answers(page.findings) if answer.groups]
    lines = (f"{banner.status.value}:", *answer_lines, banner.alarm, *page.remarks)
    level = _LEVELS.get(banner.status.value, "note")
    results = [_result("VERDICT", level, " ".join(line for line in lines if line))]
    results += [
        _result(
            d.standing.value,
            _LEVELS.get(d.standing.value, "note"),
            f"{cell_title(sides, d)}: {cell_message(sides, d)}",
        )
        for d in open_cells
    ]
    driver = {
        "name": "kvaudit",
        "rules": [
            {"id": _rule(name), "shortDescription": {"text": text}, "fullDescription": {"text": text}}
            for name, text in _SAYS.items()
        ],
    }
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "results": results,
        "properties": {"run": inline(banner.title), "arms": [inline(arm) for arm in sides.arms]},
    }
    return dump_json({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(name: str) -> str:
    return f"KVAUDIT-{name.replace(' ', '-')}"


def _result(rule: str, level: str, text: str) -> dict[str, Any]:
    # no source file is at fault, so results point at the spec that declared the gate
    place = {"physicalLocation": {"artifactLocation": {"uri": "spec.yaml"}}}
    return {"ruleId": _rule(rule), "level": level, "message": {"text": inline(text)}, "locations": [place]}
