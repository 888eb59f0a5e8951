"""One file of records -> columns, hashed in the same read: a block of lines at a time, no record object, no transcript.

A block whose every value is plainly what a record holds goes through whole columns at once. Any other block is read
line by line by ``Record.from_json``, whose word counts: what the columns let through it would accept too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from itertools import chain
from json.scanner import make_scanner
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.core.errors import DataError, OffScale
from audit.core.facets import FACETS
from audit.core.records import CONTRADICTED, READABLE_FORMATS, TOKEN_ROLES, Outcome, Record, Role, spans_fit
from audit.core.spans import SPANS
from audit.core.text import is_text
from audit.core.yaml_file import one_line

ROLES = (*(role.value for role in TOKEN_ROLES), "format")
COPIED = (
    *("checkpoint", "arm", "train_seed", "policy", "policy_hash", "suite", "suite_version", "item_id", "cluster_id"),
    *("context_tokens", "placement", "sample_index", "finish_reason", "new_tokens", "retention"),
    *("kv_bytes_peak", "kv_bytes_dense", "seconds", "judge"),
)
_KINDS = {name: str(kind) for name, kind in Record.__annotations__.items()}
_WORDS = (*(name for name in COPIED if _KINDS[name] == "str"), "outcome")
WHOLE_NUMBERS = tuple(name for name in COPIED if _KINDS[name] == "int")
RecordPlace = tuple[str, int]  # file and line of a record
SCORE = "score"  # the metric that stands beside the facets
FACET_COLUMNS = {name: f"facet_{name}" for name in FACETS}  # 0 or 1, UNREAD, NaN where an item is not eligible
SPAN_COLUMNS = {name: f"span_{name}" for name in SPANS}  # the share that was kept, NaN where an item has no such span
UNREAD = -1.0  # the answer has no form that the facet could be read in
REAL = (
    *(name for name in COPIED if _KINDS[name] == "float"),
    "score",
    *(f"survival_{role}" for role in ROLES),
    *FACET_COLUMNS.values(),
    *SPAN_COLUMNS.values(),
)
_FACET_CODES = {None: UNREAD, False: 0.0, True: 1.0}


class _Numbering(dict[str, int]):
    """Each new word gets the next number."""

    def __missing__(self, word: str) -> int:
        return self.setdefault(word, len(self))


class Columns:
    """The rows read so far; ``file`` and ``line`` say where each one stood."""

    def __init__(self) -> None:
        self._words: dict[str, _Numbering] = {name: _Numbering() for name in (*_WORDS, "file")}
        self._parts: dict[str, list[npt.NDArray[Any]]] = {
            name: [] for name in (*_WORDS, *WHOLE_NUMBERS, *REAL, "file", "line")
        }
        self.rows = 0

    def add(self, file: str, lines: Sequence[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Add rows; ``values`` has a sequence per copied field, ``outcome``, ``score``, survival, facets, spans."""
        count = len(lines)
        for name in _WORDS:
            numbers = map(self._words[name].__getitem__, values[name])
            self._parts[name].append(np.fromiter(numbers, np.int32, count))
        for names, kind in ((WHOLE_NUMBERS, np.int64), (REAL, np.float64)):
            for name in names:
                self._parts[name].append(np.array(values[name], dtype=kind))
        self._parts["file"].append(np.full(count, self._words["file"][file], dtype=np.int32))
        self._parts["line"].append(np.array(lines, dtype=np.int64))
        self.rows += count

    def frame(self) -> pd.DataFrame:
        """All rows; empties the columns, so that both are never in memory."""
        return pd.DataFrame({name: self._column(name) for name in list(self._parts)}, copy=False)

    def _column(self, name: str) -> Any:
        parts = self._parts.pop(name)
        values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        if name not in self._words:
            return values
        words = list(self._words.pop(name))
        order = sorted(range(len(words)), key=words.__getitem__)  # categories sort as their words do
        place = np.empty(len(words), dtype=np.int32)
        place[order] = np.arange(len(words), dtype=np.int32)
        sorted_words = pd.Index([words[i] for i in order], dtype=object)
        return pd.Categorical.from_codes(place[values], categories=sorted_words)


