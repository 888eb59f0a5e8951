"""drift.json: the full verdict and every section's values, for programs; ASCII only, no NaN.

verdict.json holds the answers, contrasts.csv the contrasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.base import sections
from kvaudit.reports.sections.shared.words import dump_json

FILE = "drift.json"
_FORMAT = 4  # 3 named a control's measurability "standing"


def render(page: Page) -> str:
    """Return the findings as JSON, without the contrasts."""
    findings = page.findings
    # emptied first, since asdict would copy them, which takes long
    body: dict[str, Any] = {"format": _FORMAT, **asdict(replace(findings.drift, contrasts=(), answers={}))}
    del body["answers"], body["contrasts"]
    entries = [*verdict_facts(page)]
    for section in sections():
        facts = section.facts(findings.values.get(section.name))
        entries += [(place, key, facts[key]) for key, place in section.keys.items()]
    for _, key, value in sorted(entries, key=itemgetter(0)):
        group, _, name = key.rpartition(".")
        (body.setdefault(group, {}) if group else body)[name] = value
    return dump_json(body)


def verdict_facts(page: Page) -> Iterator[tuple[int, str, Any]]:
    """Yield position, key and value of each entry of drift.json that comes from the verdict and the run."""
    findings = page.findings
    rules, verdict = asdict(findings.rules), asdict(findings.verdict)
    if not findings.rules.ratios:  # older files without ratios stay byte-identical
        del rules["ratios"]
    for decision in verdict["decisions"]:
        if decision["ratio"] is None:
            del decision["ratio"]
    yield 20, "rules", rules
    yield 50, "calibration", asdict(findings.calibration) if findings.calibration else None
    yield 60, "verdict", {**verdict, "annotations": page.remarks, "alarm": page.banner.alarm}
    yield 100, "waivers", [asdict(waiver) for waiver in findings.waivers]
    yield 140, "problems", findings.problems
    yield 150, "provenance", findings.provenance
