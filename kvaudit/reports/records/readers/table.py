"""CSV files with the columns item and score, and optionally cluster, sample, suite, seed and metric.

Column names may be upper or lower case. Fields are separated by commas, semicolons, tabs or bars, in UTF-8 or UTF-16;
without commas as separators a score may have a decimal comma.
"""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvaudit.core.errors import DataError, OffScale
from kvaudit.reports.records.readers.base import (
    ONE_SUITE,
    Log,
    Problems,
    Reader,
    Request,
    Row,
    SharedFields,
    log_of,
    metric_name,
    name_of,
    parse_number,
    repeat_of,
    score_of,
)

NEEDED = ("item", "score")
SAMPLES = ("sample", "epoch", "repeat")
KNOWN = (*NEEDED, *SAMPLES, "cluster", "suite", "seed", "metric")
UNSCORED = ("", "na", "n/a", "nan", "none", "null")  # no score was given
_SEPARATORS = (",", ";", "\t", "|")
_DECIMAL_COMMA = re.compile(r"^\s*([+-]?\d*),(\d+)\s*$")
_MAX_HEADER = 65536  # characters


class CsvTable(Reader):
    """A comma-separated table, one row per answer."""

    name = "csv"
    reads = "CSV with the columns item and score"

    def recognises(self, path: Path) -> bool:
        """Return whether the first line names the columns."""
        if path.is_dir():
            return False
        try:
            with path.open(newline="", encoding=_encoding(path)) as handle:
                return _separator(handle.readline(_MAX_HEADER)) is not None
        except (UnicodeError, csv.Error):
            return False

    def read(self, path: Path, request: Request) -> Log:
        """Return the rows of the table; an invalid row is reported and skipped."""
        problems, shared = Problems(), SharedFields(known=KNOWN)
        try:
            rows = list(self._rows(path, request, problems, shared))
        except (UnicodeError, csv.Error) as error:
            raise DataError(
                f"{str(path)!r} cannot be read as CSV ({error}); save it as UTF-8, with every quote of a field doubled"
            ) from None
        return log_of(self, path, rows, problems, shared_fields=shared.names())

    @staticmethod
    def _rows(path: Path, request: Request, problems: Problems, shared: SharedFields) -> Iterator[Row]:
        with path.open(newline="", encoding=_encoding(path)) as handle:
            separator = _separator(handle.readline(_MAX_HEADER)) or ","
            handle.seek(0)
            # strict: otherwise an unclosed quote makes the rest of the file one field
            reader = csv.reader(handle, delimiter=separator, strict=True)
            header = [_column_name(name) for name in next(reader)]
            duplicates = sorted({name for name in header if name and header.count(name) > 1})
            if duplicates:
                names = ", ".join(map(repr, duplicates))
                raise DataError(f"{str(path)!r} has several columns {names}; keep one of each")
            for fields in reader:
                if not fields:
                    continue
                row = dict(zip(header, fields, strict=False))
                if len(fields) != len(header):
                    problems.add(f"{path.name}:{reader.line_num}: {len(fields)} fields, the header has {len(header)}")
                    continue
                place = f"{path.name}:{reader.line_num}"
                shared.add(row["item"].strip(), row)
                if separator != ",":
                    row["score"] = _DECIMAL_COMMA.sub(r"\1.\2", row["score"])
                try:
                    yield _row(row, request, reader.line_num)
                except OffScale as error:
                    problems.add_off_scale(error.score, place, _metric(row))
                except DataError as error:
                    problems.add(f"{place}: {error}", _metric(row))


def _encoding(path: Path) -> str:
    """Return the name of a file's encoding: UTF-16 if a byte order mark or zero bytes show it, else UTF-8."""
    with path.open("rb") as handle:
        first = handle.read(64)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = [first[start::2].count(0) for start in (0, 1)]
    if len(first) > 8 and max(zeros) > len(first) / 4 and min(zeros) == 0:
        return "utf-16-be" if zeros[0] else "utf-16-le"
    return "utf-8-sig"


def _separator(line: str) -> str | None:
    """Return the separator of a header with the needed columns; None for any other line."""
    headers = ((mark, next(csv.reader([line], delimiter=mark), [])) for mark in _SEPARATORS)
    return next((mark for mark, header in headers if set(NEEDED) <= set(map(_column_name, header))), None)


def _column_name(name: str) -> str:
    """Return a column's name without blanks around it; the name of a known column is returned in lower case."""
    bare = name.strip()
    return bare.lower() if bare.lower() in KNOWN else bare


def _row(row: Mapping[str, str], request: Request, line: int) -> Row:
    item = row["item"].strip()
    if not item:
        raise DataError("no item")
    return Row(
        item=item,
        metric=_metric(row),
        score=_score(row["score"]),
        cluster=request.cluster(row, item) if request.cluster else name_of(row.get("cluster", "")),
        sample=next((_whole(row[name], name) for name in SAMPLES if name in row), 0),
        suite=row.get("suite", ONE_SUITE).strip(),
        seed=_whole(row["seed"], "seed") if "seed" in row else 0,
        line=line,
    )


def _metric(row: Mapping[str, str]) -> str:
    return metric_name(row.get("metric", "score").strip() or "score")


def _score(text: str) -> float:
    word = text.strip().lower()
    if word in UNSCORED:
        return math.nan
    if word in ("true", "false"):
        return float(word == "true")
    return score_of(parse_number(word))


def _whole(text: str, name: str) -> int:
    digits = text.strip()
    value = repeat_of(int(digits)) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None
    if value is None:
        raise DataError(f"{name} {text[:40]!r} is not a whole number from 0")
    return value
