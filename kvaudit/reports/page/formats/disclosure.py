"""disclosure.json: the disclosure of a run; its schema is docs/disclosure.schema.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvaudit.reports.page.disclosure import DISCLOSURE_FORMAT, disclosure_of
from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.shared.words import Fact, dump_json

FILE = "disclosure.json"


def render(page: Page) -> str:
    """Return the disclosure as JSON."""
    return dump_json({"format": DISCLOSURE_FORMAT, **_plain(asdict(disclosure_of(page)))})


def _plain(value: Any) -> Any:
    """Return the tree with every fact replaced by a mapping of its ``state`` and, if known, its ``value``."""
    if isinstance(value, Fact):
        return {"state": value.state, **({"value": value.value} if value.state == "known" else {})}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
