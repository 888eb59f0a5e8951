"""Public rows and public-domain prose from the folder of public rows; nothing is downloaded or copied here.

It is the folder that KVAUDIT_DATA names, or, where that is not set, the one that ``kvaudit data fetch`` writes to.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.files import cache_home
from kvaudit.core.records import Message, Role
from kvaudit.core.text import guide
from kvaudit.suites.base import CountTokens
from kvaudit.suites.catalogue import find_rows_by_file

T = TypeVar("T")
_PAGE = guide("choose-suites.md")
DATA_VARIABLE = "KVAUDIT_DATA"
BOOKS = "long_text"
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_read_files: ContextVar[dict[str, str] | None] = ContextVar("read_files", default=None)


@contextmanager
def collect_file_hashes() -> Iterator[dict[str, str]]:
    """Collect the sha256 of every file whose rows or prose are asked for inside, by its path in the folder.

    The hash is of the bytes that this process parsed, at whatever time it read them.
    """
    found: dict[str, str] = {}
    token = _read_files.set(found)
    try:
        yield found
    finally:
        _read_files.reset(token)


@cache
def _parsed(path: Path, parse: Callable[[Path, bytes], T]) -> tuple[T, str]:
    raw = path.read_bytes()
    return parse(path, raw), hashlib.sha256(raw).hexdigest()


def _noted(path: Path, parse: Callable[[Path, bytes], T]) -> T:
    """What a file holds, which is read once; its hash is collected where somebody collects them."""
    held: T
    held, digest = _parsed(path, parse)
    found = _read_files.get()
    if found is not None:
        found[os.path.relpath(path, data_folder())] = digest
    return held


def data_folder() -> Path:
    """The folder of public rows: the one that KVAUDIT_DATA names, else that of the rows that were fetched."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named).expanduser() if named else cache_home() / "data"


def data_file(reader: str, name: str, kind: str = "suite") -> Path:
    """The file ``name`` in the folder of public rows; raises DataError, with what brings it, where it is missing."""
    path = data_folder() / name
    if path.exists():
        return path
    named, rows = os.environ.get(DATA_VARIABLE), find_rows_by_file(name)
    brings = f"{_PAGE} says whence" if rows is None else f"kvaudit data fetch {rows.name} brings it"
    if named:
        raise DataError(f"{kind} {reader} reads {name}, which {DATA_VARIABLE}={named} does not hold; {brings}")
    raise DataError(
        f"{kind} {reader} reads {name}, but {DATA_VARIABLE} is not set and {str(data_folder())!r} does not hold it; "
        f"{brings}, or set {DATA_VARIABLE} to a folder of public rows"
    )


def has_file(name: str) -> bool:
    """Whether the folder of public rows holds a file, for a suite that takes as many as there are."""
    return (data_folder() / name).exists()


def json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """The rows of a JSON Lines file; raises DataError with the line that cannot be read."""
    return _noted(path, _rows)


def texts(path: Path, number: int, row: Mapping[str, Any], *keys: str) -> list[str]:
    """The texts of a row under ``keys``; raises DataError with the file, the line ``number`` (from 1) and the key."""
    for key in keys:
        if not isinstance(row.get(key), str):
            raise DataError(f"{str(path)!r} line {number} holds no text under {key!r}")
    return [row[key] for key in keys]


def dialogue(path: Path, number: int, row: Mapping[str, Any], *, most: int | None = None) -> tuple[Message, ...]:
    """The ``messages`` of a row, from system to user; raises DataError with file and line where they are not that.

    ``most``: how many there may be.
    """
    try:
        found = tuple(Message(Role(said["role"]), str(said["content"])) for said in row["messages"])
        fitting = [found[0].role, found[-1].role] == [Role.SYSTEM, Role.USER] and len(found) <= (most or len(found))
    except (KeyError, TypeError, ValueError, IndexError):
        fitting = False
    if not fitting:
        raise DataError(
            f"{str(path)!r} line {number} holds no messages from system to user{f', {most} at most' if most else ''}"
        )
    return found


def _rows(path: Path, raw: bytes) -> tuple[dict[str, Any], ...]:
    rows = []
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also what is not UTF-8
            raise DataError(f"{str(path)!r} line {number} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{str(path)!r} line {number} holds a {type(row).__name__}, wanted an object")
        rows.append(row)
    return tuple(rows)


def json_array(path: Path) -> tuple[dict[str, Any], ...]:
    """The objects of a file that is one JSON array; raises DataError with the number of what is none, from 1."""
    return _noted(path, _array)


