"""A CSV with the columns item and score, and, where they are there, cluster, sample, suite, seed and metric.

Columns are known in any case. Fields stand between commas, semicolons, tabs or bars, in UTF-8 or UTF-16; between others
than commas a score may have a decimal comma.
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
    log_of,
    metric_name,
    name_of,
    parse_number,
    repeat_of,
    score_of,
)
from kvaudit.reports.records.readers.clusters import SharedFields

NEEDED = ("item", "score")
SAMPLES = ("sample", "epoch", "repeat")
KNOWN = (*NEEDED, *SAMPLES, "cluster", "suite", "seed", "metric")
UNSCORED = ("", "na", "n/a", "nan", "none", "null")  # no score was given
_SEPARATORS = (",", ";", "\t", "|")
_DECIMAL_COMMA = re.compile(r"^\s*([+-]?\d*),(\d+)\s*$")
_LONGEST_HEADER = 65536  # characters


class CsvTable(Reader):
    """A comma-separated table, one row per answer."""

    name = "csv"
    reads = "CSV with the columns item and score"

    def recognises(self, path: Path) -> bool:
        """A first line that names the columns."""
        if path.is_dir():
            return False
        try:
            with path.open(newline="", encoding=_encoding(path)) as handle:
                return _separator(handle.readline(_LONGEST_HEADER)) is not None
        except (UnicodeError, csv.Error):
            return False

    def read(self, path: Path, request: Request) -> Log:
        """Rows of the table; a row that does not fit is named and kept out."""
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
            separator = _separator(handle.readline(_LONGEST_HEADER)) or ","
            handle.seek(0)
            # strict: a quote that is never closed would take in all that follows as one field
            reader = csv.reader(handle, delimiter=separator, strict=True)
            header = [_named(name) for name in next(reader)]
            twice = sorted({name for name in header if name and header.count(name) > 1})
            if twice:
                raise DataError(f"{str(path)!r} has several columns {', '.join(map(repr, twice))}; keep one of each")
            for fields in reader:
                if not fields:
                    continue
                row = dict(zip(header, fields, strict=False))
                if len(fields) != len(header):
                    problems.add(f"{path.name}:{reader.line_num}: {len(fields)} fields, the header has {len(header)}")
                    continue
                where = f"{path.name}:{reader.line_num}"
                shared.add(row["item"].strip(), row)
                if separator != ",":
                    row["score"] = _DECIMAL_COMMA.sub(r"\1.\2", row["score"])
                try:
                    yield _row(row, request, reader.line_num)
                except OffScale as error:
                    problems.outside(error.score, where, _metric(row))
                except DataError as error:
                    problems.add(f"{where}: {error}", _metric(row))


def _encoding(path: Path) -> str:
    """UTF-16 where a mark or the zeros of plain letters say so, else UTF-8, whose mark would join the first name."""
    with path.open("rb") as handle:
        first = handle.read(64)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = [first[start::2].count(0) for start in (0, 1)]
    if len(first) > 8 and max(zeros) > len(first) / 4 and min(zeros) == 0:
        return "utf-16-be" if zeros[0] else "utf-16-le"
    return "utf-8-sig"


def _separator(line: str) -> str | None:
    """What stands between the names of a header that has the needed columns; None for any other line."""
    rows = ((mark, next(csv.reader([line], delimiter=mark), [])) for mark in _SEPARATORS)
    return next((mark for mark, header in rows if set(NEEDED) <= set(map(_named, header))), None)


def _named(name: str) -> str:
    """A column's name; those that are known are known in any case."""
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
