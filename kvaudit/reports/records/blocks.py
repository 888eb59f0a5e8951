"""Many lines of records at once: parsed and held to their types by msgspec, then to the rest by whole columns.

What passes here ``Record.from_json`` and ``checked`` would accept too, with the same values. What does not is nobody's
error yet: the strict reading says what is wrong, and where.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, UnsetType

from kvaudit.core.facets import FACETS
from kvaudit.core.records import CONTRADICTED, RECORD_FORMAT, Outcome
from kvaudit.core.spans import SPANS

Array = npt.NDArray[np.float64]
LARGEST_STORED = 2**62  # what a 64-bit column holds with room to sum
UNREAD = -1.0  # the answer has no form that the facet could be read in
FACET_CODES = {None: UNREAD, False: 0.0, True: 1.0}
_OUTCOMES = tuple(outcome.value for outcome in Outcome)
_CODES = {name: code for code, name in enumerate(_OUTCOMES)}
# msgspec wants types that are written out, and shares one text per word of a Literal
_Speaker = Literal["system", "user", "assistant", "tool", "thought"]
_Ending = Literal["desired", "undesired", "degenerate", "truncated", "unscored"]


class _Call(Struct, forbid_unknown_fields=True, gc=False):
    name: str
    arguments: dict[str, Any]
    id: str = ""


class _Said(Struct, forbid_unknown_fields=True, gc=False):
    role: _Speaker
    content: str
    tool_calls: list[_Call] = []
    tool_call_id: str = ""


class _Kept(Struct, forbid_unknown_fields=True, gc=False):
    kept: float
    at: list[tuple[int, int, int]]  # message, and the first character and the one behind the last


class _Line(Struct, forbid_unknown_fields=True, gc=False, kw_only=True):
    """The fields of a ``Record`` by the types that JSON has; what older records lack has a default."""

    run: str
    checkpoint: str
    arm: str
    train_seed: int
    policy: str
    policy_hash: str
    suite: str
    suite_version: str
    item_id: str
    cluster_id: str
    context_tokens: int
    placement: str
    sample_index: int
    outcome: _Ending
    score: float | None
    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    retention: float | None
    survival: dict[str, float]
    kv_bytes_peak: int | None
    kv_bytes_dense: int | None
    seconds: float
    judge: str
    transcript: list[_Said]
    format: Literal[1, 2]
    facets: dict[str, bool | None] | UnsetType = UNSET
    spans: dict[str, _Kept] = {}
    unsure: bool = False
    kv_bytes_live: int | None = None
    logprob: float | None = None
    unanswered: str = ""
    said_in: str = ""
    tool_form: str = ""


_NAMES = _Line.__struct_fields__
_WHOLE = ("train_seed", "context_tokens", "sample_index", "prompt_tokens", "new_tokens")
_MAYBE = ("retention", "kv_bytes_peak", "kv_bytes_dense", "kv_bytes_live", "logprob")
_decode = msgspec.json.Decoder(_Line).decode
_values = attrgetter(*_NAMES)
_NO_FACETS: Mapping[str, bool | None] = {}


def block_of(raw: bytes) -> dict[str, Sequence[Any]] | None:
    """Every field of the records on these lines, a column each; None where some line is not plainly a record.

    ``score``, whole numbers and what may be absent are arrays, NaN where there is nothing; ``facets``, ``spans`` and
    ``survival`` are tables name -> numbers, for the names that some record has.
    """
    lines = raw.split(b"\n")
    # behind the end of the last line
    if not lines[-1]:
        lines.pop()
    try:
        rows = list(map(_decode, lines))
        # from rows of fields to a column for each field
        values: dict[str, Any] = dict(zip(_NAMES, zip(*map(_values, rows), strict=True), strict=True))
        for name in _WHOLE:
            values[name] = np.fromiter(values[name], np.int64, len(rows))
        for name in ("score", "seconds", *_MAYBE):  # NaN for None, which JSON cannot say
            values[name] = np.fromiter(values[name], np.float64, len(rows))
        values["survival"] = by_name(values["survival"])
        values["facets"] = _facets(values["facets"], values["format"])
        values["spans"] = _spans(values["spans"])
    except (msgspec.MsgspecError, UnicodeError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return values if _fit(values) else None


def _fit(values: Mapping[str, Any]) -> bool:
    sized = (values[name] for name in (*_WHOLE, "seconds", *_MAYBE))
    # NaN is beyond no bound, so that what is absent fits
    if any(np.any((column <= -LARGEST_STORED) | (column >= LARGEST_STORED)) for column in sized):
        return False
    return not np.any(values["kv_bytes_live"] < 0) and _scores_fit(values["outcome"], values["score"])


def _scores_fit(outcomes: Sequence[str], score: Array) -> bool:
    """None exactly where unscored, within [0, 1], and never the score that says the opposite of the outcome."""
    outcome = np.fromiter(map(_CODES.__getitem__, outcomes), np.int8, len(outcomes))  # [rows]
    missing = np.isnan(score)
    if np.any(missing != (outcome == _CODES[Outcome.UNSCORED])) or np.any((score < 0) | (score > 1)):
        return False
    return not any(np.any((outcome == _CODES[name]) & (score == wrong)) for name, wrong in CONTRADICTED.items())


def _named(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(set(chain.from_iterable(tables)))


def by_name(tables: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """A column for every name that some table has, NaN where one has it not."""
    return {name: [table.get(name, math.nan) for table in tables] for name in _named(tables)}


def _facets(tables: Sequence[Any], formats: Sequence[int]) -> dict[str, list[float]]:
    """Codes of facets; raises KeyError for a name that is none, and where a record had to have them."""
    if UNSET in tables:
        if RECORD_FORMAT in {version for table, version in zip(tables, formats, strict=True) if table is UNSET}:
            raise KeyError("facets")
        tables = [_NO_FACETS if table is UNSET else table for table in tables]
    return {
        FACETS[name].name: [FACET_CODES[table[name]] if name in table else math.nan for table in tables]
        for name in _named(tables)
    }


def _spans(tables: Sequence[Mapping[str, _Kept]]) -> dict[str, list[float]]:
    """Shares of spans; raises KeyError for a name that is none, ValueError for a share or place that is none."""
    names = _named(tables)
    if not names:
        return {}
    if not set(names) <= SPANS.keys() or not all(map(_span_fits, chain.from_iterable(t.values() for t in tables))):
        raise ValueError(names)
    return {name: [table[name].kept if name in table else math.nan for table in tables] for name in names}


def _span_fits(span: _Kept) -> bool:
    return 0 <= span.kept <= 1 and all(message >= 0 and 0 <= start < end for message, start, end in span.at)


def answers_said(transcripts: Sequence[list[_Said]], places: Sequence[int]) -> Iterator[list[str]]:
    """What the model said in each of these transcripts."""
    for place in places:
        yield [message.content for message in transcripts[place] if message.role == "assistant"]
