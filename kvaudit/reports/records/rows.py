"""Read record files into one table of answers, and that into a ``Panel`` per suite: scores by item and checkpoint.

Files are read a block of lines at a time, and hashed in the same read. A block of valid records goes through the fast
reader. Any other block is parsed line by line with ``Record.from_json`` and ``check_record``, which are authoritative.
In a ``Panel`` the samples of an item are averaged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.errors import DataError, OffScale
from kvaudit.core.facets import FACETS, WELL_FORMED
from kvaudit.core.records import TOKEN_ROLES, Outcome, Record, Role, schema_of
from kvaudit.core.spans import SPANS
from kvaudit.core.text import is_text, one_line
from kvaudit.reports.records.blocks import (
    FACET_CODES,
    LARGEST_STORED,
    UNREAD,
    Array,
    columns_by_name,
    parse_block,
)


class TableColumns(NamedTuple):
    """The columns of the table that are fields of a record, by their storage type."""

    words: tuple[str, ...]  # categories
    whole_numbers: tuple[str, ...]  # int64
    real_numbers: tuple[str, ...]  # float64, NaN for None
    nullable: Mapping[str, tuple[type, ...]]  # real numbers that may be None -> types of their other values


def table_columns(record: type[Record]) -> TableColumns:
    """Return the names of the table's columns by storage type, as the fields of a record class declare them.

    ``score`` is not in ``nullable``, because its missing values are checked elsewhere.
    """
    kinds = {name: field.type for name, field in schema_of(record).fields.items() if field.in_table}
    nullable = {name: _NULLABLE_TYPES[kind] for name, kind in kinds.items() if kind in _NULLABLE_TYPES}
    del nullable["score"]
    return TableColumns(
        words=tuple(name for name, kind in kinds.items() if kind in (str, Outcome)),
        whole_numbers=tuple(name for name, kind in kinds.items() if kind is int),
        real_numbers=tuple(name for name, kind in kinds.items() if kind in (float, bool, *_NULLABLE_TYPES)),
        nullable=nullable,
    )


_NULLABLE_TYPES: dict[Any, tuple[type, ...]] = {int | None: (int,), float | None: (int, float)}
_SCALAR_TYPES: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float)}
_SCALARS = {name: _SCALAR_TYPES[f.type] for name, f in schema_of(Record).fields.items() if f.type in _SCALAR_TYPES}
WORDS, WHOLE_NUMBERS, _REAL_NUMBERS, NULLABLE = table_columns(Record)
_FIELDS = (*WORDS, *WHOLE_NUMBERS, *_REAL_NUMBERS)
ROLES = (*(role.value for role in TOKEN_ROLES), "format")  # the parts of a prompt whose survival is recorded
RecordPlace = tuple[str, int]  # file and line of a record
SCORE = "score"  # the metric that is no facet
FACET_COLUMNS = {name: f"facet_{name}" for name in FACETS}  # 0 or 1, UNREAD, NaN where an item is not eligible
SPAN_COLUMNS = {name: f"span_{name}" for name in SPANS}  # the kept share, NaN where an item has no such span
LIVE_BYTES = "kv_bytes_live"  # NaN in records of versions that did not count it
LOGPROB = "logprob"  # NaN where the engine gave none
ANSWER_HASH = "answer_hash"  # of all assistant messages of an engine's answer; 0 for an answer with our own cache
REAL_NUMBERS = (
    *_REAL_NUMBERS,
    *(f"survival_{role}" for role in ROLES),
    *FACET_COLUMNS.values(),
    *SPAN_COLUMNS.values(),
)
BLOCK_BYTES = 1 << 18  # of lines that are parsed together; they fit into a processor's cache
_Mask = npt.NDArray[np.bool_]


class _Numbering(dict[str, int]):
    """A dictionary from words to numbers, in which looking up a new word adds it with the next number."""

    def __missing__(self, word: str) -> int:
        return self.setdefault(word, len(self))


class Columns:
    """The rows read so far, with the ``file`` and ``line`` of each.

    A column is one array that grows in place: a list of arrays would need twice the memory when they are joined. A
    column without any value takes no memory until ``frame`` is called.
    """

    def __init__(self) -> None:
        self._words: dict[str, _Numbering] = {name: _Numbering() for name in (*WORDS, "file")}
        kinds = dict.fromkeys(self._words, np.int32) | dict.fromkeys((*WHOLE_NUMBERS, ANSWER_HASH, "line"), np.int64)
        self._arrays: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype=kind) for name, kind in kinds.items()}
        self.rows = 0

    def add(self, file: str, lines: Sequence[int] | npt.NDArray[np.int64], values: Mapping[str, Sequence[Any]]) -> None:
        """Add rows of a file; ``values`` has a sequence per column, and ``lines`` the number of each row's line.

        A column of real numbers in which no row has a value may be missing.
        """
        place = slice(self.rows, self.rows + len(lines))
        self.rows = place.stop
        for name in WORDS:
            self._array(name)[place] = self._numbers(name, values[name])
        for name in (*WHOLE_NUMBERS, ANSWER_HASH):
            self._array(name)[place] = values[name]
        for name in REAL_NUMBERS:
            if name in values or name in self._arrays:
                self._array(name, place.start)[place] = values.get(name, math.nan)
        self._array("file")[place] = self._words["file"][file]
        self._array("line")[place] = lines

    def _numbers(self, name: str, words: Sequence[str]) -> Any:
        numbers = self._words[name]
        if words and words.count(words[0]) == len(words):  # as in most columns of one file
            return numbers[words[0]]
        return np.fromiter(map(numbers.__getitem__, words), np.int32, len(words))

    def _array(self, name: str, rows_before: int = 0) -> npt.NDArray[Any]:
        """Return the array of a column with room for all rows; a new one is NaN in the rows before."""
        if name not in self._arrays:
            self._arrays[name] = np.full(rows_before, np.nan)
        array = self._arrays[name]
        if len(array) < self.rows:
            # in place, without a copy where the system can move pages; there is no other reference to these arrays
            array.resize(max(self.rows, len(array) + len(array) // 4), refcheck=False)
        return array

    def frame(self) -> pd.DataFrame:
        """Return all rows, and empty the columns, so that memory never holds the rows twice."""
        empty = np.full(self.rows, np.nan)  # one array for all empty columns, as nothing writes to a frame's columns
        names = [*WORDS, *WHOLE_NUMBERS, ANSWER_HASH, *REAL_NUMBERS, "file", "line"]
        columns = {name: self._column(name) if name in self._arrays else empty for name in names}
        return pd.DataFrame(columns, copy=False)

    def _column(self, name: str) -> Any:
        values = self._arrays.pop(name)
        values.resize(self.rows, refcheck=False)
        if name not in self._words:
            return values
        words = list(self._words.pop(name))
        order = sorted(range(len(words)), key=words.__getitem__)  # categories sort as their words do
        ranks = np.empty(len(words), dtype=np.int32)  # of each word among the sorted ones
        ranks[order] = np.arange(len(words), dtype=np.int32)
        return pd.Categorical.from_codes(ranks[values], categories=pd.Index([words[i] for i in order], dtype=object))


@dataclass(frozen=True)
class Problem:
    """A part of a file that was not read; ``line`` counts from 1, 0 for the whole file.

    If the problem is a score outside of [0, 1], ``score`` is its value; otherwise ``score`` is None.
    """

    file: str
    line: int
    reason: str
    score: float | None = None


def read_unit(path: Path, columns: Columns, problems: list[Problem]) -> str:
    """Add the records of a file to the columns and its errors to the problems; returns the file's sha256."""
    digest = hashlib.sha256()
    first = 1
    for raw in _blocks(path):
        digest.update(raw)
        values = _fast_columns(raw)
        if values is None:
            count = raw.count(b"\n") + (not raw.endswith(b"\n"))  # the last line may have no newline
            numbered = list(_strict_records(path.name, BytesIO(raw), first, problems))
            columns.add(path.name, [line for line, _ in numbered], columns_of([record for _, record in numbered]))
        else:
            count = len(values["score"])
            columns.add(path.name, np.arange(first, first + count), values)
        first += count
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines."""
    with path.open("rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            yield block if block.endswith(b"\n") else block + handle.readline()


def _fast_columns(raw: bytes) -> dict[str, Sequence[Any]] | None:
    """Return the columns of a block, or None if the fast reader does not accept it."""
    values = parse_block(raw)
    if values is None:
        return None
    hashes = np.zeros(len(values["score"]), dtype=np.int64)
    engine_rows = np.flatnonzero(np.isnan(values["retention"]))
    hashes[engine_rows] = [
        _digest(message.content for message in values["transcript"][row] if message.role == Role.ASSISTANT)
        for row in engine_rows.tolist()
    ]
    return _table_values({**values, ANSWER_HASH: hashes})


def _table_values(values: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the columns of the table, made from the values of each field of the records.

    A field that has a value for each role, facet or span becomes one column per name. Degenerate answers score 0.
    """
    columns = {name: values[name] for name in (*_FIELDS, ANSWER_HASH)}
    is_degenerate = [outcome == Outcome.DEGENERATE for outcome in values["outcome"]]
    columns["score"] = np.where(is_degenerate, 0.0, columns["score"])
    columns |= {f"survival_{role}": shares for role, shares in values["survival"].items() if role in ROLES}
    columns |= {FACET_COLUMNS[name]: codes for name, codes in values["facets"].items()}
    columns |= {SPAN_COLUMNS[name]: shares for name, shares in values["spans"].items()}
    return columns


