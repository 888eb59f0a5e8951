"""What a reader of result files provides: rows of scores, what was kept out, and what must agree between two files.

A file goes to the one reader that recognises it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pandas as pd

from kvaudit.core.errors import DataError, OffScale
from kvaudit.core.plugins import Registry
from kvaudit.core.text import clip, inline, is_text

if TYPE_CHECKING:
    from kvaudit.reports.records.load import RunData

ONE_SUITE = ""  # of a file that holds one task and need not say which
ANY_METRIC = ""  # of a line that might have scored any of them
LONGEST_LINE = 64 * 2**20  # bytes
LARGEST_SEED = 2**62
_LINES_TO_LOOK_AT = 20
_LONGEST_METRIC = 120  # characters
_ROUNDING = 1e-9  # a mean of scores in [0, 1] may end so far outside
ClusterRule = Callable[[Mapping[str, Any], str], str | None]


class Row(NamedTuple):
    """One score of one answer. ``score`` is in [0, 1] with 1 as desired, NaN where there is none.

    ``sample`` numbers the repeats of an item; ``fingerprint`` is the same in two files when they asked the same.
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
    line: int = 0


@dataclass(frozen=True)
class Request:
    """What is asked of a file. ``cluster`` finds an item's cluster in the file's own row; None takes the file's.

    ``select`` narrows a file of several cells: arm, seed, policy, suite, context.
    """

    cluster: ClusterRule | None = None
    select: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OffScaleScores:
    """The scores of a metric that are outside [0, 1]: how many, from where to where, and where the first stands."""

    count: int
    low: float
    high: float
    first: str

    def refused(self, path: Path, metric: str) -> DataError:
        """What to say of a file with such scores: no margin in points means anything on their scale."""
        ends = "; a log-likelihood or a reward has no ends, score right or wrong instead" if self.low < 0 else ""
        return DataError(
            f"{path.name}: metric {metric} has {self.count} scores outside [0, 1], from {self.low:g} to {self.high:g} "
            f"(first {self.first}), wanted 1 as desired and 0 as not; rescale both files alike by the ends of the "
            f"scale, (score - lowest) / (highest - lowest), which is score / 100 for percent{ends}"
        )


@dataclass(frozen=True)
class Log:
    """A result file. ``rows`` has the columns of ``Row``; ``settings`` must agree between two compared files.

    Rows of our own records have the columns of their facets too (``rows.FACET_COLUMNS``).

    ``kept_out`` counts the answers among ``problems`` by metric, ``ANY_METRIC`` where the line does not say which.
    """

    path: Path
    reader: str
    rows: pd.DataFrame
    problems: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)  # shown, not compared
    unfinished: str = ""  # why the file does not hold all that it set out to
    duplicates: int = 0  # rows that stood twice and that reading has left out already
    kept_out: Mapping[str, int] = field(default_factory=dict)
    scales: Mapping[str, OffScaleScores] = field(default_factory=dict)  # of the metrics with scores outside [0, 1]
    prompts: Mapping[str, str] = field(default_factory=dict)  # what was asked -> sha256 of the rendered prompts
    notes: tuple[str, ...] = ()  # what has to be said of how it was read
    shared_fields: tuple[str, ...] = ()  # what could name clusters, as --cluster takes it; where the file names none
    run: RunData | None = None  # of the folder of a run: what of it was chosen
    select: Mapping[str, str] = field(default_factory=dict)

    @property
    def metrics(self) -> set[str]:
        """All that the file scores, those on another scale too."""
        return {*self.rows["metric"].unique(), *self.scales}


@dataclass
class Problems:
    """What is kept out while a file is read: a text for each, and how many by metric; scores on another scale."""

    texts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    scales: dict[str, OffScaleScores] = field(default_factory=dict)

    def add(self, text: str, metric: str = ANY_METRIC) -> None:
        """One answer that is kept out."""
        self.texts.append(text)
        self.counts[metric] += 1

    def outside(self, score: float, where: str, metric: str) -> None:
        """One score on another scale."""
        known = self.scales.get(metric, OffScaleScores(0, score, score, where))
        self.scales[metric] = OffScaleScores(known.count + 1, min(known.low, score), max(known.high, score), known.first)


class Reader:
    """A kind of result file: one file here, found by walking the folder."""

    name: ClassVar[str] = ""
    reads: ClassVar[str] = ""  # for people
    has_direction: ClassVar[bool] = False  # whether 1 is desired in every metric, by what the reader knows of it

    def recognises(self, path: Path) -> bool:
        """Whether the file looks like this kind; never raises for content."""
        raise NotImplementedError

    def read(self, path: Path, request: Request) -> Log:
        """Rows of the file. Raises DataError where nothing can be read, SpecError for a selection it does not know."""
        raise NotImplementedError


def log_of(reader: Reader, path: Path, rows: list[Row], problems: Problems, **parts: Any) -> Log:
    """A log from its rows; raises DataError where there is none, which names the scale or the first problem."""
    if not rows:
        for metric, scale in problems.scales.items():
            raise scale.refused(path, metric)
        first = f"; first problem: {problems.texts[0]}" if problems.texts else ""
        raise DataError(f"{str(path)!r} holds no row of a {reader.reads}{first}")
    frame = pd.DataFrame(rows, columns=list(Row._fields))
    texts, counts = tuple(problems.texts), dict(problems.counts)
    return Log(path, reader.name, frame, texts, kept_out=counts, scales=problems.scales, **parts)


