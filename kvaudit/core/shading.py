"""What the cache still held of every token when an answer began: found by serving it again, kept beside the run.

    shading/<unit>.json   the answers of one unit that were served again, under the sha256 of the records they are of

Looked up and not asked of every record when it is made: only answers that somebody looks at are drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.provenance import seal_path

SHADING_FOLDER = "shading"
ALL_TOKENS = "all tokens"  # beside the names of marked spans


class AnswerKey(NamedTuple):
    """One recorded answer of a unit."""

    item: str
    sample: int


@dataclass(frozen=True)
class Shading:
    """The tokens before the last answer of a row, each with how many of ``heads`` (layers x KV heads) still held it.

    ``marks`` are the numbers of a marked span's tokens, by its name; ``depth`` is the share that each layer still held
    of ALL those tokens and of every marked span's.
    """

    pieces: list[str]
    roles: list[str]
    held: list[int]
    heads: int
    depth: dict[str, list[float]]
    marks: dict[str, list[int]]


Shadings = dict[AnswerKey, Shading | None]  # None: served again, another answer came out


def shading_file(run: Path, unit: str) -> Path:
    """Where the shading of a unit lies."""
    return run / SHADING_FOLDER / f"{unit}.json"


def read_shadings(run: Path, unit: str) -> Shadings:
    """What was served again of a unit; nothing where its records are others since.

    Raises DataError for a file that is not as it was written.
    """
    path = shading_file(run, unit)
    if not path.exists():
        return {}
    held = read_json(path)
    rows = held.get("answers")
    if not isinstance(rows, list) or held.get("sha256") != _digest(rows):
        raise DataError(f"{str(path)!r} is not as it was written; delete it to serve its answers again")
    if held.get("records") != records_sha256(run, unit):
        return {}
    return {AnswerKey(row["item"], row["sample"]): row["shading"] and Shading(**row["shading"]) for row in rows}


def write_shadings(run: Path, unit: str, shadings: Mapping[AnswerKey, Shading | None]) -> None:
    """Write what was served again of a unit, whole or not at all; raises RunError where it cannot be."""
    rows = [{**answer._asdict(), "shading": shading and asdict(shading)} for answer, shading in shadings.items()]
    path = shading_file(run, unit)
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"records": records_sha256(run, unit), "sha256": _digest(rows), "answers": rows}, indent=None)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); make the run's folder writable, or ask for no shading: "
            "--shade 0"
        ) from None


def records_sha256(run: Path, unit: str) -> str:
    """The sha256 that a finished unit's records are sealed with; raises DataError where it is not finished."""
    return str(read_json(seal_path(run / "records" / f"{unit}.jsonl")).get("sha256"))


def _digest(rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