BLOCK_BYTES = 1 << 18  # bytes of lines parsed together: what stays in a processor's cache
_LARGEST = 2**62  # what a 64-bit column holds with room to sum
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
_SCALARS = [(f.name, _TYPES[str(f.type)]) for f in fields(Record) if str(f.type) in _TYPES]
_FIELDS = tuple(f.name for f in fields(Record))
_values = itemgetter(*_FIELDS)
# json.loads wants a text to be one value; its scanner says where a value ends, so a block needs no splitting
_scan: Any = make_scanner(json.JSONDecoder())  # type: ignore[arg-type] # the stubs name the wrong class
_OUTCOMES = {outcome.value for outcome in Outcome}
_CONTRADICTIONS = {(outcome.value, score) for outcome, score in CONTRADICTED.items()}
_SPEAKERS = {role.value for role in Role}


@dataclass(frozen=True)
class Problem:
    """Something in a file that was kept out; ``line`` counts from 1, 0 for the whole file.

    ``score`` is the one that it was kept out for, where that was on another scale.
    """

    file: str
    line: int
    reason: str
    score: float | None = None


def read_unit(path: Path, columns: Columns, problems: list[Problem]) -> str:
    """Add the records of a file to the columns and what is wrong with it to the problems; returns its sha256."""
    digest = hashlib.sha256()
    first = 1
    for raw in _blocks(path):
        digest.update(raw)
        count = raw.count(b"\n") + (not raw.endswith(b"\n"))
        values = _plain(raw, count)
        if values is None:
            read = list(_strict(path.name, BytesIO(raw), first, problems))
            columns.add(path.name, [line for line, _ in read], columns_of([record for _, record in read]))
        else:
            columns.add(path.name, range(first, first + count), values)
        first += count
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in whole lines, a block of them at a time."""
    with path.open("rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            yield block if block.endswith(b"\n") else block + handle.readline()


def _plain(raw: bytes, count: int) -> dict[str, Sequence[Any]] | None:
    """The columns of a block in which everything is as it should be, else None."""
    if b"\\ud" in raw.lower():
        return None  # perhaps half a character
    try:
        rows = _objects(raw.decode(), count)
        if rows is None or set(map(type, rows)) != {dict}:
            return None
        _complete(rows)
        if set(map(len, rows)) != {len(_FIELDS)}:
            return None
        values = dict(zip(_FIELDS, zip(*map(_values, rows), strict=True), strict=True))
        if not _scalars_fit(values) or not _scores_fit(values) or not _messages_fit(values["transcript"]):
            return None
        if not _shares_fit(values["survival"]) or not _facets_fit(values["facets"]):
            return None
        if not all(map(spans_fit, values["spans"])):
            return None
        shares = [{name: span["kept"] for name, span in table.items()} for table in values["spans"]]
        return _kept({**values, "spans": shares})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, StopIteration):
        return None  # the strict reading says what and where


def _complete(rows: Sequence[dict[str, Any]]) -> None:
    """Give rows what they may lack: spans, which a suite need not mark, and facets, which once there were none of."""
    for row in rows:
        row.setdefault("spans", {})
    if set(map(len, rows)) == {len(_FIELDS) - 1} and {row["format"] for row in rows} == {1}:
        for row in rows:
            row.setdefault("facets", {})


def _objects(text: str, count: int) -> list[Any] | None:
    """The values of a text with exactly one on every line; None where a line ends elsewhere."""
    rows, end = [], 0
    for _ in range(count):
        value, end = _scan(text, end)
        rows.append(value)
        if text[end : end + 1] not in ("\n", ""):
            return None
        end += 1
    return rows if end >= len(text) else None


def _scalars_fit(values: Mapping[str, Sequence[Any]]) -> bool:
    for name, types in _SCALARS:
        column = values[name]
        if not set(map(type, column)) <= set(types):
            return False
        if types != (str,) and not (min(column) > -_LARGEST and max(column) < _LARGEST):
            return False
    sums = (math.isfinite(math.fsum(values[name])) for name in ("retention", "seconds"))  # NaN hides from min and max
    return set(values["format"]) <= set(READABLE_FORMATS) and all(sums)


def _scores_fit(values: Mapping[str, Sequence[Any]]) -> bool:
    outcomes, scores = values["outcome"], values["score"]
    if not set(map(type, scores)) <= {int, float, type(None)} or not set(outcomes) <= _OUTCOMES:
        return False
    unscored = Outcome.UNSCORED.value
    fit = all(
        outcome == unscored if score is None else outcome != unscored and 0 <= score <= 1
        for outcome, score in zip(outcomes, scores, strict=True)
    )
    return fit and _CONTRADICTIONS.isdisjoint(zip(outcomes, scores, strict=True))


def _shares_fit(survival: Sequence[Any]) -> bool:
    shares = list(chain.from_iterable(table.values() for table in survival))
    return set(map(type, shares)) <= {int, float} and math.isfinite(math.fsum(shares))


def _facets_fit(tables: Sequence[Any]) -> bool:
    if set(map(type, tables)) != {dict} or not set(chain.from_iterable(tables)) <= FACETS.keys():
        return False
    return set(map(type, chain.from_iterable(table.values() for table in tables))) <= {bool, type(None)}


def _messages_fit(transcripts: Sequence[Any]) -> bool:
    if set(map(type, transcripts)) != {list}:
        return False
    messages = list(chain.from_iterable(transcripts))
    if not set(map(type, messages)) <= {dict} or not {message["role"] for message in messages} <= _SPEAKERS:
        return False
    return {type(message["content"]) for message in messages} <= {str}


def _kept(values: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """What the report keeps of a block: unscored as NaN, degenerate as 0; survival, facets, spans by name."""
    kept = {name: values[name] for name in (*COPIED, "outcome")}
    degenerate = Outcome.DEGENERATE.value
    kept["score"] = [
        math.nan if score is None else 0.0 if outcome == degenerate else score
        for outcome, score in zip(values["outcome"], values["score"], strict=True)
    ]
    for role in ROLES:
        kept[f"survival_{role}"] = [table.get(role, math.nan) for table in values["survival"]]
    for name, column in FACET_COLUMNS.items():
        kept[column] = [_FACET_CODES[table[name]] if name in table else math.nan for table in values["facets"]]
    for name, column in SPAN_COLUMNS.items():
        kept[column] = [table.get(name, math.nan) for table in values["spans"]]
    return kept


def columns_of(records: Sequence[Record]) -> dict[str, Sequence[Any]]:
    """The same columns of records."""
    values: dict[str, Sequence[Any]] = {
        name: [getattr(r, name) for r in records] for name in (*COPIED, "survival", "facets")
    }
    values["outcome"] = [record.outcome.value for record in records]
    values["score"] = [record.score for record in records]
    values["spans"] = [{name: span.share for name, span in record.spans.items()} for record in records]
    return _kept(values)


def _strict(file: str, lines: Iterable[bytes], first: int, problems: list[Problem]) -> Iterator[tuple[int, Record]]:
    for number, raw in enumerate(lines, first):
        try:
            yield number, checked(Record.from_json(raw.decode()))
        except (DataError, UnicodeDecodeError, RecursionError, TypeError, OverflowError) as error:
            half = "" if raw.endswith(b"\n") else "half-written last line: "
            score = error.score if isinstance(error, OffScale) else None
            problems.append(Problem(file, number, half + one_line(error), score))


def checked(record: Record) -> Record:
    """The same record if every scalar has its type and every number is finite; raises DataError."""
    for name, types in _SCALARS:
        value: Any = getattr(record, name)
        if not isinstance(value, types) or isinstance(value, bool):
            raise DataError(f"record holds {name}={str(value)[:40]!r}, wanted {types[-1].__name__}")
        if isinstance(value, str) and not is_text(value):
            raise DataError(f"record holds {name} with half a character, which no file can hold")
        if isinstance(value, int | float) and not -_LARGEST < value < _LARGEST:
            raise DataError(f"record holds {name}={str(value)[:40]}, wanted a finite number below 2^62")
    if not isinstance(record.survival, dict) or not all(_is_share(v) for v in record.survival.values()):
        raise DataError("record holds a bad survival table, wanted role -> share")
    if any(not isinstance(message.content, str) for message in record.transcript):
        raise DataError("record holds a transcript message that is not text")
    return record


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
