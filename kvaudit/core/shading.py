"""The share of heads that still held each token when an answer began, kept next to the run's records.

    shading/<unit>.json   the re-served answers of one unit, with the sha256 of its records

It is computed by serving an answer again, only for the answers that somebody looks at.
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
ALL_TOKENS = "all tokens"  # a key of ``depth``, besides the names of marked spans


class AnswerKey(NamedTuple):
    """The key of one recorded answer within a unit (a checkpoint under a policy on a suite)."""

    item: str
    sample: int


@dataclass(frozen=True)
class Shading:
    """The tokens before the last answer of a row, each with the number of ``heads`` (layers x KV heads) that held it.

    ``marks`` are the token numbers of each marked span. ``depth`` is the share that each layer held, of ALL_TOKENS and
    of each marked span.
    """

    pieces: list[str]
    roles: list[str]
    held: list[int]
    heads: int
    depth: dict[str, list[float]]
    marks: dict[str, list[int]]


Shadings = dict[AnswerKey, Shading | None]  # None: serving it again gave another answer


def shading_file(run: Path, unit: str) -> Path:
    """Return the path of a unit's shading."""
    return run / SHADING_FOLDER / f"{unit}.json"


def read_shadings(run: Path, unit: str) -> Shadings:
    """Return the shadings of a unit, none if its records changed since; raises DataError for a damaged file."""
    path = shading_file(run, unit)
    if not path.exists():
        return {}
    content = read_json(path)
    rows = content.get("answers")
    if not isinstance(rows, list) or content.get("sha256") != _digest(rows):
        raise DataError(f"{str(path)!r} is not as it was written; delete it to serve its answers again")
    if content.get("records") != records_sha256(run, unit):
        return {}
    return {AnswerKey(row["item"], row["sample"]): row["shading"] and Shading(**row["shading"]) for row in rows}


def write_shadings(run: Path, unit: str, shadings: Mapping[AnswerKey, Shading | None]) -> None:
    """Write the shadings of a unit, whole or not at all; raises RunError if it cannot."""
    rows = [{**answer._asdict(), "shading": shading and asdict(shading)} for answer, shading in shadings.items()]
    path = shading_file(run, unit)
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"records": records_sha256(run, unit), "sha256": _digest(rows), "answers": rows}, indent=None)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); make the run's folder writable, or leave shading out: "
            "--shade 0"
        ) from None


def records_sha256(run: Path, unit: str) -> str:
    """Return the sha256 in the seal of a unit's records; raises DataError if it is not finished."""
    return str(read_json(seal_path(run / "records" / f"{unit}.jsonl")).get("sha256"))


def _digest(rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
