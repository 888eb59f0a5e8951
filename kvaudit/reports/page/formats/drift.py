"""drift.json: the verdict at length and what every section found, for programs; ASCII only, no NaN.

The answers are in verdict.json, every contrast in contrasts.csv.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.base import sections
from kvaudit.reports.sections.shared.facts import dump_json

FILE = "drift.json"
_FORMAT = 4  # 3 called a control's measurability its standing


def render(page: Page) -> str:
    """What the page was written from, as JSON, without the contrasts."""
    found = page.findings
    # emptied before asdict copies them, which would take long
    body: dict[str, Any] = {"format": _FORMAT, **asdict(replace(found.drift, contrasts=(), answers={}))}
    del body["answers"], body["contrasts"]
    placed = [*own_facts(page)]
    for section in sections():
        facts = section.facts(found.values.get(section.name))
        placed += [(place, key, facts[key]) for key, place in section.keys.items()]
    for _, key, value in sorted(placed, key=itemgetter(0)):
        group, _, name = key.rpartition(".")
        (body.setdefault(group, {}) if group else body)[name] = value
    return dump_json(body)


def own_facts(page: Page) -> Iterator[tuple[int, str, Any]]:
    """What is told of the verdict and of the run, by its place among what sections found."""
    found = page.findings
    rules, verdict = asdict(found.rules), asdict(found.verdict)
    if not found.rules.ratios:  # a run without any has the file that it had before there were such
        del rules["ratios"]
    for decision in verdict["decisions"]:
        if decision["ratio"] is None:
            del decision["ratio"]
    yield 20, "rules", rules
    yield 50, "calibration", asdict(found.calibration) if found.calibration else None
    yield 60, "verdict", {**verdict, "annotations": page.remarks, "alarm": page.banner.alarm}
    yield 100, "waivers", [asdict(waiver) for waiver in found.waivers]
    yield 140, "problems", found.problems
    yield 150, "provenance", found.provenance
