"""Every reader of result files keeps its promises, and each test of the contract fails one that is wrong in one way.

A new file of ``reports/records/readers`` is found by itself, and so is its example: the smallest file under
``tests/fixtures/logs`` that it recognises, written by the tool itself.
"""

from __future__ import annotations

import inspect
import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz import LOGS, mutant

from kvaudit.core.errors import AuditError, DataError
from kvaudit.reports.records.readers.base import READERS, Log, Reader, Request, Row, read_log
from kvaudit.reports.records.readers.table import CsvTable

FOUND = [found() for found in READERS.all().values()]
FILES = sorted((path for path in LOGS.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
HELD = pytest.mark.parametrize("reader", FOUND, ids=list(READERS.all()))
KEY = ["item", "metric", "sample", "suite", "context", "seed"]  # two rows that share it stand twice
NO_LOGS = (
    *(b"", b"\n", b"hello\n", b"\x00\x01\x02\xff", b"[1]\n", b"{}\n", b"null\n", b"[" * 5000, b'{"a":' * 5000),
    *(b"\xef\xbb\xbf", b"\xff\xfe\x00", b'{"a": "\\ud800"}\n', b"PK\x03\x04junk", b"PK\x05\x06" + bytes(18)),
    *(b"item,scores\na,1\n", b"'\"\r\n", b"x" * 100_000),
)
DAMAGED = 40  # here; tests/fuzz.py damages as many as it is asked to


def example(reader: Reader) -> Path:
    """A log of the reader's own tool."""
    own = next((path for path in FILES if reader.recognises(path)), None)
    assert own is not None, f"put a log that {reader.reads} is, as its tool writes it, into tests/fixtures/logs"
    return own


def rows_of(log: Log) -> Log:
    """The log, once its rows are what every reader's are."""
    rows = log.rows
    assert list(rows.columns) == list(Row._fields)
    assert rows["score"].dropna().between(0, 1).all()
    assert all(isinstance(value, str) and value for value in [*rows["item"], *rows["metric"]])
    assert (rows[["sample", "context", "seed", "line"]] >= 0).all(axis=None)
    return log


def tried(reader: Reader, path: Path) -> Log | None:
    """What comes of a file that may be no log: its rows, or one line for its owner."""
    try:
        return rows_of(reader.read(path, Request())) if reader.recognises(path) else None
    except AuditError as error:
        said = str(error)
    assert said.strip()
    assert "\n" not in said
    return None


def changed(reader: Reader, folder: Path, body: bytes) -> Path:
    """Another body in a file named as the example is, so that it is recognised by its name where that counts."""
    path = folder / example(reader).name
    path.write_bytes(body)
    return path


def is_document(body: bytes) -> bool:
    """Whether a log is one JSON value, so that its last line is no row."""
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


# --- what a reader owes --------------------------------------------------------------------------------------------


@HELD
def test_a_log_of_its_tool_is_read_whole(reader: Reader) -> None:
    log = rows_of(reader.read(example(reader), Request()))
    assert len(log.rows) > 0
    assert (log.problems, log.unfinished, log.duplicates) == ((), "", 0)
    assert log.rows["score"].notna().mean() > 0.5


@HELD
def test_a_reader_says_what_it_reads(reader: Reader) -> None:
    assert reader.name == reader.read(example(reader), Request()).reader
    assert reader.reads.strip()


@HELD
def test_the_log_of_another_tool_is_not_recognised(reader: Reader) -> None:
    others = [path for path in FILES if any(r.recognises(path) for r in FOUND if r.name != reader.name)]
    assert others
    assert [path.name for path in others if reader.recognises(path)] == []


@HELD
@pytest.mark.parametrize("body", NO_LOGS, ids=range(len(NO_LOGS)))
def test_what_is_no_log_is_not_recognised_and_nothing_is_raised(reader: Reader, body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(body)
    assert reader.recognises(path) is False
    assert reader.recognises(tmp_path) is False


@HELD
def test_half_a_line_is_refused_or_named(reader: Reader, tmp_path: Path) -> None:
    whole = example(reader).read_bytes()
    last = len(whole) // 2 if is_document(whole) else whole.rstrip(b"\n").rfind(b"\n") + 1
    log = tried(reader, changed(reader, tmp_path, whole[: last + 1]))
    if log is not None:
        assert len(log.rows) < len(reader.read(example(reader), Request()).rows)
        assert log.problems or log.unfinished


@HELD
def test_a_line_alone_is_refused_or_read(reader: Reader, tmp_path: Path) -> None:
    whole = example(reader).read_bytes()
    tried(reader, changed(reader, tmp_path, whole[: whole.find(b"\n") + 1]))


@HELD
def test_a_damaged_log_is_refused_in_a_line_or_read(reader: Reader, tmp_path: Path) -> None:
    whole, draw = example(reader).read_bytes(), random.Random(1)
    for _ in range(DAMAGED):
        tried(reader, changed(reader, tmp_path, mutant(whole, draw)))


@HELD
def test_a_row_that_stands_twice_is_no_new_answer(reader: Reader, tmp_path: Path) -> None:
    whole = example(reader)
    path = changed(reader, tmp_path, whole.read_bytes())
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path, "a") as file:
            last = [name for name in file.namelist() if "sample" in name][-1]
            body = file.read(last)
            with pytest.warns(UserWarning, match="Duplicate name"):
                file.writestr(last, body)
    elif is_document(whole.read_bytes()):  # a copy beside it, in a folder of logs
        (tmp_path / "copy.json").write_bytes(whole.read_bytes())
        path = tmp_path
    else:
        path.write_bytes(whole.read_bytes() + whole.read_bytes().splitlines(keepends=True)[-1])
    once, twice = (reader.read(log, Request()).rows[KEY] for log in (whole, path))
    assert set(twice.itertuples(index=False)) == set(once.itertuples(index=False))


@HELD
def test_the_cluster_that_is_asked_for_is_the_one_it_gives(reader: Reader) -> None:
    rows = reader.read(example(reader), Request(cluster=lambda row, item: f"of {item}")).rows
    assert list(rows["cluster"]) == [f"of {item}" for item in rows["item"]]


@HELD
def test_the_same_log_gives_the_same_rows(reader: Reader) -> None:
    one, two = (reader.read(example(reader), Request()).rows for _ in range(2))
    assert one.equals(two)


def test_a_file_of_no_kind_is_one_line_that_names_every_kind(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"hello\n")
    with pytest.raises(DataError) as caught:
        read_log(tmp_path / "f", Request())
    assert "\n" not in str(caught.value)
    assert [reader.name for reader in FOUND if reader.reads not in str(caught.value)] == []


# --- readers that are wrong in one way -----------------------------------------------------------------------------


class Changed(CsvTable):
    """The reader of tables with what it gives changed; subclasses say how."""

    def read(self, path: Path, request: Request) -> Log:
        return self.change(super().read(path, request))

    def change(self, log: Log) -> Log:
        return log


class Nameless(Changed):
    reads = " "


class CallsItselfAnother(Changed):
    def change(self, log: Log) -> Log:
        return replace(log, reader="another")


class KeyErrorOnHalfALine(CsvTable):
    def read(self, path: Path, request: Request) -> Log:
        header, *lines = path.read_text().splitlines()
        for line in lines:
            dict(zip(header.split(","), line.split(","), strict=False))["score"]
        return super().read(path, request)


class SilentOnHalfALine(Changed):
    def change(self, log: Log) -> Log:
        return replace(log, problems=())


class TwoLines(CsvTable):
    def read(self, path: Path, request: Request) -> Log:
        try:
            return super().read(path, request)
        except DataError as error:
            raise DataError(f"{error}\nand more") from None


class CountsDuplicatesTwice(Changed):
    def change(self, log: Log) -> Log:
        return replace(log, rows=log.rows.assign(sample=log.rows.groupby("item").cumcount()))


class OtherColumns(Changed):
    def change(self, log: Log) -> Log:
        return replace(log, rows=log.rows.drop(columns="fingerprint"))


class Percent(Changed):
    def change(self, log: Log) -> Log:
        return replace(log, rows=log.rows.assign(score=100 * log.rows["score"]))


class NothingScored(Changed):
    def change(self, log: Log) -> Log:
        return replace(log, rows=log.rows.assign(score=float("nan")))


class ReadsAnything(CsvTable):
    def recognises(self, path: Path) -> bool:
        return not path.is_dir()


class RaisesForContent(CsvTable):
    def recognises(self, path: Path) -> bool:
        return super().recognises(path) and bool(path.read_text()) if path.is_file() and path.read_text() else False


class WithoutExample(CsvTable):
    def recognises(self, path: Path) -> bool:
        return False


class OwnClusters(CsvTable):
    def read(self, path: Path, request: Request) -> Log:
        return super().read(path, Request())


class Turned(Changed):
    turns = 0

    def change(self, log: Log) -> Log:
        self.turns += 1
        return replace(log, rows=log.rows[:: (-1) ** self.turns].reset_index(drop=True))


Check = Callable[..., None]
WRONG: list[tuple[Check, type[CsvTable]]] = [
    (test_a_log_of_its_tool_is_read_whole, OtherColumns),
    (test_a_log_of_its_tool_is_read_whole, Percent),
    (test_a_log_of_its_tool_is_read_whole, NothingScored),
    (test_a_log_of_its_tool_is_read_whole, WithoutExample),
    (test_a_reader_says_what_it_reads, Nameless),
    (test_a_reader_says_what_it_reads, CallsItselfAnother),
    (test_the_log_of_another_tool_is_not_recognised, ReadsAnything),
    (test_what_is_no_log_is_not_recognised_and_nothing_is_raised, ReadsAnything),
    (test_what_is_no_log_is_not_recognised_and_nothing_is_raised, RaisesForContent),
    (test_half_a_line_is_refused_or_named, KeyErrorOnHalfALine),
    (test_half_a_line_is_refused_or_named, SilentOnHalfALine),
    (test_a_line_alone_is_refused_or_read, TwoLines),
    (test_a_damaged_log_is_refused_in_a_line_or_read, KeyErrorOnHalfALine),
    (test_a_row_that_stands_twice_is_no_new_answer, CountsDuplicatesTwice),
    (test_the_cluster_that_is_asked_for_is_the_one_it_gives, OwnClusters),
    (test_the_same_log_gives_the_same_rows, Turned),
]


@pytest.mark.parametrize(("check", "wrong"), WRONG, ids=lambda value: value.__name__)
def test_a_wrong_reader_fails_the_test_that_it_breaks(check: Check, wrong: type[CsvTable], tmp_path: Path) -> None:
    given: dict[str, Any] = {"reader": wrong(), "tmp_path": tmp_path, "body": b"\x00\x01\x02\xff"}
    with pytest.raises((AssertionError, KeyError, UnicodeDecodeError)):
        check(**{name: given[name] for name in inspect.signature(check).parameters})


def test_every_promise_has_a_wrong_reader_that_breaks_it() -> None:
    checks = [check for name, check in globals().items() if name.startswith("test_")]
    promises = {check.__name__ for check in checks if "reader" in inspect.signature(check).parameters}
    assert promises == {check.__name__ for check, _ in WRONG}
