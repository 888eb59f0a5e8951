"""The fast reader of records: msgspec parses and type-checks many lines at once, numpy checks whole columns.

It accepts only what ``Record.from_json`` and ``check_record`` accept, with the same values. For any other block it
returns None; the strict reader then names the error and its line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, UnsetType

from kvaudit.core.facets import FACETS, FacetValues
from kvaudit.core.records import (
    CONTRADICTED,
    READABLE_FORMATS,
    RECORD_FORMAT,
    Message,
    Outcome,
    Record,
    Role,
    schema_of,
)
from kvaudit.core.spans import SPANS, KeptSpan

Array = npt.NDArray[np.float64]
LARGEST_STORED = 2**62  # the bound of a 64-bit column, with room to sum
UNREAD = -1.0  # the facet could not be read, as the answer has no valid form
FACET_CODES = {None: UNREAD, False: 0.0, True: 1.0}
_OUTCOMES = tuple(outcome.value for outcome in Outcome)
_ROLES = tuple(role.value for role in Role)
_OUTCOME_CODES = {name: code for code, name in enumerate(_OUTCOMES)}


class _CallLine(Struct, forbid_unknown_fields=True, gc=False):
    name: str
    arguments: dict[str, Any]
    id: str = ""


class _MessageLine(Struct, forbid_unknown_fields=True, gc=False):
    role: Literal[_ROLES]  # type: ignore[valid-type]  # msgspec shares one text per literal
    content: str
    tool_calls: list[_CallLine] = []
    tool_call_id: str = ""


class _SpanLine(Struct, forbid_unknown_fields=True, gc=False):
    kept: float
    at: list[tuple[int, int, int]]  # message, first character, end


# the JSON type of each annotation of Record that is no plain number, text or flag
_JSON_TYPES: dict[Any, Any] = {
    Outcome: Literal[_OUTCOMES],  # not the enum: words of a column are plain text
    tuple[Message, ...]: list[_MessageLine],
    Mapping[str, float]: dict[str, float],
    FacetValues: dict[str, bool | None] | UnsetType,  # format 1 has no facets
    Mapping[str, KeptSpan]: dict[str, _SpanLine],
}


def line_struct(record: type[Record]) -> type[Struct]:
    """Return the msgspec type of one line, derived from the fields of a record class."""
    schema = schema_of(record)
    defaults = {**schema.defaults, "facets": UNSET}
    kinds = {name: _JSON_TYPES.get(field.type, field.type) for name, field in schema.fields.items()}
    kinds["format"] = Literal[READABLE_FORMATS]
    struct_fields = [(name, kind, defaults[name]) if name in defaults else (name, kind) for name, kind in kinds.items()]
    return msgspec.defstruct("RecordLine", struct_fields, forbid_unknown_fields=True, gc=False, kw_only=True)


def numeric_fields(record: type[Record]) -> dict[str, type]:
    """Return the number fields of a record class with their column type, np.int64 or np.float64 (NaN for None)."""
    kinds = {int: np.int64, float: np.float64, int | None: np.float64, float | None: np.float64}
    fields = schema_of(record).fields.items()
    return {name: kinds[field.type] for name, field in fields if field.type in kinds and name != "format"}


_LINE = line_struct(Record)
_NAMES = _LINE.__struct_fields__
_NUMBERS = numeric_fields(Record)
_decode = msgspec.json.Decoder(_LINE).decode
_values = attrgetter(*_NAMES)
_NO_FACETS: Mapping[str, bool | None] = {}


def parse_block(raw: bytes) -> dict[str, Sequence[Any]] | None:
    """Return the records on these lines as one column per field; None if the strict reader must read them.

    Number fields are arrays, with NaN for None. The columns ``facets``, ``spans`` and ``survival`` are tables
    themselves: a list of numbers for every name that occurs.
    """
    lines = raw.split(b"\n")
    if not lines[-1]:  # after the last newline
        lines.pop()
    try:
        rows = list(map(_decode, lines))
        columns: dict[str, Any] = dict(zip(_NAMES, zip(*map(_values, rows), strict=True), strict=True))
        for name, kind in _NUMBERS.items():
            columns[name] = np.fromiter(columns[name], kind, len(rows))
        columns["survival"] = columns_by_name(columns["survival"])
        columns["facets"] = _facets(columns["facets"], columns["format"])
        columns["spans"] = _spans(columns["spans"])
    except (msgspec.MsgspecError, UnicodeError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return columns if _is_valid(columns) else None


def _is_valid(columns: Mapping[str, Any]) -> bool:
    # NaN compares false, so that missing values pass
    if any(np.any((columns[n] <= -LARGEST_STORED) | (columns[n] >= LARGEST_STORED)) for n in _NUMBERS):
        return False
    return not np.any(columns["kv_bytes_live"] < 0) and _are_scores_valid(columns["outcome"], columns["score"])


def _are_scores_valid(outcomes: Sequence[str], score: Array) -> bool:
    """Return whether scores are None exactly where unscored, within [0, 1], and never contradict the outcome."""
    outcome = np.fromiter(map(_OUTCOME_CODES.__getitem__, outcomes), np.int8, len(outcomes))  # [rows]
    missing = np.isnan(score)
    if np.any(missing != (outcome == _OUTCOME_CODES[Outcome.UNSCORED])) or np.any((score < 0) | (score > 1)):
        return False
    return not any(np.any((outcome == _OUTCOME_CODES[name]) & (score == wrong)) for name, wrong in CONTRADICTED.items())


def _names_in(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(set(chain.from_iterable(tables)))


def columns_by_name(tables: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return one column for every name in the tables, NaN where a table lacks it."""
    return {name: [table.get(name, math.nan) for table in tables] for name in _names_in(tables)}


def _facets(tables: Sequence[Any], formats: Sequence[int]) -> dict[str, list[float]]:
    """Return, for every facet that occurs, a code per record: 1 yes, 0 no, UNREAD, or NaN if the record lacks it.

    Raises KeyError for an unknown name, and for a record of the current format without a table of facets.
    """
    if UNSET in tables:
        if RECORD_FORMAT in {version for table, version in zip(tables, formats, strict=True) if table is UNSET}:
            raise KeyError("facets")
        tables = [_NO_FACETS if table is UNSET else table for table in tables]
    return {
        FACETS[name].name: [FACET_CODES[table[name]] if name in table else math.nan for table in tables]
        for name in _names_in(tables)
    }


def _spans(tables: Sequence[Mapping[str, _SpanLine]]) -> dict[str, list[float]]:
    """Return, for every span that occurs, the kept share of its cache entries per record; NaN if the record lacks it.

    A span is a named text of the prompt, such as "rule". Raises ValueError for an unknown name, bad share or bad place.
    """
    names = _names_in(tables)
    if not names:
        return {}
    if not set(names) <= SPANS.keys() or not all(map(_is_span, chain.from_iterable(t.values() for t in tables))):
        raise ValueError(names)
    return {name: [table[name].kept if name in table else math.nan for table in tables] for name in names}


def _is_span(span: _SpanLine) -> bool:
    return 0 <= span.kept <= 1 and all(message >= 0 and 0 <= start < end for message, start, end in span.at)
