"""disclosure.json: what a run discloses, every fact known, unknown or not applicable; docs/disclosure.schema.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvaudit.reports.page.disclosure import DISCLOSURE_FORMAT, disclosure_of
from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.shared.facts import Fact, dump_json

FILE = "disclosure.json"


def render(page: Page) -> str:
    """The disclosure as JSON."""
    return dump_json({"format": DISCLOSURE_FORMAT, **_told(asdict(disclosure_of(page)))})


def _told(value: Any) -> Any:
    """The same tree with every fact as its state, and its value where that is known."""
    if isinstance(value, Fact):
        return {"state": value.state, **({"value": value.value} if value.state == "known" else {})}
    if isinstance(value, Mapping):
        return {key: _told(inner) for key, inner in value.items()}
    return [_told(inner) for inner in value] if isinstance(value, list | tuple) else value
