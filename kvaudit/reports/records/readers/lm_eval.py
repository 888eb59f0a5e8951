"""lm-eval's ``samples_TASK_DATE.jsonl`` (``--log_samples``): one line per document and filter, metrics by name.

A metric of a filter other than ``none`` is called METRIC,FILTER, as in lm-eval's own results. Logs of old releases
(before pull request 2517) name neither metrics nor filters: there every number beside what was asked and said is a
metric, and a document that stands again is scored by the next filter, METRIC,filter-2. Where all filters scored alike
they are one metric.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError
from kvaudit.reports.records.readers.base import (
    CollectedScores,
    Log,
    Problems,
    Reader,
    Request,
    Row,
    fingerprint_of,
    first_objects,
    json_lines,
    log_of,
    metric_name,
    name_of,
)
from kvaudit.reports.records.readers.clusters import SharedFields

_NEXT = "filter-"  # the name of a filter that has none, before its number
_FILE = re.compile(r"^samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.\-]+$")
_KEYS = {"doc_id", "doc", "resps"}
_HASHES = ("doc_hash", "prompt_hash", "target_hash")
_NO_METRICS = {*_KEYS, *_HASHES, "target", "arguments", "filtered_resps", "filter", "metrics"}


class LmEval(Reader):
    """lm-evaluation-harness per-sample log."""

    name = "lm-eval"
    reads = "lm-eval samples_*.jsonl"

    def recognises(self, path: Path) -> bool:
        """Lines with a document, its number and the model's responses."""
        return not path.is_dir() and any(set(row) >= _KEYS for row in first_objects(path))

    def read(self, path: Path, request: Request) -> Log:
        """Every metric of every line."""
        problems, shared = Problems(), SharedFields("doc.")
        scores, decoding = CollectedScores(problems), set[str]()
        times = Counter[str]()  # that a document stood in a log that names no filters
        is_old = not any("metrics" in row for row in first_objects(path))
        for number, row in json_lines(path, problems):
            try:
                named = _with_metrics(row, times) if is_old else row
                item = _add(named, request, number, scores, f"{path.name}:{number}")
                shared.add(item, row.get("doc"), row.get("target"))
            except DataError as error:
                problems.add(f"{path.name}:{number}: {error}")
            decoding |= _decoding(row.get("arguments"))
        scores.report()
        named_file = _FILE.match(path.stem)
        rows, notes = _one_filter(scores.rows, times)
        return log_of(
            self,
            path,
            rows,
            problems,
            notes=notes,
            settings={"decoding": "; ".join(sorted(decoding))},
            facts={"task": named_file["task"] if named_file else path.stem},
            shared_fields=shared.names(),
        )


def _with_metrics(row: Mapping[str, Any], times: Counter[str]) -> dict[str, Any]:
    """A line of a log that names neither its metrics nor its filter, with both."""
    found = [name for name, value in row.items() if name not in _NO_METRICS and isinstance(value, bool | int | float)]
    item = str(row.get("doc_id"))[:80]
    times[item] += 1
    return {**row, "metrics": found, "filter": "none" if times[item] == 1 else f"{_NEXT}{times[item]}"}


def _one_filter(rows: list[Row], times: Counter[str]) -> tuple[list[Row], tuple[str, ...]]:
    """The rows without later filters that scored as the first did, and what is to be said of the log."""
    if not times:
        return rows, ()
    again, most = sum(count > 1 for count in times.values()), max(times.values())
    old = "the log is of an old lm-eval (before its pull request 2517), which names neither metrics nor filters"
    if not again:
        return rows, (f"{old}: every number beside what was asked and said is a metric.",)
    first = {(row.metric, row.item): row.score for row in rows if f",{_NEXT}" not in row.metric}
    later = [row for row in rows if f",{_NEXT}" in row.metric]
    told = f"{old}: {again} documents stand up to {most} times, once for every filter"
    if all(row.score == first.get((row.metric.partition(f",{_NEXT}")[0], row.item)) for row in later):
        return [row for row in rows if f",{_NEXT}" not in row.metric], (f"{told}; all scored alike and count once.",)
    return rows, (f"{told}; METRIC is of the first, METRIC,{_NEXT}2 of the second.",)


def _add(row: Mapping[str, Any], request: Request, line: int, scores: CollectedScores, where: str) -> str:
    """Every metric of a line; returns the item's name."""
    item = name_of(row.get("doc_id"))
    if item is None:
        raise DataError(f"doc_id {str(row.get('doc_id'))[:40]!r} is no name")
    metrics = row.get("metrics")
    listed = metrics if isinstance(metrics, list) else []
    if not listed or not all(isinstance(name, str) and name in row for name in listed):
        raise DataError("the metrics it lists have no value")
    own = str(row.get("filter", "none"))[:80]
    fields = {**row["doc"], **row} if isinstance(row.get("doc"), dict) else row  # the line's own fields win
    cluster = request.cluster(fields, item) if request.cluster else None
    # the harness's own hashes of what was asked, which know the first of the answers to choose from alone
    hashes = [row.get(name) for name in _HASHES]
    told = [row.get("doc"), row.get("target")] if None in hashes else hashes
    asked = fingerprint_of([told, _texts(row.get("arguments"))])
    for metric in listed:
        name = metric_name(metric if own == "none" else f"{metric},{own}")
        scores.add(Row(item, name, math.nan, cluster, fingerprint=asked, line=line), row[metric], where)
    return item


def _inside(arguments: Any) -> list[Any]:
    """What a line's requests hold, one after the other: by name, or in lists as older versions have them."""
    requests = arguments.values() if isinstance(arguments, dict) else arguments if isinstance(arguments, list) else ()
    parts = [r.values() if isinstance(r, dict) else r if isinstance(r, list) else (r,) for r in requests]
    return [value for part in parts for value in part]


def _texts(arguments: Any) -> list[str]:
    """Prompts, and the answers that a model chooses from."""
    return [value for value in _inside(arguments) if isinstance(value, str)]


def _decoding(arguments: Any) -> set[str]:
    """The generation settings of a line's requests; a request for log-probabilities has none."""
    settings = [value for value in _inside(arguments) if isinstance(value, dict)]
    return {json.dumps(value, sort_keys=True)[:500] for value in settings}