def columns_of(records: Sequence[Record]) -> dict[str, Sequence[Any]]:
    """Return, from records, the values of each column of the table, in the order of the records."""
    values: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in _FIELDS}
    values["outcome"] = [record.outcome.value for record in records]
    values["score"] = np.array(values["score"], dtype=np.float64)  # NaN for None
    values[ANSWER_HASH] = [
        0 if r.retention is not None else _digest(m.content for m in r.transcript if m.role is Role.ASSISTANT)
        for r in records
    ]
    values["survival"] = columns_by_name([record.survival for record in records])
    values["facets"] = columns_by_name([{n: FACET_CODES[v] for n, v in record.facets.items()} for record in records])
    values["spans"] = columns_by_name([{n: span.share for n, span in record.spans.items()} for record in records])
    return _table_values(values)


def _digest(texts: Iterable[str]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        # with the lengths, or two texts would have the digest of their concatenation
        digest.update(len(text).to_bytes(8) + text.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), signed=True)


def _strict_records(
    file: str, lines: Iterable[bytes], first: int, problems: list[Problem]
) -> Iterator[tuple[int, Record]]:
    for number, raw in enumerate(lines, first):
        try:
            yield number, check_record(Record.from_json(raw.decode()))
        except (DataError, UnicodeDecodeError, RecursionError, TypeError, OverflowError) as error:
            prefix = "" if raw.endswith(b"\n") else "half-written last line: "
            score = error.score if isinstance(error, OffScale) else None
            problems.append(Problem(file, number, prefix + one_line(error), score))


