"""One file of records -> columns, hashed in the same read: a block of lines at a time, no record object, no transcript.

A block whose every value is plainly what a record holds goes through whole columns at once. Any other block is read
line by line by ``Record.from_json``, whose word counts: what the columns let through it would accept too.

Of the table a ``Panel`` for every suite and length: items by (arm, seed, policy), samples averaged inside the item.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.errors import DataError, OffScale
from kvaudit.core.facets import FACETS, WELL_FORMED
from kvaudit.core.records import TOKEN_ROLES, Outcome, Record, Role
from kvaudit.core.spans import SPANS
from kvaudit.core.text import is_text, one_line
from kvaudit.reports.records.blocks import FACET_CODES, LARGEST_STORED, UNREAD, Array, answers_said, block_of, by_name

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
LIVE_BYTES = "kv_bytes_live"  # NaN in records from before it was counted
LOGPROB = "logprob"  # NaN where nobody gave one
ANSWER_HASH = "said"  # stands for all that an engine's answer says, 0 for one of our own cache
# what an engine need not show, NaN where it does not: the type of a value that is there
NULLABLE: dict[str, tuple[type, ...]] = {
    "retention": (int, float),
    "kv_bytes_peak": (int,),
    "kv_bytes_dense": (int,),
    LIVE_BYTES: (int,),
    LOGPROB: (int, float),
}
REAL = (
    *(name for name in COPIED if _KINDS[name] == "float"),
    *("score", "unsure", *NULLABLE),
    *(f"survival_{role}" for role in ROLES),
    *FACET_COLUMNS.values(),
    *SPAN_COLUMNS.values(),
)
BLOCK_BYTES = 1 << 18  # bytes of lines parsed together: what stays in a processor's cache
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
_SCALARS = [(f.name, _TYPES[str(f.type)]) for f in fields(Record) if str(f.type) in _TYPES]
_Mask = npt.NDArray[np.bool_]


class _Numbering(dict[str, int]):
    """Each new word gets the next number."""

    def __missing__(self, word: str) -> int:
        return self.setdefault(word, len(self))


class Columns:
    """The rows read so far; ``file`` and ``line`` say where each one stood.

    A column is one array that grows in place: a list of parts would be in memory twice when they are joined. One that
    no record has a value for takes no memory before the end.
    """

    def __init__(self) -> None:
        self._words: dict[str, _Numbering] = {name: _Numbering() for name in (*_WORDS, "file")}
        kinds = dict.fromkeys(self._words, np.int32) | dict.fromkeys((*WHOLE_NUMBERS, ANSWER_HASH, "line"), np.int64)
        self._arrays: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype=kind) for name, kind in kinds.items()}
        self.rows = 0

    def add(self, file: str, lines: Sequence[int] | npt.NDArray[np.int64], values: Mapping[str, Sequence[Any]]) -> None:
        """Add rows; ``values`` has a sequence per copied field, ``outcome``, ``score`` and what else is known."""
        place = slice(self.rows, self.rows + len(lines))
        self.rows = place.stop
        for name in _WORDS:
            self._room(name)[place] = self._numbered(name, values[name])
        for name in (*WHOLE_NUMBERS, ANSWER_HASH):
            self._room(name)[place] = values[name]
        for name in REAL:
            if name in values or name in self._arrays:
                self._room(name, place.start)[place] = values.get(name, math.nan)  # NaN for None, too
        self._room("file")[place] = self._words["file"][file]
        self._room("line")[place] = lines

    def _numbered(self, name: str, words: Sequence[str]) -> Any:
        numbers = self._words[name]
        if words and words.count(words[0]) == len(words):  # as most are within a file
            return numbers[words[0]]
        return np.fromiter(map(numbers.__getitem__, words), np.int32, len(words))

    def _room(self, name: str, before: int = 0) -> npt.NDArray[Any]:
        """The array of a column, with room for all rows; a new one knows nothing of the rows ``before``."""
        if name not in self._arrays:
            self._arrays[name] = np.full(before, np.nan)
        array = self._arrays[name]
        if len(array) < self.rows:
            # in place and without a copy, where the system can move pages; nothing else holds these arrays
            array.resize(max(self.rows, len(array) + len(array) // 4), refcheck=False)
        return array

    def frame(self) -> pd.DataFrame:
        """All rows; empties the columns, so that both are never in memory."""
        unknown = np.full(self.rows, np.nan)  # one for all, as nothing writes to a frame's columns
        names = [*_WORDS, *WHOLE_NUMBERS, ANSWER_HASH, *REAL, "file", "line"]
        found = {name: self._column(name) if name in self._arrays else unknown for name in names}
        return pd.DataFrame(found, copy=False)

    def _column(self, name: str) -> Any:
        values = self._arrays.pop(name)
        values.resize(self.rows, refcheck=False)
        if name not in self._words:
            return values
        words = list(self._words.pop(name))
        order = sorted(range(len(words)), key=words.__getitem__)  # categories sort as their words do
        # from the number of a word to its place among the sorted ones
        place = np.empty(len(words), dtype=np.int32)
        place[order] = np.arange(len(words), dtype=np.int32)
        sorted_words = pd.Index([words[i] for i in order], dtype=object)
        return pd.Categorical.from_codes(place[values], categories=sorted_words)


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
        values = _plain(raw)
        if values is None:
            count = raw.count(b"\n") + (not raw.endswith(b"\n"))  # the last line may have no end
            read = list(_strict(path.name, BytesIO(raw), first, problems))
            columns.add(path.name, [line for line, _ in read], columns_of([record for _, record in read]))
        else:
            count = len(values["score"])
            columns.add(path.name, np.arange(first, first + count), values)
        first += count
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in whole lines, a block of them at a time."""
    with path.open("rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            yield block if block.endswith(b"\n") else block + handle.readline()


def _plain(raw: bytes) -> dict[str, Sequence[Any]] | None:
    """The columns of a block in which everything is as it should be, else None: the strict reading says what is not."""
    values = block_of(raw)
    if values is None:
        return None
    said = np.zeros(len(values["score"]), dtype=np.int64)
    shown = np.flatnonzero(np.isnan(values["retention"]))  # by an engine, whose cache nobody sees
    said[shown] = [_digest(texts) for texts in answers_said(values["transcript"], shown.tolist())]
    return _kept({**values, ANSWER_HASH: said})


def _optional_fit(name: str, value: Any) -> bool:
    """Whether a value that may be absent is absent, or a finite number of its type."""
    if value is None:
        return True
    if type(value) not in NULLABLE[name] or not -LARGEST_STORED < value < LARGEST_STORED:
        return False
    return name != LIVE_BYTES or value >= 0


def _kept(values: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """What the report keeps of a block: degenerate as 0; survival, facets and spans by name, where there are any."""
    kept = {name: values[name] for name in (*COPIED, *NULLABLE, "outcome", "score", "unsure", ANSWER_HASH)}
    degenerate = [outcome == Outcome.DEGENERATE for outcome in values["outcome"]]
    kept["score"] = np.where(degenerate, 0.0, kept["score"])
    kept |= {f"survival_{role}": shares for role, shares in values["survival"].items() if role in ROLES}
    kept |= {FACET_COLUMNS[name]: codes for name, codes in values["facets"].items()}
    kept |= {SPAN_COLUMNS[name]: shares for name, shares in values["spans"].items()}
    return kept


def columns_of(records: Sequence[Record]) -> dict[str, Sequence[Any]]:
    """The same columns of records."""
    values: dict[str, Any] = {name: [getattr(r, name) for r in records] for name in (*COPIED, *NULLABLE, "unsure")}
    values["outcome"] = [record.outcome.value for record in records]
    values["score"] = np.array([record.score for record in records], dtype=np.float64)  # NaN for None
    values[ANSWER_HASH] = [0 if r.retention is not None else _digest(_answer(r)) for r in records]
    codes = [{name: FACET_CODES[value] for name, value in record.facets.items()} for record in records]
    shares = [{name: span.share for name, span in record.spans.items()} for record in records]
    values |= {"survival": by_name([r.survival for r in records]), "facets": by_name(codes), "spans": by_name(shares)}
    return _kept(values)


def _answer(record: Record) -> Iterator[str]:
    return (message.content for message in record.transcript if message.role is Role.ASSISTANT)


def _digest(texts: Iterable[str]) -> int:
    """A number that stands for some texts: equal where they are."""
    whole = hashlib.blake2b(digest_size=8)
    for text in texts:
        # with their lengths, or two texts would count as one that holds both
        whole.update(len(text).to_bytes(8) + text.encode("utf-8", "surrogatepass"))
    return int.from_bytes(whole.digest(), signed=True)


def _strict(file: str, lines: Iterable[bytes], first: int, problems: list[Problem]) -> Iterator[tuple[int, Record]]:
    for number, raw in enumerate(lines, first):
        try:
            yield number, check_record(Record.from_json(raw.decode()))
        except (DataError, UnicodeDecodeError, RecursionError, TypeError, OverflowError) as error:
            half = "" if raw.endswith(b"\n") else "half-written last line: "
            score = error.score if isinstance(error, OffScale) else None
            problems.append(Problem(file, number, half + one_line(error), score))


def check_record(record: Record) -> Record:
    """The same record if every scalar has its type and every number is finite; raises DataError."""
    for name, types in _SCALARS:
        value: Any = getattr(record, name)
        if not isinstance(value, types) or isinstance(value, bool):
            raise DataError(f"record holds {name}={str(value)[:40]!r}, wanted {types[-1].__name__}")
        if isinstance(value, str) and not is_text(value):
            raise DataError(f"record holds {name} with half a character, which no file can hold")
        if isinstance(value, int | float) and not -LARGEST_STORED < value < LARGEST_STORED:
            raise DataError(f"record holds {name}={str(value)[:40]}, wanted a finite number below 2^62")
    for name, types in NULLABLE.items():
        given: Any = getattr(record, name)
        if not _optional_fit(name, given):
            wanted = "a number of bytes" if int in types and float not in types else "a finite number"
            raise DataError(f"record holds {name}={str(given)[:40]!r}, wanted {wanted} below 2^62, or none")
    if not isinstance(record.survival, dict) or not all(_is_share(v) for v in record.survival.values()):
        raise DataError("record holds a bad survival table, wanted role -> share")
    if any(not isinstance(message.content, str) for message in record.transcript):
        raise DataError("record holds a transcript message that is not text")
    return record


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# --- panels: the table of one suite at one length --------------------------------------------------------------------


class CellKey(NamedTuple):
    """One checkpoint served under one policy."""

    arm: str
    seed: int
    policy: str


@dataclass(frozen=True)
class Panel:
    """Scores [N] of every cell; NaN where a cell lacks the item.

    Of a suite's score ``scores`` counts unscored samples as 0, as ``floor`` does, and ``best`` as 1. Of a facet, whose
    scores are 1 where it is as wanted, ``scores`` averages the samples that could be read (NaN where none could),
    ``floor`` counts the others as 0 and ``best`` as 1. ``samples`` is the largest number of draws per item;
    ``graded`` says that some draw is neither 0 nor 1. ``readings`` are the scores with every answer that its judge was
    unsure of counted as 0, and as 1; none where no judge was. ``unscored_as`` are the scores, of a facet too, with
    every unscored sample counted as 0, and as 1; none where all are scored.
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
    samples: int
    graded: bool
    uneven_samples: frozenset[CellKey]  # cells whose items were drawn a different number of times
    split_items: int  # items that stand in more than one cluster
    readings: tuple[Mapping[CellKey, Array], ...] = ()
    unscored_as: tuple[Mapping[CellKey, Array], ...] = ()


_PANEL = ("suite", "context_tokens", "arm", "train_seed", "policy", "item_id", "cluster_id", "score", "unsure")
Panels = Mapping[tuple[str, int], Panel]  # by suite, or SUITE.FACET, and context length


def panels(records: pd.DataFrame) -> dict[tuple[str, int], Panel]:
    """One panel per (suite, context), and one per (suite.facet, context) that some record has."""
    found = {}
    known = [column for column in FACET_COLUMNS.values() if column in records and records[column].notna().any()]
    needed = [column for column in (*_PANEL, *known) if column in records]  # every group is a copy of its columns
    for index, part in records[needed].groupby(["suite", "context_tokens"], sort=True, observed=True):
        suite, context = str(cast(tuple[str, int], index)[0]), int(cast(tuple[str, int], index)[1])
        score = part["score"].to_numpy(dtype=np.float64)
        read = np.ones(len(score), dtype=np.bool_)
        unsure = part["unsure"].to_numpy(dtype=np.bool_) if "unsure" in part else ~read  # of a judge: its best guess
        unscored = np.isnan(score)
        found[suite, context] = _panel(suite, context, part, score, read=read, unsure=unsure, unscored=unscored)
        for name, eligible, good, read in _facets(part):
            metric = f"{suite}.{name}"
            open_to = unsure[eligible] & (name != WELL_FORMED)  # what a refusal is has no part in its form
            found[metric, context] = _panel(
                metric,
                context,
                part[eligible],
                good[eligible],
                read=read[eligible],
                unsure=open_to,
                unscored=unscored[eligible],
            )
    return found


def count_distinct(tables: Sequence[pd.DataFrame], column: str, by: Sequence[str]) -> pd.Series:
    """How many words a column has, over all tables together, under the same words of the columns ``by``."""
    # a million rows hold a few different ones, and as text every row would be an object
    found = pd.concat([table[[*by, column]].drop_duplicates().astype(str) for table in tables])
    return found.groupby(list(by))[column].nunique()


def facet_metrics(records: pd.DataFrame) -> list[str]:
    """SUITE.FACET of everything that some record has, in the order of the vocabulary."""
    known = [(name, column) for name, column in FACET_COLUMNS.items() if column in records]
    suites = {name: set(map(str, records.loc[records[column].notna(), "suite"].unique())) for name, column in known}
    return [
        f"{suite}.{name}"
        for suite in sorted(map(str, records["suite"].unique()))
        for name in suites
        if suite in suites[name]
    ]


def facet_scores(column: pd.Series, facet: str | None) -> Array:
    """1 where a facet is as wanted, 0 where not, NaN where there is none or it could not be read; a score as it is."""
    value: Array = column.to_numpy(dtype=np.float64)
    if facet is None:
        return value
    return np.where(np.isnan(value) | (value == UNREAD), np.nan, value == FACETS[facet].wanted)


def _facets(part: pd.DataFrame) -> Iterator[tuple[str, _Mask, Array, _Mask]]:
    """Every facet of some row: which rows are eligible, 1 where it is as wanted, which rows could be read."""
    for name, column in FACET_COLUMNS.items():
        if column in part:
            value = part[column].to_numpy(dtype=np.float64)
            eligible, read = ~np.isnan(value), value != UNREAD
            if eligible.any():
                yield name, eligible, (value == FACETS[name].wanted).astype(np.float64), read


def _panel(
    suite: str, context: int, part: pd.DataFrame, score: Array, *, read: _Mask, unsure: _Mask, unscored: _Mask
) -> Panel:
    keys, cell = _cells(part)  # cell [rows]
    items, item = _coded(part["item_id"])  # item [rows]
    names, name = _coded(part["cluster_id"])
    first = np.zeros(len(items), dtype=np.int64)
    first[item[::-1]] = name[::-1]  # of several clusters the one of the item's first row
    # the templates of this panel alone, numbered anew: clusters [N]
    used, clusters = np.unique(first, return_inverse=True)
    shape = (len(items), len(keys))
    place = item * len(keys) + cell  # where a row counts in [items, cells]
    hidden = unscored | ~read
    # what is not known counted as 0, and as 1
    low, high = np.where(hidden, 0.0, score), np.where(hidden, 1.0, score)
    counts = _counts(place, np.ones(len(place), dtype=np.bool_), shape)  # [items, cells]
    most = int(counts.max())
    unsure = unsure & ~hidden
    return Panel(
        suite=suite,
        context_tokens=context,
        items=tuple(items),
        clusters=clusters.astype(np.int64),
        cluster_names=tuple(names[code] for code in used),
        # what could not be read adds 0 to the sum, so only the count has to leave it out
        scores=_by_cell(keys, _means(place, low, _counts(place, read, shape))),
        floor=_by_cell(keys, _means(place, low, counts)),
        best=_by_cell(keys, _means(place, high, counts)),
        unscored=dict(zip(keys, (_total(cell, unscored, len(keys)) / counts.sum(axis=0)).tolist(), strict=True)),
        samples=most,
        graded=bool(np.any((score > 0) & (score < 1))),
        uneven_samples=frozenset(
            key for key, column in zip(keys, counts.T, strict=True) if ((column > 0) & (column != most)).any()
        ),
        # the first row of an item says its cluster; rows that say another are of split items
        split_items=len(np.unique(item[name != first[item]])),
        readings=tuple(
            _by_cell(keys, _means(place, np.where(unsure, word, low), _counts(place, read, shape)))
            for word in ((0.0, 1.0) if unsure.any() else ())
        ),
        unscored_as=tuple(
            _by_cell(keys, _means(place, np.where(unscored, word, low), _counts(place, read | unscored, shape)))
            for word in ((0.0, 1.0) if unscored.any() else ())
        ),
    )


def _cells(part: pd.DataFrame) -> tuple[list[CellKey], npt.NDArray[np.int64]]:
    """The cells of these rows in order, and each row's cell."""
    arms, arm = _coded(part["arm"])
    seeds, seed = np.unique(part["train_seed"].to_numpy(), return_inverse=True)
    policies, policy = _coded(part["policy"])
    # arm, seed and policy as the digits of one number, which sorts as they do
    numbers, cell = np.unique((arm * len(seeds) + seed) * len(policies) + policy, return_inverse=True)
    rest, last = np.divmod(numbers, len(policies))
    keys = [
        CellKey(arms[a], int(seeds[s]), policies[p]) for a, s, p in zip(*np.divmod(rest, len(seeds)), last, strict=True)
    ]
    return keys, cell.astype(np.int64)


def _coded(column: pd.Series) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The words of a column in order, and each row's place among them."""
    categories = column.astype("category")
    # words of the whole table that this part does not have are left out
    used, codes = np.unique(categories.cat.codes.to_numpy(), return_inverse=True)
    return [str(word) for word in categories.cat.categories[used]], codes.astype(np.int64)


def _total(place: npt.NDArray[np.int64], values: npt.NDArray[Any], size: int) -> Array:
    sums: Array = np.bincount(place, weights=values.astype(np.float64), minlength=size).astype(np.float64)
    return sums


def _counts(place: npt.NDArray[np.int64], kept: _Mask, shape: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Kept rows by [items, cells]."""
    found = np.bincount(place[kept], minlength=shape[0] * shape[1]).reshape(shape)
    return found.astype(np.int64)


def _means(place: npt.NDArray[np.int64], values: Array, counts: npt.NDArray[np.int64]) -> Array:
    """[items, cells], NaN where a cell lacks the item."""
    sums = _total(place, values, counts.size).reshape(counts.shape)
    means: Array = np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    return means


def _by_cell(keys: list[CellKey], table: Array) -> dict[CellKey, Array]:
    return {key: np.ascontiguousarray(table[:, i]) for i, key in enumerate(keys)}
