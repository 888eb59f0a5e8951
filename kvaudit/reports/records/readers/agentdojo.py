"""AgentDojo's logs: one JSON file a task, ``PIPELINE/SUITE/USER_TASK/ATTACK/INJECTION_TASK.json`` under its logdir.

Metrics carry the names of facets, and 1 is desired as in every metric here. Under an attack they are ``utility`` (the
user's task was done) and ``attack_success``, which is 1 where the attack failed: the file's own ``security`` is true
where the attacker's goal was reached. Without an attack ``utility`` is called ``capable``, and ``security``, always
true there, says nothing. A task that ended in an error has no score, though the file has one.

The cluster is the user's task. Attacks cross with it, so that what injection tasks share is not in an interval; a
second look with ``--cluster injection_task_id`` tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError
from kvaudit.core.text import inline
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
)

_KEYS = {"suite_name", "pipeline_name", "user_task_id", "injection_task_id", "attack_type", "messages", "error"}
_FILES_LOOKED_AT = 20
_ATTACKERS = "injection_task_"


class AgentDojo(Reader):
    """AgentDojo log of one task, or a folder of them."""

    name = "agentdojo"
    reads = "AgentDojo log or folder of logs"
    has_direction = True

    def recognises(self, path: Path) -> bool:
        """A file with a log's keys, or a folder with such a file among the first of its JSON files."""
        return any(_is_log(_read(file)) for file in islice(_files(path), _FILES_LOOKED_AT))

    def read(self, path: Path, request: Request) -> Log:
        """Every task of a pipeline; other JSON files in the folder are left alone.

        Raises DataError for the logs of several pipelines, which would be several results.
        """
        problems, rows, pipelines, versions = Problems(), list[Row](), set[str](), set[str]()
        for file in sorted(_files(path)):
            where = str(file.relative_to(path)) if path.is_dir() else file.name
            row = _read(file)
            if row is None:
                problems.add(f"{where}: not a JSON object; run the task again")
            elif _is_log(row):
                try:
                    rows += list(_rows(row, request))
                except DataError as error:
                    problems.add(f"{where}: {error}")
                pipelines.add(inline(str(row["pipeline_name"])[:200]))
                versions.add(inline(str(row.get("benchmark_version"))[:40]))
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
    found = path.rglob("*.json") if path.is_dir() else iter([path])
    return (file for file in found if file.suffix == ".json" and file.name[0] != "." and file.is_file())


def _read(file: Path) -> dict[str, Any] | None:
    """The JSON object of a file, None where it is none or longer than any log."""
    with file.open("rb") as handle:
        raw = handle.read(LONGEST_LINE + 1)
    return json_object(raw) if len(raw) <= LONGEST_LINE else None


def _is_log(row: Mapping[str, Any] | None) -> bool:
    return row is not None and row.keys() >= _KEYS


def _rows(row: Mapping[str, Any], request: Request) -> Iterator[Row]:
    """The metrics of a task; raises DataError for a log that names no task, or has no result."""
    names = [name_of(row[key]) for key in ("suite_name", "user_task_id")]
    if None in names:
        raise DataError("no suite_name or no user_task_id")
    home = "/".join(map(str, names))
    attack, injection = (name_of(row[key]) or "none" for key in ("attack_type", "injection_task_id"))
    item = f"{home}/{attack}/{injection}"
    cluster = request.cluster(row, item) if request.cluster else home
    messages = row["messages"] if isinstance(row["messages"], list) else []
    # the user's first message, and what was injected: what two files must have asked alike
    asked = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"][:1]
    blank = Row(item, "", math.nan, cluster, fingerprint=fingerprint_of([asked, row.get("injections")]))
    if row["injection_task_id"] is None and str(row["user_task_id"]).startswith(_ATTACKERS):
        # the attacker's goal, asked for outright: whether a model can do it at all, and no task of a user
        yield blank._replace(metric="attacker_capable", score=_score(row, "utility", wanted=True))
    elif row["injection_task_id"] is None:
        yield blank._replace(metric="capable", score=_score(row, "utility", wanted=True))
    else:
        yield blank._replace(metric="utility", score=_score(row, "utility", wanted=True))
        yield blank._replace(metric="attack_success", score=_score(row, "security", wanted=False))


def _score(row: Mapping[str, Any], key: str, *, wanted: bool) -> float:
    if row["error"]:  # the package writes no utility and a successful attack there, whatever the model did
        return math.nan
    value = row.get(key)
    if not isinstance(value, bool):
        raise DataError(f"{key} is {str(value)[:40]!r}, wanted true or false; the task was not finished, run it again")
    return float(value is wanted)
