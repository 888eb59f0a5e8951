"""A CSV with the columns item and score, and, where they are there, cluster, sample, suite, seed and metric."""

from __future__ import annotations

import csv
import math
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
    number_in_words,
    repeat_of,
    score_of,
)
from kvaudit.reports.records.readers.clusters import SharedFields

NEEDED = ("item", "score")
SAMPLES = ("sample", "epoch", "repeat")
KNOWN = (*NEEDED, *SAMPLES, "cluster", "suite", "seed", "metric")
UNSCORED = ("", "na", "n/a", "nan", "none", "null")  # no score was given
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
            # a spreadsheet may begin the file with a byte order mark, which would become part of the first name
            with path.open(newline="", encoding="utf-8-sig") as handle:
                header = next(csv.reader([handle.readline(_LONGEST_HEADER)]), [])
        except (UnicodeDecodeError, csv.Error):
            return False
        return set(NEEDED) <= {name.strip() for name in header}

    def read(self, path: Path, request: Request) -> Log:
        """Rows of the table; a row that does not fit is named and kept out."""
        problems, shared = Problems(), SharedFields(known=KNOWN)
        try:
            rows = list(self._rows(path, request, problems, shared))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"{str(path)!r} cannot be read as CSV ({error}); save it as UTF-8, with every quote of a field doubled"
            ) from None
        return log_of(self, path, rows, problems, shared_fields=shared.names())

    @staticmethod
    def _rows(path: Path, request: Request, problems: Problems, shared: SharedFields) -> Iterator[Row]:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            # strict: a quote that is never closed would take in all that follows as one field
            reader = csv.reader(handle, strict=True)
            header = [name.strip() for name in next(reader)]
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
                try:
                    yield _row(row, request, reader.line_num)
                except OffScale as error:
                    problems.outside(error.score, where, _metric(row))
                except DataError as error:
                    problems.add(f"{where}: {error}", _metric(row))


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
    return score_of(number_in_words(word))


def _whole(text: str, name: str) -> int:
    digits = text.strip()
    value = repeat_of(int(digits)) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None
    if value is None:
        raise DataError(f"{name} {text[:40]!r} is not a whole number from 0")
    return value
