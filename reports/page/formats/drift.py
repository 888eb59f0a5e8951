"""drift.json: everything that was found and its verdict, for programs; ASCII only, no NaN."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from kvaudit.reports.analysis.guarded import GuardEffect
from kvaudit.reports.analysis.remedies import Remedies
from kvaudit.reports.drift.results import Contrast
from kvaudit.reports.layout.plain import dumped
from kvaudit.reports.page.page import Page

FILE = "drift.json"
_FORMAT = 2


def render(page: Page) -> str:
    """What the page was written from, as JSON; the sums that only the family's test needs are left out."""
    found = page.findings
    body = {"format": _FORMAT, **asdict(replace(found.drift, contrasts=(), answers={}))}
    del body["answers"]
    body["contrasts"] = [_contrast(c) for c in found.drift.contrasts]
    beside = ("rules", "analysis", "mechanism", "calibration", "verdict")
    body |= {name: _plain(getattr(found, name)) for name in beside}
    body["guards"] = [_guard(guard) for guard in found.guards]
    body["floor"] = [asdict(unit) for unit in found.floor]
    body["remedies"] = _remedies(found.remedies)
    for name in ("waivers", "curves", "examples", "displacement"):
        body[name] = [asdict(entry) for entry in getattr(found, name)]
    body |= {"problems": found.problems, "provenance": found.provenance}
    body["verdict"] |= {"annotations": page.remarks, "alarm": page.banner.alarm}
    return dumped(body)


def _contrast(c: Contrast) -> dict[str, Any]:
    row = asdict(replace(c, sums=(), judged_sums=(), seed_sums=()))
    for name in ("sums", "judged_sums", "seed_sums"):
        del row[name]
    return row


def _guard(guard: GuardEffect) -> dict[str, Any]:
    rows = [
        {"without": _contrast(row.without), "behind": _contrast(row.behind), "hidden": _plain(row.hidden)}
        for row in guard.facets
    ]
    return {**asdict(replace(guard, facets=())), "facets": rows}


def _remedies(found: Remedies | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rows = []
    for one in found.mended:
        tried = [
            {**asdict(replace(r, won=())), "won": [_contrast(c) for c in r.won], "status": r.status, "mends": r.mends}
            for r in one.remedies
        ]
        rows.append({**asdict(replace(one, remedies=())), "remedies": tried})
    failing = [{"arm": one.arm, "policy": one.policy} for one in found.failing]
    return {"declared": found.declared, "failing": failing, "mended": rows}


def _plain(value: Any) -> Any:
    return None if value is None else asdict(value)