def json_lines(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every line that is a JSON object, with its number from 1; the others are named in ``problems``."""
    with path.open("rb") as handle:
        # a longer line comes in pieces: several problems, not one object that fills the memory
        for number, raw in enumerate(iter(lambda: handle.readline(LONGEST_LINE), b""), start=1):
            if not raw.strip():
                continue
            value = json_object(raw)
            if value is not None:
                yield number, value
                continue
            half = "" if raw.endswith(b"\n") else "half-written last line, "
            problems.add(f"{path.name}:{number}: {half}not a JSON object")


def first_objects(path: Path) -> list[dict[str, Any]]:
    """The JSON objects among the first lines of a file, for recognition."""
    with path.open("rb") as handle:
        lines = islice(iter(lambda: handle.readline(LONGEST_LINE), b""), _LINES_TO_LOOK_AT)
        return [value for raw in lines if (value := json_object(raw)) is not None]


def json_object(raw: bytes) -> dict[str, Any] | None:
    """The object that a text of JSON is, None for anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def name_of(value: Any) -> str | None:
    """A text or whole number as text: what can name an item, a cluster or a suite."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    # Python raises for whole numbers of thousands of digits
    text = str(value).strip() if isinstance(value, str) else f"{value:d}" if abs(value) < LARGEST_SEED else ""
    return text if text and is_text(text) else None


def fingerprint_of(asked: Any) -> str:
    """The same for what was asked alike."""
    told = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def metric_name(text: str) -> str:
    """A metric's name as it may be printed: on one line, nothing in it obeyed by a terminal."""
    return inline(clip(text, _LONGEST_METRIC))


def score_of(value: Any) -> float:
    """A score as a float, NaN for none; raises OffScale for a number outside [0, 1], DataError for what is none."""
    if value is None:
        return math.nan
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        raise DataError(f"score {str(value)[:40]!r} is not a number")
    try:
        score = float(value)
    except OverflowError:  # a whole number beyond any float
        score = math.inf
    if math.isnan(score):
        return math.nan
    if math.isinf(score):
        raise DataError(f"score {str(value)[:40]} is not finite")
    if not -_ROUNDING <= score <= 1 + _ROUNDING:
        raise OffScale(score)
    return min(max(score, 0.0), 1.0)


def parse_number(text: str) -> float:
    """A score that a file holds as text; raises DataError for what is no number, or one to Python alone (1_0)."""
    try:
        if not text.isascii() or "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise DataError(f"score {text[:40]!r} is not a number") from None


@dataclass
class CollectedScores:
    """Scores by metric while a file is read; a metric without any number is left out."""

    problems: Problems
    rows: list[Row] = field(default_factory=list)
    _refused: list[tuple[str, str]] = field(default_factory=list)

    def add(self, row: Row, value: Any, where: str) -> None:
        """Add ``row`` with the score that ``value`` is, or remember that it is none."""
        try:
            self.rows.append(row._replace(score=score_of(value)))
        except OffScale as error:
            self.problems.outside(error.score, where, row.metric)
        except DataError as error:
            self._refused.append((row.metric, f"{where}: {row.metric}: {error}"))

    def report(self) -> None:
        """Add what was refused to the problems: of the metrics that have scores, or of all where none has any."""
        known = {row.metric for row in self.rows if not math.isnan(row.score)}
        for metric, text in self._refused:
            if not known or metric in known:
                self.problems.add(text, metric)


def repeat_of(value: Any) -> int | None:
    """A number of a repeat, None where it is not one."""
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_SEED
    return int(value) if whole else None


READERS: Registry[Reader] = Registry("reader", "kvaudit.reports.records.readers", Reader)


def read_log(path: Path, request: Request) -> Log:
    """The rows of a result file. Raises DataError for one that is missing, unreadable or of no known kind."""
    try:
        reader = _reader_of(path)
        if request.select and reader.name != "kvaudit":
            raise DataError(f"{str(path)!r} is a {reader.reads}; selectors choose cells of a kvaudit run only")
        return reader.read(path, request)
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror or error}); check the path") from None


_BY_ENDING = {
    ".xlsx": "a spreadsheet, which is not read; save it as CSV with the columns item and score",
    ".xls": "a spreadsheet, which is not read; save it as CSV with the columns item and score",
    ".parquet": "a table of Parquet, which is not read; write it as CSV with the columns item and score",
    ".gz": "compressed by gzip, which is not unpacked; run gunzip on it first",
    ".zst": "compressed by Zstandard, which is not unpacked; run unzstd on it first",
}
_LOOKED_AT = 4096  # bytes of the beginning of a file


def foreign_kind(path: Path) -> str:
    """What a file is that no reader knows, and the command or file that helps; empty where that is not known."""
    if path.is_dir():
        return ""
    if said := _BY_ENDING.get(path.suffix.lower()):
        return said
    with path.open("rb") as handle:
        start = handle.read(_LOOKED_AT)
    if start.lstrip().startswith(b"{") and b'"results"' in start and path.name.startswith("results"):
        return "lm-eval's summary, which holds no answers; give the samples_*.jsonl that --log_samples writes beside it"
    if start.lstrip().startswith(b"[") and b'"doc_id"' in start and b'"prompt_0"' in start:
        return (
            "what lm-eval wrote with --write_out before 0.4, which is not read; run the task again with --log_samples, "
            "or write its doc_id and metric as CSV with the columns item and score"
        )
    return ""


def _reader_of(path: Path) -> Reader:
    if not path.exists():
        raise DataError(f"{str(path)!r} does not exist; give a result file or the folder of a run")
    readers = [found() for found in READERS.all().values()]
    for reader in readers:
        if reader.recognises(path):
            return reader
    if what := foreign_kind(path):
        raise DataError(f"{str(path)!r} is {what}")
    known = "; ".join(reader.reads for reader in readers)
    raise DataError(f"{str(path)!r} is no result file that is known: {known}")