def check_record(record: Record) -> Record:
    """Return the record if every scalar has its type and every number is finite; raises DataError otherwise."""
    for name, types in _SCALARS.items():
        value: Any = getattr(record, name)
        if not isinstance(value, types) or isinstance(value, bool):
            raise DataError(f"record has {name}={str(value)[:40]!r}, wanted {types[-1].__name__}")
        if isinstance(value, str) and not is_text(value):
            raise DataError(f"record has a {name} with an unpaired surrogate, which UTF-8 cannot encode")
        if isinstance(value, int | float) and not -LARGEST_STORED < value < LARGEST_STORED:
            raise DataError(f"record has {name}={str(value)[:40]}, wanted a finite number below 2^62")
    for name, types in NULLABLE.items():
        optional: Any = getattr(record, name)
        if not _is_valid_optional(name, optional):
            expected = "a finite number" if float in types else "a number of bytes"
            raise DataError(f"record has {name}={str(optional)[:40]!r}, wanted {expected} below 2^62, or null")
    if not isinstance(record.survival, dict) or any(
        isinstance(share, bool) or not isinstance(share, int | float) or not math.isfinite(share)
        for share in record.survival.values()
    ):
        raise DataError("record has a bad survival table, wanted role -> share")
    if any(not isinstance(message.content, str) for message in record.transcript):
        raise DataError("record has a transcript message that is not text")
    return record


def _is_valid_optional(name: str, value: Any) -> bool:
    if value is None:
        return True
    if type(value) not in NULLABLE[name] or not -LARGEST_STORED < value < LARGEST_STORED:
        return False
    return name != LIVE_BYTES or value >= 0


# --- panels: the table of one suite at one length --------------------------------------------------------------------


class CellKey(NamedTuple):
    """The key of a panel's scores: one checkpoint (arm and training seed) served under one policy."""

    arm: str
    seed: int
    policy: str


@dataclass(frozen=True)
class Panel:
    """The scores [N] of one suite or facet at one length, by checkpoint and policy (a cell); NaN for a missing item.

    For a suite's score, ``scores`` and ``floor`` count unscored samples as 0, ``best`` counts them as 1. For a facet,
    whose scores are 1 for the wanted value, ``scores`` is the mean of an item's readable samples, NaN if it has none;
    ``floor`` counts unreadable samples as 0, ``best`` as 1. ``readings`` are the scores with every unsure grade counted
    as 0, then as 1; empty if no judge was unsure. ``unscored_as`` are the scores, also of a facet, with every unscored
    sample counted as 0, then as 1; empty if all are scored.
    """

    suite: str  # or SUITE.FACET
    context_tokens: int
    items: tuple[str, ...]
    clusters: npt.NDArray[np.int64]  # [N] codes
    cluster_names: tuple[str, ...]  # [C]
    scores: Mapping[CellKey, Array]
    floor: Mapping[CellKey, Array]
    best: Mapping[CellKey, Array]
    unscored: Mapping[CellKey, float]  # share of samples
    samples: int  # the largest number of samples per item
    graded: bool  # some sample scores neither 0 nor 1
    uneven_samples: frozenset[CellKey]  # cells whose items have different numbers of samples
    split_items: int  # items that are in several clusters
    readings: tuple[Mapping[CellKey, Array], ...] = ()
    unscored_as: tuple[Mapping[CellKey, Array], ...] = ()


