"""Readers for the data folder: rows of public benchmarks and public-domain prose. Nothing is downloaded here.

The folder is KVAUDIT_DATA or, if that is not set, the one that ``kvaudit data fetch`` writes to. ``catalogue.yaml`` has
the URL of each file, pinned to a commit, its licence, and the digest of the rows that suites read.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import quote

import yaml

from kvaudit.core.errors import DataError, UnknownName
from kvaudit.core.files import cache_home
from kvaudit.core.records import Message, Role
from kvaudit.core.text import guide_path
from kvaudit.suites.base import CountTokens
from kvaudit.suites.haystack import check_room

ADDRESS = "https://raw.githubusercontent.com"


class PublicFile(NamedTuple):
    """A file of the data folder, as the catalogue describes it.

    ``path`` is its place in the data folder. ``first`` is the number of lines to keep from its beginning, None for all.
    ``git_blob`` is git's id of the whole file, for files without a known sha256.
    """

    path: str
    upstream: str  # its path in the repository
    sha256: str = ""
    first: int | None = None
    git_blob: str = ""

    def mismatch(self, rows: bytes) -> str:
        """Return "" if the bytes ``rows`` have the catalogue's digest, else a text: "sha256 1a2b, expected 3c4d"."""
        algorithm, expected, digest = "sha256", self.sha256, hashlib.sha256(rows)
        if self.git_blob:
            algorithm, expected = "git blob id", self.git_blob
            digest = hashlib.sha1(b"blob %d\0%s" % (len(rows), rows), usedforsecurity=False)
        actual = digest.hexdigest()
        return "" if actual == expected else f"{algorithm} {actual[:12]}, expected {expected[:12]}"


@dataclass(frozen=True)
class PublicRows:
    """An entry of the catalogue: files that are fetched together, and the ``suites`` that read them.

    ``rows`` says in words how many rows there are.
    """

    name: str
    suites: tuple[str, ...]
    rows: str
    licence: str
    repo: str
    commit: str
    files: tuple[PublicFile, ...]

    @property
    def source_url(self) -> str:
        """The repository's address with its abbreviated commit: github.com/OWNER/NAME@1234567."""
        return f"github.com/{self.repo}@{self.commit[:7]}"

    def address(self, file: PublicFile, base: str = ADDRESS) -> str:
        """Return the URL of a file; ``base`` may be a mirror with the same paths."""
        return f"{base.rstrip('/')}/{self.repo}/{self.commit}/{quote(file.upstream)}"

    def missing_files(self, folder: Path) -> list[PublicFile]:
        """Return the files that are missing in ``folder``."""
        return [file for file in self.files if not (folder / file.path).is_file()]

    def changed_files(self, folder: Path) -> list[PublicFile]:
        """Return the files in ``folder`` whose digest differs from the catalogue's."""
        present = [file for file in self.files if (folder / file.path).is_file()]
        return [file for file in present if file.mismatch((folder / file.path).read_bytes())]


@cache
def catalogue() -> tuple[PublicRows, ...]:
    """Return all entries of ``catalogue.yaml``, in the order of the file."""
    table = yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8"))
    for row in table.values():
        row["suites"] = tuple(row["suites"])
        row["files"] = tuple(PublicFile(path, **fields) for path, fields in row["files"].items())
    return tuple(PublicRows(name, **row) for name, row in table.items())


def check_rows(file: PublicFile, raw: bytes) -> bytes:
    """Return the part of a downloaded file that suites read; raises DataError if its digest is not the catalogue's."""
    rows = raw if file.first is None else b"".join(raw.splitlines(keepends=True)[: file.first])
    if mismatch := file.mismatch(rows):
        raise DataError(
            f"the download of {file.path} has {mismatch}: it is a different file, was cut off or changed on the way; "
            "nothing of it is kept"
        )
    return rows


