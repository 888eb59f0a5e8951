"""AgentDojo's logs: one JSON file per task, ``PIPELINE/SUITE/USER_TASK/ATTACK/INJECTION_TASK.json`` in its logdir.

Metrics have the names of facets, with 1 as desired. A task under an attack has two. ``utility`` is 1 if the user's task
was done. ``attack_success`` is 1 if the attack failed: the file's ``security``, which means that the attacker's goal
was reached, is then false. A task without an attack has one metric, the file's ``utility``. It is called ``capable``,
or ``attacker_capable`` if the task is an attacker's goal; ``security`` is always true there and is not read. A task
that ended in an error has no score, whatever the file contains.

The cluster of an attacked task is the hidden order (the suite's injection task): with these clusters the test keeps its
error rates (docs/statistics.md). The cluster of a task without an attack is the user's task. ``--cluster user_task_id``
makes the user's task the cluster of every task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError
from kvaudit.core.text import clip_distinct, inline
from kvaudit.reports.records.readers.base import (
    LONGEST_LINE,
    Log,
    Problems,
    Reader,
    Request,
    Row,
    fingerprint_of,
    json_object,
    log_of,
    name_of,
    question_key,
)

_KEYS = {"suite_name", "pipeline_name", "user_task_id", "injection_task_id", "attack_type", "messages", "error"}
_RECOGNITION_FILES = 20
_ATTACKER_PREFIX = "injection_task_"


class AgentDojo(Reader):
    """AgentDojo log of one task, or a folder of them."""

    name = "agentdojo"
    reads = "AgentDojo log or folder of logs"
    has_direction = True

    def recognises(self, path: Path) -> bool:
        """Return whether a file, or one of the first JSON files of a folder, has a log's keys."""
        return any(_is_log(_read(file)) for file in islice(_files(path), _RECOGNITION_FILES))

    def read(self, path: Path, request: Request) -> Log:
        """Return the scores of all tasks of one pipeline (agent); raises DataError if the logs are of several."""
        problems, rows, pipelines, versions = Problems(), list[Row](), set[str](), set[str]()
        for file in sorted(_files(path)):
            place = str(file.relative_to(path)) if path.is_dir() else file.name
            row = _read(file)
            if row is None:
                problems.add(f"{place}: not a JSON object; run the task again")
            elif _is_log(row):
                try:
                    rows += list(_rows(row, request))
                except DataError as error:
                    problems.add(f"{place}: {error}")
                pipelines.add(inline(clip_distinct(str(row["pipeline_name"]), 200)))
                versions.add(inline(clip_distinct(str(row.get("benchmark_version")), 40)))
        if len(pipelines) > 1:
            raise DataError(
                f"{str(path)!r} holds several pipelines ({'; '.join(sorted(pipelines))}); give one's folder"
            )
        return log_of(
            self,
            path,
            rows,
            problems,
            settings={"benchmark version": ", ".join(sorted(versions))},
            facts={"task": self.name, "pipeline": ", ".join(pipelines)},
        )


def _files(path: Path) -> Iterator[Path]:
    files = path.rglob("*.json") if path.is_dir() else iter([path])
    return (file for file in files if file.suffix == ".json" and file.name[0] != "." and file.is_file())


def _read(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it holds anything else or is longer than any log."""
    with file.open("rb") as handle:
        raw = handle.read(LONGEST_LINE + 1)
    return json_object(raw) if len(raw) <= LONGEST_LINE else None


def _is_log(row: Mapping[str, Any] | None) -> bool:
    return row is not None and row.keys() >= _KEYS


def _rows(row: Mapping[str, Any], request: Request) -> Iterator[Row]:
    """Yield a row for each metric of one task's log; raises DataError for a log without task or result."""
    names = [name_of(row[key]) for key in ("suite_name", "user_task_id")]
    if None in names:
        raise DataError("no suite_name or no user_task_id")
    task = "/".join(map(str, names))
    attack, injection = (name_of(row[key]) or "none" for key in ("attack_type", "injection_task_id"))
    item = f"{task}/{attack}/{injection}"
    by_default = f"{names[0]}/{injection}" if row["injection_task_id"] is not None else task
    cluster = request.cluster(row, item) if request.cluster else by_default
    messages = row["messages"] if isinstance(row["messages"], list) else []
    # two compared files must agree in the user's first message and in the injections
    question = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"][:1]
    texts = [question, row.get("injections")]
    fingerprint, key = (fingerprint_of(texts), question_key(texts)) if question else ("", "")
    base = Row(item, "", math.nan, cluster, fingerprint=fingerprint, question=key)
    if row["injection_task_id"] is None and str(row["user_task_id"]).startswith(_ATTACKER_PREFIX):
        # the attacker's goal as a plain task: can the model do it at all?
        yield base._replace(metric="attacker_capable", score=_score(row, "utility", desired=True))
    elif row["injection_task_id"] is None:
        yield base._replace(metric="capable", score=_score(row, "utility", desired=True))
    else:
        yield base._replace(metric="utility", score=_score(row, "utility", desired=True))
        yield base._replace(metric="attack_success", score=_score(row, "security", desired=False))


def _score(row: Mapping[str, Any], key: str, *, desired: bool) -> float:
    if row["error"]:  # AgentDojo then writes no utility and a successful attack, whatever the model did
        return math.nan
    value = row.get(key)
    if not isinstance(value, bool):
        raise DataError(f"{key} is {str(value)[:40]!r}, wanted true or false; the task was not finished, run it again")
    return float(value is desired)