_PANEL = ("suite", "context_tokens", "arm", "train_seed", "policy", "item_id", "cluster_id", "score", "unsure")
Panels = Mapping[tuple[str, int], Panel]  # by suite, or SUITE.FACET, and context length


def panels(records: pd.DataFrame) -> dict[tuple[str, int], Panel]:
    """Return the score table (``Panel``) of every suite and facet that occurs.

    The keys are (SUITE or SUITE.FACET, context length in tokens).
    """
    by_metric = {}
    facets = [column for column in FACET_COLUMNS.values() if column in records and records[column].notna().any()]
    columns = [column for column in (*_PANEL, *facets) if column in records]  # only these, as every group is a copy
    for index, rows in records[columns].groupby(["suite", "context_tokens"], sort=True, observed=True):
        suite, context = str(cast(tuple[str, int], index)[0]), int(cast(tuple[str, int], index)[1])
        score = rows["score"].to_numpy(dtype=np.float64)
        is_read = np.ones(len(score), dtype=np.bool_)
        unsure = rows["unsure"].to_numpy(dtype=np.bool_) if "unsure" in rows else ~is_read
        unscored = np.isnan(score)
        by_metric[suite, context] = _panel(
            suite, context, rows, score, is_read=is_read, unsure=unsure, unscored=unscored
        )
        for name, eligible, good, is_read in _facets(rows):
            metric = f"{suite}.{name}"
            by_metric[metric, context] = _panel(
                metric,
                context,
                rows[eligible],
                good[eligible],
                is_read=is_read[eligible],
                # a judge that is unsure of the content is not unsure of the form
                unsure=unsure[eligible] & (name != WELL_FORMED),
                unscored=unscored[eligible],
            )
    return by_metric


def count_distinct(tables: Sequence[pd.DataFrame], column: str, by: Sequence[str]) -> pd.Series:
    """Return how many different values of ``column`` all tables together have, for each combination of ``by``."""
    # duplicates first: a million rows have few different values, and text needs an object per row
    rows = pd.concat([table[[*by, column]].drop_duplicates().astype(str) for table in tables])
    return rows.groupby(list(by))[column].nunique()


def facet_metrics(records: pd.DataFrame) -> list[str]:
    """Return the name SUITE.FACET of every facet that occurs, suites sorted, facets in the order of FACETS."""
    columns = [(name, column) for name, column in FACET_COLUMNS.items() if column in records]
    suites = {name: set(map(str, records.loc[records[column].notna(), "suite"].unique())) for name, column in columns}
    return [
        f"{suite}.{name}"
        for suite in sorted(map(str, records["suite"].unique()))
        for name in suites
        if suite in suites[name]
    ]


def facet_scores(column: pd.Series, facet: str | None) -> Array:
    """Return 1 where a facet has its wanted value, 0 where it has the other, NaN where it could not be read.

    If ``facet`` is None the column is a score, and is returned unchanged.
    """
    value: Array = column.to_numpy(dtype=np.float64)
    if facet is None:
        return value
    return np.where(np.isnan(value) | (value == UNREAD), np.nan, value == FACETS[facet].wanted)


def _facets(rows: pd.DataFrame) -> Iterator[tuple[str, _Mask, Array, _Mask]]:
    """Yield each facet (yes-or-no property of an answer) that occurs: its name, and three arrays with an entry per row.

    The first array says whether the row has the facet, the third whether the facet could be read. The second is 1 where
    the facet has its wanted value, else 0.
    """
    for name, column in FACET_COLUMNS.items():
        if column in rows:
            value = rows[column].to_numpy(dtype=np.float64)
            eligible, is_read = ~np.isnan(value), value != UNREAD
            if eligible.any():
                yield name, eligible, (value == FACETS[name].wanted).astype(np.float64), is_read