def find_rows(name: str) -> PublicRows:
    """Return the entry of the catalogue that is called ``name``; raises UnknownName."""
    entries = {entry.name: entry for entry in catalogue()}
    if name not in entries:
        raise UnknownName("public rows", name, entries)
    return entries[name]


def find_rows_by_file(path: str) -> PublicRows | None:
    """Return the catalogue entry with the file at ``path`` in the data folder; None if it cannot be fetched."""
    return next((entry for entry in catalogue() if any(file.path == path for file in entry.files)), None)


P = ParamSpec("P")
T = TypeVar("T")
_GUIDE = guide_path("choose-suites.md")
DATA_VARIABLE = "KVAUDIT_DATA"
BOOKS = "long_text"
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_file_hashes: ContextVar[dict[str, str] | None] = ContextVar("file_hashes", default=None)


@contextmanager
def collect_file_hashes() -> Iterator[dict[str, str]]:
    """Collect, in a dict, {path in the data folder: sha256} of every data file that is read inside the context.

    A file is parsed once per process, and its hash is that of the bytes that were parsed.
    """
    hashes: dict[str, str] = {}
    token = _file_hashes.set(hashes)
    try:
        yield hashes
    finally:
        _file_hashes.reset(token)


def cache_rows(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: cache, for this process, the results of a function that reads data files; its arguments are hashable.

    Every call, cached or not, reports the hashes of these files to ``collect_file_hashes``. A second run in a process
    therefore records, too, which files its questions were made of.
    """

    @cache
    def first_call(*args: P.args, **kwargs: P.kwargs) -> tuple[T, dict[str, str]]:
        with collect_file_hashes() as hashes:
            return function(*args, **kwargs), hashes

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        content, hashes = first_call(*args, **kwargs)  # type: ignore[arg-type]  # hashable, as the docstring wants
        _report(hashes)
        return content

    return call


def _report(read: Mapping[str, str]) -> None:
    """Add hashes of files to those that ``collect_file_hashes`` collects; do nothing outside of its context."""
    hashes = _file_hashes.get()
    if hashes is not None:
        hashes.update(read)


@cache
def _parse_once(path: Path, parse: Callable[[Path, bytes], T]) -> tuple[T, str]:
    raw = path.read_bytes()
    return parse(path, raw), hashlib.sha256(raw).hexdigest()


def _read(path: Path, parse: Callable[[Path, bytes], T]) -> T:
    """Return the result of ``parse(path, bytes of the file)``, cached; report the hash to ``collect_file_hashes``."""
    content: T
    content, digest = _parse_once(path, parse)
    _report({os.path.relpath(path, data_folder()): digest})
    return content


def data_folder() -> Path:
    """Return the data folder: KVAUDIT_DATA, or the folder of fetched rows if that is not set."""
    folder = os.environ.get(DATA_VARIABLE)
    return Path(folder).expanduser() if folder else cache_home() / "data"


def data_file(reader: str, name: str, kind: str = "suite") -> Path:
    """Return the path of ``name`` in the data folder; if it is missing, raise DataError that says how to get it.

    ``reader`` and ``kind`` say in the message what reads the file, such as "suite xstest".
    """
    path = data_folder() / name
    if path.exists():
        return path
    folder, rows = os.environ.get(DATA_VARIABLE), find_rows_by_file(name)
    advice = f"see {_GUIDE} for its source" if rows is None else f"fetch it with: kvaudit data fetch {rows.name}"
    if folder:
        raise DataError(f"{kind} {reader} needs {name}, which is missing in {DATA_VARIABLE}={folder}; {advice}")
    raise DataError(
        f"{kind} {reader} needs {name}, which is missing in {str(data_folder())!r}, and {DATA_VARIABLE} is not set; "
        f"set it to your folder of public rows, or {advice}"
    )


def has_file(name: str) -> bool:
    """Return whether the data folder has the file ``name``, for suites that do not need all of their files."""
    return (data_folder() / name).exists()


def json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the objects of a JSON Lines file; raises DataError that names a bad line."""
    return _read(path, _objects)


def json_line_lists(path: Path) -> tuple[list[Any], ...]:
    """Read the arrays of a JSON Lines file; raises DataError that names a bad line."""
    return _read(path, _lists)


def dialogue(path: Path, number: int, row: Mapping[str, Any], *, most: int | None = None) -> tuple[Message, ...]:
    """Return the ``messages`` of a row, of which the first must be the system's and the last the user's.

    Raises DataError, which names file and line, if they are not or if there are more than ``most`` messages.
    """
    try:
        messages = tuple(Message(Role(entry["role"]), str(entry["content"])) for entry in row["messages"])
        is_valid = [messages[0].role, messages[-1].role] == [Role.SYSTEM, Role.USER]
        is_valid = is_valid and (most is None or len(messages) <= most)
    except (KeyError, TypeError, ValueError, IndexError):
        is_valid = False
    if not is_valid:
        limit = f", {most} at most" if most else ""
        raise DataError(f"{str(path)!r} line {number} holds no messages from system to user{limit}")
    return messages


def _objects(path: Path, raw: bytes) -> tuple[dict[str, Any], ...]:
    return _lines_of(path, raw, dict)


def _lists(path: Path, raw: bytes) -> tuple[list[Any], ...]:
    return _lines_of(path, raw, list)


def _lines_of(path: Path, raw: bytes, kind: type[T]) -> tuple[T, ...]:
    lines = enumerate(raw.splitlines(), start=1)
    return tuple(_json_value(f"{str(path)!r} line {number}", line, kind) for number, line in lines)


def _json_value(place: str, raw: bytes, kind: type[T], expected: str = "") -> T:
    """Return the JSON value in ``raw``; raises DataError that begins with ``place`` if it is not of type ``kind``."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise DataError(f"{place} is not JSON ({error})") from None
    if not isinstance(value, kind):
        expected = expected or ("an object" if kind is dict else "an array")
        raise DataError(f"{place} holds a {type(value).__name__}, expected {expected}")
    return value


def json_array(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the objects of a file that is one JSON array; raises DataError that numbers a bad entry from 1."""
    return _read(path, _array)


def _array(path: Path, raw: bytes) -> tuple[dict[str, Any], ...]:
    rows = _json_value(repr(str(path)), raw, list, "an array of objects")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{str(path)!r} entry {number} holds a {type(row).__name__}, expected an object")
    return tuple(rows)


def json_object(path: Path) -> dict[str, Any]:
    """Read a file that is one JSON object; raises DataError for anything else."""
    return _read(path, _object)


def _object(path: Path, raw: bytes) -> dict[str, Any]:
    return _json_value(repr(str(path)), raw, dict)


def value_of(path: Path, number: int, row: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """Return ``row[key]``; raises DataError that names file and row (from 1) if it is not of type ``kind``."""
    value = row.get(key)
    if not isinstance(value, kind):
        raise DataError(
            f"{str(path)!r} row {number} holds {key!r} as {type(value).__name__}, expected {kind.__name__}; "
            f"see {_GUIDE} for the source of the file"
        )
    return value


def rows_of(path: Path, number: int, row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return ``row[key]``, a list of objects; raises DataError, as ``value_of`` does, if it is something else."""
    rows = value_of(path, number, row, key, list)
    if not all(isinstance(entry, dict) for entry in rows):
        raise DataError(f"{str(path)!r} row {number} holds {key!r} with entries that are no objects")
    return rows


def csv_rows(
    path: Path, columns: Sequence[str], allowed: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> tuple[dict[str, str], ...]:
    """Read a CSV file whose header has all ``columns``; lines that begin with # may precede the header.

    ``allowed`` lists the valid values of some columns. Raises DataError that names the bad line or missing column.
    """
    table = _read(path, _table)
    header = list(table[0][1]) if table else []
    for column in columns:
        if column not in header:
            raise DataError(f"{str(path)!r} has no column {column!r}; it has {', '.join(header) or 'no rows'}")
    for line, row in table:
        for column, values in allowed.items():
            if row[column] not in values:
                value, choice = row[column][:40], " or ".join(values)
                raise DataError(f"{str(path)!r} line {line} holds {column} {value!r}, expected {choice}")
    return tuple(row for _, row in table)


def _table(path: Path, raw: bytes) -> tuple[tuple[int, dict[str, str]], ...]:
    """Return the rows of a CSV file, {column: cell}, each with the number of its last line; raises DataError."""
    header, rows = list[str](), list[tuple[int, dict[str, str]]]()
    lines = raw.splitlines(keepends=True)
    comments = next((n for n, line in enumerate(lines) if not line.startswith(b"#")), len(lines))
    reader = csv.reader((line.decode("utf-8") for line in lines[comments:]), strict=True)
    try:
        for cells in filter(None, reader):
            if header and len(cells) != len(header):
                raise csv.Error(f"{len(cells)} cells under a header of {len(header)}")
            rows += [(comments + reader.line_num, dict(zip(header, cells, strict=True)))] if header else []
            header = header or cells
    except (csv.Error, UnicodeDecodeError) as error:
        # the reader counts a line only after it was decoded
        line = comments + reader.line_num + isinstance(error, UnicodeDecodeError)
        raise DataError(f"{str(path)!r} line {line} is not a valid CSV row ({error})") from None
    return tuple(rows)


def fit_prose(
    suite: str,
    build: Callable[[str], Sequence[str]],
    draw: random.Random,
    context_tokens: int,
    count_tokens: CountTokens,
    most_words: float = math.inf,
) -> list[str]:
    """Return ``build(prose)``, the texts of an item, with a passage of a random book of fitting length as the prose.

    The texts have at most ``context_tokens`` tokens in all. They fall short by at most about a sentence, or by more if
    the passage reaches ``most_words`` words first. Raises SpecError if ``build("")`` already has more tokens.
    """

    def total(prose: str) -> int:
        return sum(count_tokens(text) for text in build(prose))

    room = check_room(total(""), context_tokens)
    sentences = list[str]()
    for sentence in book_sentences(suite, draw):
        if (cost := count_tokens(sentence)) > room or (words := len(sentence.split())) > most_words:
            break
        sentences.append(sentence)
        room, most_words = room - cost, most_words - words
    # joined sentences may take more tokens than the sum of their counts
    while total("".join(sentences).strip()) > context_tokens:
        sentences = sentences[:-1]
    return list(build("".join(sentences).strip()))


def book_sentences(suite: str, draw: random.Random) -> Iterator[str]:
    """Yield the sentences of a random book from a random place on, then those of the next books, without end.

    A sentence includes the white space after it. ``suite`` is the suite that errors name.
    """
    books = _books(suite)
    book = draw.randrange(len(books))
    position = draw.randrange(max(1, len(books[book])))
    while True:
        yield from books[book][position:]
        book, position = (book + 1) % len(books), 0


def _books(suite: str) -> list[tuple[str, ...]]:
    # every book is read, since the number of books decides which one is drawn
    files = sorted(path for path in data_file(suite, BOOKS).rglob("*.txt") if path.name[0] != ".")
    books = [_read(path, _sentences) for path in files]
    if not any(books):
        raise DataError(f"suite {suite}: {str(data_folder())!r} holds no prose in {BOOKS}/*.txt")
    return books


def _sentences(_: Path, raw: bytes) -> tuple[str, ...]:
    sentences = []
    text = raw.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    for paragraph in _PARAGRAPH.split(text):
        parts = _SENTENCE.split(" ".join(paragraph.split()))
        sentences += [part + (" " if n + 1 < len(parts) else "\n\n") for n, part in enumerate(parts) if part]
    return tuple(sentences)
