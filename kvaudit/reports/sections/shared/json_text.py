"""Plain JSON of what reports hold: no NaN, keys as text, ASCII."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dump_json(body: Any) -> str:
    """The text of a JSON file; NaN and infinities are null, what JSON cannot spell is text."""
    return json.dumps(_finite(body), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
