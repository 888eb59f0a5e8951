"""The base of readers of result files, and their output: rows of scores, problems, and settings that must agree.

A file is read by the first reader that recognises it. Clusters come from ``--cluster``. Its value ``FIELD`` or
``outer.inner`` names a field of the file's own row. ``re:PATTERN`` takes the first group (or the whole match) of a
pattern in the item's name. ``file:MAP.csv`` is a table with the columns item and cluster.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pandas as pd

from kvaudit.core.errors import DataError, OffScale, SpecError
from kvaudit.core.plugins import Registry
from kvaudit.core.text import clip, clip_distinct, inline, is_text, normalise

if TYPE_CHECKING:
    from kvaudit.reports.records.load import RunData

ONE_SUITE = ""  # the suite of a file with a single unnamed task
ANY_METRIC = ""  # the metric of a line that names none
LONGEST_LINE = 64 * 2**20  # bytes
LARGEST_SEED = 2**62
_RECOGNITION_LINES = 20
_MAX_METRIC_LENGTH = 120  # characters
_ROUNDING = 1e-9  # how far a mean of scores in [0, 1] may lie outside of it
ClusterRule = Callable[[Mapping[str, Any], str], str | None]  # a file's own row, item -> cluster


class Row(NamedTuple):
    """One score of one answer; ``score`` is in [0, 1] with 1 as desired, NaN if there is none.

    ``sample`` numbers the repeats of an item. ``fingerprint`` and ``question`` are hashes of the item's question. Rows
    of two files asked the same if their fingerprints are equal. Items of one file have an equal ``question`` if they
    ask the same apart from case and blanks.
    """

    item: str
    metric: str
    score: float
    cluster: str | None = None
    sample: int = 0
    suite: str = ONE_SUITE
    context: int = 0
    seed: int = 0
    fingerprint: str = ""
    question: str = ""
    line: int = 0


@dataclass(frozen=True)
class Request:
    """The options with which a result file is read, such as how to find clusters."""

    cluster: ClusterRule | None = None  # None: the clusters that the file names
    select: Mapping[str, str] = field(default_factory=dict)  # one cell of a run: arm, seed, policy, suite, context


@dataclass(frozen=True)
class OffScaleScores:
    """The scores of a metric that are outside [0, 1]: their number, smallest, largest, and the place of the first."""

    count: int
    low: float
    high: float
    first: str

    def error(self, path: Path, metric: str) -> DataError:
        """Return the error for a file with scores outside [0, 1], to which a margin in points cannot be applied."""
        advice = "; a log-likelihood or a reward has no ends, score right or wrong instead" if self.low < 0 else ""
        return DataError(
            f"{path.name}: metric {metric} has {self.count} scores outside [0, 1], from {self.low:g} to {self.high:g} "
            f"(first {self.first}), wanted 1 as desired and 0 as not; rescale both files alike by the ends of the "
            f"scale, (score - lowest) / (highest - lowest), which is score / 100 for percent{advice}"
        )


@dataclass(frozen=True)
class Log:
    """The content of a result file. ``rows`` has the columns of ``Row``; kvaudit's own records also have facets."""

    path: Path
    reader: str
    rows: pd.DataFrame
    problems: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)  # must agree between two compared files
    facts: Mapping[str, str] = field(default_factory=dict)  # shown, not compared
    unfinished: str = ""  # why the file is incomplete
    duplicates: int = 0  # duplicate rows, already left out
    kept_out: Mapping[str, int] = field(default_factory=dict)  # metric or ANY_METRIC -> answers among ``problems``
    scales: Mapping[str, OffScaleScores] = field(default_factory=dict)  # by metric
    prompts: Mapping[str, str] = field(default_factory=dict)  # suite and length -> sha256 of the rendered prompts
    notes: tuple[str, ...] = ()  # remarks on how the file was read
    shared_fields: tuple[str, ...] = ()  # fields that could name clusters, as --cluster takes them
    run: RunData | None = None  # of a run folder, with the selected records
    select: Mapping[str, str] = field(default_factory=dict)

    @property
    def metrics(self) -> set[str]:
        """All metrics of the file, including those with scores outside [0, 1]."""
        return {*self.rows["metric"].unique(), *self.scales}