def _panel(
    suite: str, context: int, rows: pd.DataFrame, score: Array, *, is_read: _Mask, unsure: _Mask, unscored: _Mask
) -> Panel:
    keys, cell = _cells(rows)  # cell [rows]
    items, item = _codes(rows["item_id"])  # item [rows]
    names, name = _codes(rows["cluster_id"])
    first_cluster = np.zeros(len(items), dtype=np.int64)
    first_cluster[item[::-1]] = name[::-1]  # of several clusters the one of the item's first row
    used, clusters = np.unique(first_cluster, return_inverse=True)  # numbered within this panel: clusters [N]
    shape = (len(items), len(keys))
    index = item * len(keys) + cell  # index of a row's entry in [items, cells]
    hidden = unscored | ~is_read
    low, high = np.where(hidden, 0.0, score), np.where(hidden, 1.0, score)
    counts = _counts(index, np.ones(len(index), dtype=np.bool_), shape)  # [items, cells]
    most_samples = int(counts.max())
    unsure = unsure & ~hidden
    return Panel(
        suite=suite,
        context_tokens=context,
        items=tuple(items),
        clusters=clusters.astype(np.int64),
        cluster_names=tuple(names[code] for code in used),
        # an unreadable sample adds 0 to the sum, so only the count must leave it out
        scores=_by_cell(keys, _means(index, low, _counts(index, is_read, shape))),
        floor=_by_cell(keys, _means(index, low, counts)),
        best=_by_cell(keys, _means(index, high, counts)),
        unscored=dict(zip(keys, (_total(cell, unscored, len(keys)) / counts.sum(axis=0)).tolist(), strict=True)),
        samples=most_samples,
        graded=bool(np.any((score > 0) & (score < 1))),
        uneven_samples=frozenset(
            key for key, column in zip(keys, counts.T, strict=True) if ((column > 0) & (column != most_samples)).any()
        ),
        split_items=len(np.unique(item[name != first_cluster[item]])),
        readings=tuple(
            _by_cell(keys, _means(index, np.where(unsure, value, low), _counts(index, is_read, shape)))
            for value in ((0.0, 1.0) if unsure.any() else ())
        ),
        unscored_as=tuple(
            _by_cell(keys, _means(index, np.where(unscored, value, low), _counts(index, is_read | unscored, shape)))
            for value in ((0.0, 1.0) if unscored.any() else ())
        ),
    )


def _cells(rows: pd.DataFrame) -> tuple[list[CellKey], npt.NDArray[np.int64]]:
    """Return the cells (arm, training seed, policy) of these rows, sorted, and for each row the index of its cell."""
    arms, arm = _codes(rows["arm"])
    seeds, seed = np.unique(rows["train_seed"].to_numpy(), return_inverse=True)
    policies, policy = _codes(rows["policy"])
    # arm, seed and policy as the digits of one number, which sorts as they do
    numbers, cell = np.unique((arm * len(seeds) + seed) * len(policies) + policy, return_inverse=True)
    arm_and_seed, policy = np.divmod(numbers, len(policies))
    keys = [
        CellKey(arms[a], int(seeds[s]), policies[p])
        for a, s, p in zip(*np.divmod(arm_and_seed, len(seeds)), policy, strict=True)
    ]
    return keys, cell.astype(np.int64)


def _codes(column: pd.Series) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the different words of a column, sorted, and each row's index into them."""
    categories = column.astype("category")
    # not all categories of the whole table occur in these rows
    used, codes = np.unique(categories.cat.codes.to_numpy(), return_inverse=True)
    return [str(word) for word in categories.cat.categories[used]], codes.astype(np.int64)


def _total(index: npt.NDArray[np.int64], values: npt.NDArray[Any], size: int) -> Array:
    sums: Array = np.bincount(index, weights=values.astype(np.float64), minlength=size).astype(np.float64)
    return sums


def _counts(index: npt.NDArray[np.int64], kept: _Mask, shape: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Return how many rows are ``kept`` for each item in each cell, [items, cells] (``shape``).

    ``index`` is the position of each row in the flattened result.
    """
    return np.bincount(index[kept], minlength=shape[0] * shape[1]).reshape(shape).astype(np.int64)


def _means(index: npt.NDArray[np.int64], values: Array, counts: npt.NDArray[np.int64]) -> Array:
    """Return the mean value of each item in each cell, [items, cells]; NaN where a cell lacks the item.

    ``index`` is the position of each value in the flattened result, ``counts`` [items, cells] the number of values.
    """
    sums = _total(index, values, counts.size).reshape(counts.shape)
    means: Array = np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    return means


def _by_cell(keys: list[CellKey], table: Array) -> dict[CellKey, Array]:
    return {key: np.ascontiguousarray(table[:, i]) for i, key in enumerate(keys)}
