"""Inspect's ``.eval`` log: a zip of JSON, one member per sample and epoch.

Scores become numbers as Inspect makes them: C 1, P 0.5, I and N 0, yes and true 1, no and false 0, numbers themselves.
A scorer that gives several values is one metric per value, SCORER.VALUE. An epoch is a repeat of its item. Logs that
are compressed with Zstandard, as Inspect writes them now, need the package zstandard.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from audit.core.errors import DataError
from reports.records.readers.archive import Archive, MissingPackage, TooLarge
from reports.records.readers.base import (
    Log,
    Problems,
    Reader,
    Request,
    Row,
    Scores,
    log_of,
    metric_name,
    name_of,
    repeat_of,
)

SETTINGS = ("scorers", "model_generate_config")  # that two logs must share
HEADER, START = "header.json", "_journal/start.json"
_SAMPLE = re.compile(r"^samples/.+\.json$")
_WORDS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_YES_OR_NO = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


class Inspect(Reader):
    """Inspect evaluation log."""

    name = "inspect"
    reads = "Inspect .eval log"

    def recognises(self, path: Path) -> bool:
        """A zip with Inspect's header, or with the start of a log that was not finished; half a log too."""
        if path.is_dir():
            return False
        if not zipfile.is_zipfile(path):
            return path.suffix == ".eval" and _starts_as_zip(path)
        try:
            with Archive(path) as archive:
                return HEADER in archive or START in archive
        except DataError:
            return False

    def read(self, path: Path, request: Request) -> Log:
        """Every scorer of every sample; a sample that failed has no score under any of them."""
        problems = Problems()
        scores, failed = Scores(), list[Row]()
        with Archive(path) as archive:
            header = archive.json(HEADER if HEADER in archive else START)  # one of them is what it was recognised by
            for name in filter(_SAMPLE.match, archive):
                try:
                    _add(archive.json(name), request, scores, failed, f"{path.name}:{name}")
                except (MissingPackage, TooLarge):
                    raise
                except DataError as error:
                    problems.add(f"{path.name}:{name}: {error}")
        scores.report(problems)
        metrics = sorted({row.metric for row in scores.rows})
        status, about = str(header.get("status", "started"))[:40], header.get("eval")
        known = about if isinstance(about, dict) else {}
        return log_of(
            self,
            path,
            scores.rows + [row._replace(metric=metric) for row in failed for metric in metrics],
            problems,
            settings={name: json.dumps(known.get(name), sort_keys=True) for name in SETTINGS},
            facts={name: str(known[name])[:200] for name in ("task", "model", "created") if name in known},
            unfinished="" if status == "success" else f"Inspect's status is {status!r}",
        )


def _starts_as_zip(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4) == b"PK\x03\x04"


def _add(sample: Mapping[str, Any], request: Request, scores: Scores, failed: list[Row], where: str) -> None:
    item, epoch = name_of(sample.get("id")), repeat_of(sample.get("epoch", 1))
    if item is None or epoch is None:
        raise DataError("no id or no epoch")
    metadata = sample.get("metadata")
    fields = {**metadata, **sample} if isinstance(metadata, dict) else sample
    row = Row(
        item,
        "",
        math.nan,
        cluster=request.cluster(fields, item) if request.cluster else None,
        sample=epoch,
        fingerprint=_fingerprint(sample),
    )
    found = sample.get("scores")
    if sample.get("error") or not isinstance(found, dict) or not found:
        failed.append(row)
        return
    for scorer, score in found.items():
        for metric, value in _values(scorer, score):
            scores.add(row._replace(metric=metric_name(metric)), value, where)


def _values(scorer: str, score: Any) -> Iterator[tuple[str, Any]]:
    value = score.get("value") if isinstance(score, dict) else None
    if isinstance(value, dict):
        yield from ((f"{scorer}.{name}", _number(inner)) for name, inner in value.items())
    else:
        yield scorer, _number(value)


def _number(value: Any) -> Any:
    """Inspect's own words for scores as numbers; anything else is left for the common check."""
    if not isinstance(value, str):
        return value
    if value in _WORDS:
        return _WORDS[value]
    word = value.strip().lower()
    if word in _YES_OR_NO:
        return _YES_OR_NO[word]
    try:
        return float(word)
    except ValueError:
        return value


def _fingerprint(sample: Mapping[str, Any]) -> str:
    """What was asked and what was wanted."""
    asked = json.dumps([sample.get("input"), sample.get("choices"), sample.get("target")], sort_keys=True)
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()[:16]
