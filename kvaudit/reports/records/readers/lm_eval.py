"""lm-eval's ``samples_TASK_DATE.jsonl`` (``--log_samples``): one line per document and filter, metrics by name.

A filter is lm-eval's way to find the answer in a text. A metric under a filter other than ``none`` is called
METRIC,FILTER, as in lm-eval's own results. Logs of old releases (before pull request 2517) name neither metrics nor
filters. There every number besides question and answer is read as a metric. If a document is repeated, its second line
is that of the second filter, METRIC,filter-2. If all filters score alike, they are one metric.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError
from kvaudit.core.text import clip_distinct
from kvaudit.reports.records.readers.base import (
    CollectedScores,
    Log,
    Problems,
    Reader,
    Request,
    Row,
    SharedFields,
    fingerprint_of,
    first_objects,
    json_lines,
    log_of,
    metric_name,
    name_of,
    question_key,
)

_UNNAMED = "filter-"  # the name of an unnamed filter, before its number
_FILE_NAME = re.compile(r"^samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.\-]+$")
_KEYS = {"doc_id", "doc", "resps"}
_ID = re.compile(r"(?i)(^|_)(id|idx|index|uuid)$")  # a field of a document that only numbers it
_TEXT_LENGTH = 20  # characters of a text that identifies a document
_HASHES = ("doc_hash", "prompt_hash", "target_hash")
_NOT_METRICS = {*_KEYS, *_HASHES, "target", "arguments", "filtered_resps", "filter", "metrics"}


class LmEval(Reader):
    """lm-evaluation-harness per-sample log."""

    name = "lm-eval"
    reads = "lm-eval samples_*.jsonl"

    def recognises(self, path: Path) -> bool:
        """Return whether lines have a document, its number and the model's responses."""
        return not path.is_dir() and any(set(row) >= _KEYS for row in first_objects(path))

    def read(self, path: Path, request: Request) -> Log:
        """Return the log with a row for every metric of every line."""
        problems, shared = Problems(), SharedFields("doc.")
        scores, decoding, questions = CollectedScores(problems), set[str](), _Questions()
        repeats = Counter[str]()  # lines of each document in a log that names no filters
        is_old = not any("metrics" in row for row in first_objects(path))
        for number, row in json_lines(path, problems):
            try:
                complete = _with_metrics(row, repeats) if is_old else row
                item = _add(complete, request, number, scores, questions, f"{path.name}:{number}")
                shared.add(item, row.get("doc"), row.get("target"))
            except DataError as error:
                problems.add(f"{path.name}:{number}: {error}")
            decoding |= _decoding(row.get("arguments"))
        scores.report()
        file_name = _FILE_NAME.match(path.stem)
        rows, notes = _merge_filters(list(map(questions.name, scores.rows)), repeats)
        return log_of(
            self,
            path,
            rows,
            problems,
            notes=notes,
            settings={"decoding": "; ".join(sorted(decoding))},
            facts={"task": file_name["task"] if file_name else path.stem},
            shared_fields=shared.names(),
        )


class _Questions:
    """Groups of lines that ask the same question: their prompts are equal, or their documents are.

    So a document that is asked after other few-shot examples is the same question. A line has ``keys``, which are
    hashes of its prompt and of its document.
    """

    def __init__(self) -> None:
        self._same: dict[str, str] = {}  # a key -> an equal one, towards the first of its group

    def add(self, keys: Sequence[str]) -> str:
        """Join the groups to which a line's keys belong; returns one key of the joined group, "" without keys."""
        groups = list(map(self._find, keys))
        for group in groups[1:]:
            if group != groups[0]:
                self._same[group] = groups[0]
        return groups[0] if groups else ""

    def name(self, row: Row) -> Row:
        """Return the row with the key that names its whole group as its ``question``, in place of its own key."""
        return row._replace(question=self._find(row.question))

    def _find(self, key: str) -> str:
        while (other := self._same.get(key, key)) != key:
            self._same[key] = self._same.get(other, other)  # halves the chain, which may be as long as the log
            key = other
        return key


def _document_keys(document: Any) -> Iterator[str]:
    """Yield two hashes of a document: of all its fields, and of all fields except ids.

    The first is left out if the document has no text, the second unless some text is long enough to identify it.
    """
    if not isinstance(document, dict):
        return
    rest = {name: value for name, value in document.items() if not _ID.search(str(name))}
    longest = max((len(value.strip()) for value in rest.values() if isinstance(value, str)), default=0)
    if longest:
        yield question_key(document)
    if longest >= _TEXT_LENGTH:
        yield question_key(rest)


