"""drift.json: the whole report and its verdict for programs; ASCII only, no NaN."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from reports.drift.report import Report
from reports.gate.decide import decide

FILE = "drift.json"


def render(report: Report) -> str:
    """The report as JSON: its own fields with ``verdict`` beside them."""
    body = report.as_dict()
    body["verdict"] = asdict(decide(report))
    return json.dumps(_finite(body), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same tree with NaN and infinities as null and keys as strings."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