@dataclass
class Problems:
    """The problems of a file, collected while it is read.

    ``texts`` has an entry for each skipped answer, ``counts`` has their number by metric. ``scales`` has, by metric,
    the scores outside [0, 1].
    """

    texts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    scales: dict[str, OffScaleScores] = field(default_factory=dict)

    def add(self, text: str, metric: str = ANY_METRIC) -> None:
        """Add the ``text`` of a problem that made the reader skip one answer of ``metric``."""
        self.texts.append(text)
        self.counts[metric] += 1

    def add_off_scale(self, score: float, place: str, metric: str) -> None:
        """Add a score outside [0, 1]; ``place`` is its file and line."""
        old = self.scales.get(metric, OffScaleScores(0, score, score, place))
        self.scales[metric] = OffScaleScores(old.count + 1, min(old.low, score), max(old.high, score), old.first)


class Reader:
    """The base class of readers, one for each kind of result file; each is a module of this folder."""

    name: ClassVar[str] = ""
    reads: ClassVar[str] = ""  # in words, for error messages
    has_direction: ClassVar[bool] = False  # the format guarantees that 1 is desired in every metric

    def recognises(self, path: Path) -> bool:
        """Return whether the file looks like this kind; never raises because of its content."""
        raise NotImplementedError

    def read(self, path: Path, request: Request) -> Log:
        """Return the content of the file.

        Raises DataError if nothing can be read, SpecError if the selection in ``request`` does not fit the file.
        """
        raise NotImplementedError


def log_of(reader: Reader, path: Path, rows: list[Row], problems: Problems, **fields: Any) -> Log:
    """Return the log of a file with these ``rows``; ``fields`` are further fields of ``Log``.

    Raises DataError if there are no rows. The message names the range of the scores if that is not [0, 1], or else the
    first problem.
    """
    if not rows:
        for metric, scale in problems.scales.items():
            raise scale.error(path, metric)
        first = f"; first problem: {problems.texts[0]}" if problems.texts else ""
        raise DataError(f"{str(path)!r} holds no row that can be read as {reader.reads}{first}")
    frame = pd.DataFrame(rows, columns=list(Row._fields))
    texts, counts = tuple(problems.texts), dict(problems.counts)
    return Log(path, reader.name, frame, texts, kept_out=counts, scales=problems.scales, **fields)


