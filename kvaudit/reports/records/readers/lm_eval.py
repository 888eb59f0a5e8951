"""lm-eval's ``samples_TASK_DATE.jsonl`` (``--log_samples``): one line per document and filter, metrics by name.

A metric of a filter other than ``none`` is called METRIC,FILTER, as in lm-eval's own results.
"""

from __future__ import annotations

import json
import math
import re
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

_FILE = re.compile(r"^samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.\-]+$")
_KEYS = {"doc_id", "doc", "resps"}
_HASHES = ("doc_hash", "prompt_hash", "target_hash")


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
        for number, row in json_lines(path, problems):
            try:
                item = _add(row, request, number, scores, f"{path.name}:{number}")
                shared.add(item, row.get("doc"), row.get("target"))
            except DataError as error:
                problems.add(f"{path.name}:{number}: {error}")
            decoding |= _decoding(row.get("arguments"))
        scores.report()
        named = _FILE.match(path.stem)
        return log_of(
            self,
            path,
            scores.rows,
            problems,
            settings={"decoding": "; ".join(sorted(decoding))},
            facts={"task": named["task"] if named else path.stem},
            shared_fields=shared.names(),
        )


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