def _array(path: Path, raw: bytes) -> tuple[dict[str, Any], ...]:
    try:
        rows = json.loads(raw)
    except (ValueError, RecursionError) as error:  # a JSON error names its line
        raise DataError(f"{str(path)!r} is not JSON ({error})") from None
    if not isinstance(rows, list):
        raise DataError(f"{str(path)!r} holds a {type(rows).__name__}, wanted an array of objects")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{str(path)!r} entry {number} holds a {type(row).__name__}, wanted an object")
    return tuple(rows)


def value_of(path: Path, number: int, row: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """``row[key]``, which must be a ``kind``; raises DataError that names the file and the row, counted from 1."""
    value = row.get(key)
    if not isinstance(value, kind):
        raise DataError(
            f"{str(path)!r} row {number} holds {key!r} as {type(value).__name__}, wanted {kind.__name__}; "
            f"{_PAGE} says whence the file comes"
        )
    return value


def rows_of(path: Path, number: int, row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """``row[key]``, which must be a list of objects; raises DataError as ``value_of`` does."""
    rows = value_of(path, number, row, key, list)
    if not all(isinstance(part, dict) for part in rows):
        raise DataError(f"{str(path)!r} row {number} holds {key!r} with something else than objects in it")
    return rows


def csv_rows(
    path: Path, columns: Sequence[str], known: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> tuple[dict[str, str], ...]:
    """The rows of a CSV file with a header that holds ``columns``; lines of ``#`` may stand before the header.

    Raises DataError that names the line that cannot be read or holds what is not ``known`` of its column, or the column
    that is missing.
    """
    table = _noted(path, _table)
    held = list(table[0][1]) if table else []
    for column in columns:
        if column not in held:
            raise DataError(f"{str(path)!r} lacks a column {column!r}; it holds {', '.join(held) or 'no rows'}")
    for line, row in table:
        for column, values in known.items():
            if row[column] not in values:
                raise DataError(
                    f"{str(path)!r} line {line} holds {column} {row[column][:40]!r}, wanted {' or '.join(values)}"
                )
    return tuple(row for _, row in table)


def _table(path: Path, raw: bytes) -> tuple[tuple[int, dict[str, str]], ...]:
    """Each row with the line that it ends on."""
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
        line = comments + reader.line_num + isinstance(error, UnicodeDecodeError)  # which fails before it is counted
        raise DataError(f"{str(path)!r} line {line} is no row of a CSV file ({error})") from None
    return tuple(rows)


def fit_prose(
    suite: str,
    build: Callable[[str], Sequence[str]],
    draw: random.Random,
    context_tokens: int,
    count_tokens: CountTokens,
) -> list[str]:
    """The texts that ``build(prose)`` gives when a passage of a drawn book makes them take ``context_tokens``.

    Never longer than asked, shorter by less than about a sentence. Raises SpecError when the texts alone are too long.
    """

    def total(prose: str) -> int:
        return sum(count_tokens(text) for text in build(prose))

    bare = total("")
    if bare > context_tokens:
        raise SpecError(f"suite {suite}: context_tokens {context_tokens} is too short, an item alone takes {bare}")
    taken, room = list[str](), context_tokens - bare
    for sentence in book_sentences(suite, draw):
        if (cost := count_tokens(sentence)) > room:
            break
        taken.append(sentence)
        room -= cost
    # joined, sentences may take more tokens than one by one
    while total("".join(taken).strip()) > context_tokens:
        taken = taken[:-1]
    return list(build("".join(taken).strip()))


def book_sentences(suite: str, draw: random.Random) -> Iterator[str]:
    """The sentences from a drawn place of a drawn book on, without end; each with the space or line break behind it."""
    books = _books(suite)
    book = draw.randrange(len(books))
    position = draw.randrange(max(1, len(books[book])))
    while True:
        yield from books[book][position:]
        book, position = (book + 1) % len(books), 0


def _books(suite: str) -> list[tuple[str, ...]]:
    """The sentences of every book; raises DataError where there is none."""
    # all of them, since how many there are decides which one is drawn
    files = sorted(path for path in data_file(suite, BOOKS).rglob("*.txt") if path.name[0] != ".")
    books = [_noted(path, _sentences) for path in files]
    if not any(books):
        raise DataError(f"suite {suite}: {str(data_folder())!r} holds no prose in {BOOKS}/*.txt")
    return books


def _sentences(_: Path, raw: bytes) -> tuple[str, ...]:
    """Sentences of a book, each with the space or line break that follows it."""
    found = []
    text = raw.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    for paragraph in _PARAGRAPH.split(text):
        parts = _SENTENCE.split(" ".join(paragraph.split()))
        found += [part + (" " if n + 1 < len(parts) else "\n\n") for n, part in enumerate(parts) if part]
    return tuple(found)
