"""What engines said of themselves, as a run recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvaudit.core.provenance import SERVED_BY, table_of


def said_by(provenance: Mapping[str, Any], condition: str) -> dict[str, str]:
    """What an engine said of itself when it first answered under a condition: engine, version, what it resolved."""
    return {str(name): str(text) for name, text in table_of(table_of(provenance, SERVED_BY), condition).items()}
