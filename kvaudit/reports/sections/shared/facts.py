"""The facts of a disclosure (known, unknown or not applicable, so that gaps show), and the plain JSON of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Fact(NamedTuple):
    """One fact of a disclosure. ``value`` is plain JSON, None unless ``state`` is known."""

    state: Literal["known", "unknown", "not applicable"]
    value: Any = None


UNKNOWN, NOT_APPLICABLE = Fact("unknown"), Fact("not applicable")
Facts = Mapping[str, Fact]


def fact_of(value: Any) -> Fact:
    """Return the known fact of a value, unknown for None and empty text."""
    return UNKNOWN if value is None or value == "" else Fact("known", value)


def dump_json(body: Any) -> str:
    """Return the ASCII text of a JSON file; NaN and infinities become null, values that JSON lacks become text."""
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