def _with_metrics(row: Mapping[str, Any], repeats: Counter[str]) -> dict[str, Any]:
    """Return a line of an old log with its ``metrics`` and its ``filter`` added, because such a log does not name them.

    ``repeats`` counts the lines of each document so far, and is updated: the n-th line is that of the n-th filter.
    """
    metrics = [
        name for name, value in row.items() if name not in _NOT_METRICS and isinstance(value, bool | int | float)
    ]
    item = clip_distinct(str(row.get("doc_id")), 80)
    repeats[item] += 1
    return {**row, "metrics": metrics, "filter": "none" if repeats[item] == 1 else f"{_UNNAMED}{repeats[item]}"}


def _merge_filters(rows: list[Row], repeats: Counter[str]) -> tuple[list[Row], tuple[str, ...]]:
    """Return the rows of an old log, and notes on how it was read.

    If all filters score alike, only the rows of the first filter are returned. ``repeats`` counts the lines of each
    document in an old log; it is empty for a newer log, whose rows are returned unchanged.
    """
    if not repeats:
        return rows, ()
    repeated, most = sum(count > 1 for count in repeats.values()), max(repeats.values())
    old = "the log is of an old lm-eval (before its pull request 2517), which names neither metrics nor filters"
    if not repeated:
        return rows, (f"{old}: every number besides question and answer is a metric.",)
    first = {(row.metric, row.item): row.score for row in rows if f",{_UNNAMED}" not in row.metric}
    later = [row for row in rows if f",{_UNNAMED}" in row.metric]
    note = f"{old}: {repeated} documents occur up to {most} times, once for every filter"
    if all(row.score == first.get((row.metric.partition(f",{_UNNAMED}")[0], row.item)) for row in later):
        return [row for row in rows if f",{_UNNAMED}" not in row.metric], (f"{note}; all scored alike and count once.",)
    return rows, (f"{note}; METRIC is of the first, METRIC,{_UNNAMED}2 of the second.",)


def _add(
    row: Mapping[str, Any], request: Request, line: int, scores: CollectedScores, questions: _Questions, place: str
) -> str:
    """Add every metric of a line to ``scores``; returns the item's name."""
    item = name_of(row.get("doc_id"))
    if item is None:
        raise DataError(f"doc_id {str(row.get('doc_id'))[:40]!r} is no name")
    metrics = row.get("metrics")
    listed = metrics if isinstance(metrics, list) else []
    if not listed or not all(isinstance(name, str) and name in row for name in listed):
        raise DataError("the metrics it lists have no value")
    filter_name = clip_distinct(str(row.get("filter", "none")), 40)
    fields = {**row["doc"], **row} if isinstance(row.get("doc"), dict) else row  # the line's own fields win
    cluster = request.cluster(fields, item) if request.cluster else None
    # the harness's hashes cover only the first of the choices, so the arguments are hashed too
    hashes = [row.get(name) for name in _HASHES]
    question = [row.get("doc"), row.get("target")] if None in hashes else hashes
    texts = _texts(row.get("arguments"))
    fingerprint = fingerprint_of([question, texts]) if any(question) or texts else ""
    keys = [question_key(texts) if texts else fingerprint, *_document_keys(row.get("doc"))]
    key = questions.add(list(filter(None, keys)))
    base = Row(item, "", math.nan, cluster, fingerprint=fingerprint, question=key, line=line)
    for metric in listed:
        name = metric_name(metric if filter_name == "none" else f"{metric},{filter_name}")
        scores.add(base._replace(metric=name), row[metric], place)
    return item


def _argument_values(arguments: Any) -> list[Any]:
    """Return the arguments of all requests of a line as one list; requests are mappings, in older versions lists."""
    requests = arguments.values() if isinstance(arguments, dict) else arguments if isinstance(arguments, list) else ()
    values = [r.values() if isinstance(r, dict) else r if isinstance(r, list) else (r,) for r in requests]
    return [value for request in values for value in request]


def _texts(arguments: Any) -> list[str]:
    """Return the texts among a line's request arguments: the prompts, and the answers to choose from."""
    return [value for value in _argument_values(arguments) if isinstance(value, str)]


def _decoding(arguments: Any) -> set[str]:
    """Return the generation settings of a line's requests as texts; a request for log-probs has none."""
    settings = [value for value in _argument_values(arguments) if isinstance(value, dict)]
    return {clip_distinct(json.dumps(value, sort_keys=True), 500) for value in settings}