def json_lines(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number (from 1) and the content of each line that is a JSON object; add other lines to ``problems``."""
    with path.open("rb") as handle:
        # a longer line is split: several problems instead of one object that fills the memory
        for number, raw in enumerate(iter(lambda: handle.readline(LONGEST_LINE), b""), start=1):
            if not raw.strip():
                continue
            value = json_object(raw)
            if value is not None:
                yield number, value
                continue
            prefix = "" if raw.endswith(b"\n") else "half-written last line, "
            problems.add(f"{path.name}:{number}: {prefix}not a JSON object")


def first_objects(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects among the first lines of a file, by which a reader recognises its kind."""
    with path.open("rb") as handle:
        lines = islice(iter(lambda: handle.readline(LONGEST_LINE), b""), _RECOGNITION_LINES)
        return [value for raw in lines if (value := json_object(raw)) is not None]


def json_object(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``raw``, None if it is anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def name_of(value: Any) -> str | None:
    """Return a text or whole number as the name of an item, cluster or suite; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    # Python raises for whole numbers of thousands of digits
    text = str(value).strip() if isinstance(value, str) else f"{value:d}" if abs(value) < LARGEST_SEED else ""
    return text if text and is_text(text) else None


def fingerprint_of(question: Any) -> str:
    """Return a short hash of a question, given as JSON values; two files with equal hashes asked the same."""
    text = json.dumps(question, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def question_key(question: Any) -> str:
    """Return a hash of a question, given as JSON values; it ignores case and blanks, so that near copies share it."""
    return fingerprint_of(_normalised(question))


def _normalised(value: Any) -> Any:
    if isinstance(value, str):
        return normalise(value)
    if isinstance(value, list):
        return [_normalised(element) for element in value]
    return {key: _normalised(element) for key, element in value.items()} if isinstance(value, dict) else value


def metric_name(text: str) -> str:
    """Return a metric's name as one printable line of limited length."""
    return inline(clip_distinct(text, _MAX_METRIC_LENGTH))


def score_of(value: Any) -> float:
    """Return a score as a float, NaN for None; raises OffScale for one outside [0, 1], DataError for a non-number."""
    if value is None:
        return math.nan
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        raise DataError(f"score {str(value)[:40]!r} is not a number")
    try:
        score = float(value)
    except OverflowError:  # a whole number too large for a float
        score = math.inf
    if math.isnan(score):
        return math.nan
    if math.isinf(score):
        raise DataError(f"score {str(value)[:40]} is not finite")
    if not -_ROUNDING <= score <= 1 + _ROUNDING:
        raise OffScale(score)
    return min(max(score, 0.0), 1.0)


def parse_number(text: str) -> float:
    """Return the number in a text; raises DataError for anything else, also for Python's ``1_0``."""
    try:
        if not text.isascii() or "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise DataError(f"score {text[:40]!r} is not a number") from None


@dataclass
class CollectedScores:
    """The scores of a file and the values that are no scores, collected while the file is read."""

    problems: Problems
    rows: list[Row] = field(default_factory=list)
    _errors: list[tuple[str, str]] = field(default_factory=list)

    def add(self, row: Row, value: Any, place: str) -> None:
        """Add ``row`` with ``value`` as its score, or keep the error if the value is no score."""
        try:
            self.rows.append(row._replace(score=score_of(value)))
        except OffScale as error:
            self.problems.add_off_scale(error.score, place, row.metric)
        except DataError as error:
            self._errors.append((row.metric, f"{place}: {row.metric}: {error}"))

    def report(self) -> None:
        """Add the collected errors to the problems.

        A metric in which no value is a score holds text, so its errors are left out. But if no metric of the file has a
        score, all errors are added.
        """
        scored = {row.metric for row in self.rows if not math.isnan(row.score)}
        for metric, text in self._errors:
            if not scored or metric in scored:
                self.problems.add(text, metric)


def repeat_of(value: Any) -> int | None:
    """Return ``value`` as the number of a repeat (sample, epoch), None for anything but a whole number from 0."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_SEED
    return int(value) if is_whole else None


READERS: Registry[Reader] = Registry("reader", "kvaudit.reports.records.readers", Reader)


def read_log(path: Path, request: Request) -> Log:
    """Return the content of a result file; raises DataError if it is missing, unreadable or of no known kind."""
    try:
        reader = _reader_of(path)
        if request.select and reader.name != "kvaudit":
            raise DataError(f"{str(path)!r} was read as {reader.reads}; selectors choose cells of a kvaudit run only")
        return reader.read(path, request)
    except RecursionError:  # the parser accepts more levels than json.dumps and the comparison do
        raise DataError(f"{str(path)!r} nests lists or objects hundreds of levels deep; no tool writes that") from None
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror or error}); check the path") from None


_SPREADSHEET = "a spreadsheet, which is not read; save it as CSV with the columns item and score"
_ADVICE_BY_SUFFIX = {
    ".xlsx": _SPREADSHEET,
    ".xls": _SPREADSHEET,
    ".parquet": "a table of Parquet, which is not read; write it as CSV with the columns item and score",
    ".gz": "compressed by gzip, which is not unpacked; run gunzip on it first",
    ".zst": "compressed by Zstandard, which is not unpacked; run unzstd on it first",
}
_START = 4096  # bytes at the beginning of a file


def foreign_kind(path: Path) -> str:
    """Return a text that says what an unrecognised file is and what to give instead; empty if unknown."""
    if path.is_dir():
        return ""
    if advice := _ADVICE_BY_SUFFIX.get(path.suffix.lower()):
        return advice
    with path.open("rb") as handle:
        start = handle.read(_START)
    if start.lstrip().startswith(b"{") and b'"results"' in start and path.name.startswith("results"):
        return "lm-eval's summary, which holds no answers; give the samples_*.jsonl that --log_samples writes beside it"
    if start.lstrip().startswith(b"[") and b'"doc_id"' in start and b'"prompt_0"' in start:
        return (
            "what lm-eval wrote with --write_out before 0.4, which is not read; run the task again with --log_samples, "
            "or write its doc_id and metric as CSV with the columns item and score"
        )
    return ""


def check_readable(path: Path) -> None:
    """Raise DataError for a pipe or a device, because files are read several times."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{str(path)!r} is a pipe or a device; write what it holds to a file and give that")


def _reader_of(path: Path) -> Reader:
    if not path.exists():
        raise DataError(f"{str(path)!r} does not exist; give a result file or the folder of a run")
    check_readable(path)
    readers = [reader() for reader in READERS.all().values()]
    for reader in readers:
        if reader.recognises(path):
            return reader
    if kind := foreign_kind(path):
        raise DataError(f"{str(path)!r} is {kind}")
    kinds = "; ".join(reader.reads for reader in readers)
    raise DataError(f"{str(path)!r} is not a known kind of result file: {kinds}")


_MAX_NAME = 500  # characters of an item's name that a pattern is tried on
_MAX_ITEMS = 2000  # whose fields are compared
_MAX_FIELD = 60  # characters of a field's name that is proposed
_MIN_CLUSTERS = 6  # with fewer there is no interval


def cluster_rule(text: str) -> ClusterRule:
    """Return the rule named by ``--cluster``, which says to what cluster (items that share wording) an item belongs.

    Raises SpecError for a bad pattern, DataError for a bad table.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "re":
        return _by_pattern(rest)
    if colon and kind == "file":
        return _by_table(Path(rest))
    if not text.strip():
        raise SpecError("--cluster is empty, wanted a field, re:PATTERN or file:MAP.csv")
    return lambda row, _item: name_of(_lookup(row, text.split(".")))


def _lookup(row: Any, keys: list[str]) -> Any:
    """Return row[a][b] for ``keys`` (a, b), or row["a.b"] if there is one; None if there is no such field."""
    if not keys:
        return row
    if not isinstance(row, Mapping):
        return None
    key = ".".join(keys)
    return row[key] if key in row else _lookup(row.get(keys[0]), keys[1:])


def _by_pattern(pattern: str) -> ClusterRule:
    try:
        regex = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SpecError(f"--cluster re:{pattern} is not a regular expression ({error})") from None

    def rule(_row: Mapping[str, Any], item: str) -> str | None:
        match = regex.search(item[:_MAX_NAME])
        return (match[1] if regex.groups else match[0]) or None if match else None

    return rule


def _by_table(path: Path) -> ClusterRule:
    check_readable(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            rows = list(csv.DictReader(handle, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"--cluster file:{path} cannot be read ({error})") from None
    if not rows or not {"item", "cluster"} <= set(rows[0]):
        raise DataError(f"--cluster file:{path} needs the columns item and cluster")
    table: dict[str, str] = {}
    # names of items are read without blanks around them, so the table's are too
    for item, cluster in ((row["item"].strip(), row["cluster"]) for row in rows if row["item"] and row["cluster"]):
        if table.setdefault(item, cluster) != cluster:
            raise DataError(
                f"--cluster file:{path} has item {clip(item, 80)!r} in two clusters, {clip(table[item], 80)!r} and "
                f"{clip(cluster, 80)!r}; keep one"
            )
    return lambda _row, item: table.get(item)


class SharedFields:
    """The fields in a file's rows that could name clusters, because several items have the same value in them."""

    def __init__(self, prefix: str = "", known: Iterable[str] = ()) -> None:
        """Take a ``prefix`` to put before the fields' names, and the ``known`` fields, which never name clusters."""
        self._prefix, self._known_fields = prefix, frozenset(known)
        self._items: set[str] = set()
        self._values: dict[str, dict[str, int]] = {}  # field -> item -> hash of its value

    def add(self, item: str, fields: Any, target: Any = None) -> None:
        """Add the fields of one row of an item; a field that equals the ``target`` answer is left out."""
        if not isinstance(fields, Mapping) or (len(self._items) >= _MAX_ITEMS and item not in self._items):
            return
        self._items.add(item)
        for column, value in fields.items():
            name = name_of(value)
            if name is not None and name != name_of(target) and column not in self._known_fields:
                self._values.setdefault(column, {})[item] = hash(name)

    def names(self) -> tuple[str, ...]:
        """Return the names of the fields that every item has and that could name clusters.

        A field could do so if it has at least ``_MIN_CLUSTERS`` different values, and each of them is shared by two
        items or more on average.
        """
        names = []
        for column, values in self._values.items():
            distinct = len(set(values.values()))
            is_printable = inline(clip(column, _MAX_FIELD)) == column
            if is_printable and len(values) == len(self._items) and _MIN_CLUSTERS <= distinct <= len(values) / 2:
                names.append(self._prefix + column)
        return tuple(names)
