"""What guards did to a run's stored conversations, and the records as users behind each guard would have met them.

RUN/guards/<name>-12hex/<unit>.json    one for every unit of the run, of the very records that are there now

    {"format": "kvaudit.guard", "version": 1, "guard": {"name", "sha256", "side", "text"}, "records": sha256,
     "rows": n, "blocked": [[line, "input" | "output", [facets that had happened before]]], "failed": [line]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.errors import DataError
from kvaudit.core.facets import FACETS
from kvaudit.core.files import read_json
from kvaudit.core.provenance import seal_of
from kvaudit.core.text import is_text
from kvaudit.reports.records.blocks import UNREAD
from kvaudit.reports.records.rows import FACET_COLUMNS

GUARDS_FOLDER, GUARDS_FORMAT, GUARDS_VERSION = "guards", "kvaudit.guard", 1
LET_THROUGH, INPUT, OUTPUT, FAILED = 0, 1, 2, 3
_SIDE_CODES = {"input": INPUT, "output": OUTPUT}
_GUARD_KEYS = ("name", "sha256", "side", "text")
_REMEDY = "delete its folder and run kvaudit grade guard again"


@dataclass(frozen=True)
class Guarded:
    """A guard, what it did to every record (LET_THROUGH, INPUT, OUTPUT or FAILED), and the records behind it.

    Facets of what it blocked are what a block makes of them; where it failed nothing is known of any.
    """

    name: str
    sha256: str
    side: str
    text: str
    acts: npt.NDArray[np.int8]  # [rows of ``records``]
    records: pd.DataFrame


def guarded_records(run: Path, records: pd.DataFrame) -> tuple[Guarded, ...]:
    """The records of a run behind each of its guards; raises DataError for what does not fit them."""
    # a folder without the file of a unit is of a guard that could not begin
    folders = sorted({path.parent for path in (run / GUARDS_FOLDER).glob("*/*.json")})
    return tuple(_guarded(run, folder, records) for folder in folders)


def _guarded(run: Path, folder: Path, records: pd.DataFrame) -> Guarded:
    acts = np.full(len(records), LET_THROUGH, dtype=np.int8)
    happened: dict[int, list[str]] = {}
    told: Mapping[str, str] | None = None
    files, lines = records["file"].astype(str).to_numpy(), records["line"].to_numpy()
    for file in sorted(set(files)):
        path = folder / f"{Path(file).stem}.json"
        body = _checked(path, seal_of(run / "records" / file))
        if told not in (None, body["guard"]):
            raise DataError(f"{str(path)!r} is of another guard than the files beside it; {_REMEDY}")
        told, own = body["guard"], np.flatnonzero(files == file)
        at = dict(zip(lines[own].tolist(), own.tolist(), strict=True))  # line of the file -> row of the table
        for line, side, facets in body["blocked"]:
            if line in at:  # a line that could not be read is no record
                acts[at[line]] = _SIDE_CODES[side]
                happened[at[line]] = facets
        acts[[at[line] for line in body["failed"] if line in at]] = FAILED
    assert told is not None, "a run has records"
    return Guarded(**told, acts=acts, records=_behind(records, acts, happened))


def _behind(records: pd.DataFrame, acts: npt.NDArray[np.int8], happened: Mapping[int, Sequence[str]]) -> pd.DataFrame:
    """The records with the facets that users behind the guard meet."""
    blocked = (acts == INPUT) | (acts == OUTPUT)
    changed = {}
    for name, column in FACET_COLUMNS.items():
        value = records[column].to_numpy(dtype=np.float64)
        eligible = ~np.isnan(value)  # items that have such a facet
        value = np.where(blocked & eligible, float(FACETS[name].blocked), value)
        value = np.where((acts == FAILED) & eligible, UNREAD, value)
        # what happened before the guard stepped in has happened
        kept = [row for row, facets in happened.items() if name in facets]
        value[kept] = np.where(eligible[kept], 1.0, value[kept])
        changed[column] = value
    return records.assign(**changed)


def _checked(path: Path, seal: Path) -> dict[str, Any]:
    """The file of a unit; raises DataError where it is none, or of other records than the sealed ones."""
    if not path.is_file():
        raise DataError(
            f"guard {path.parent.name!r} has not seen {path.stem!r}; go on with kvaudit grade guard, or {_REMEDY}"
        )
    body = read_json(path)
    guard = body.get("guard")
    words = list(guard.values()) if isinstance(guard, dict) and set(guard) == set(_GUARD_KEYS) else [None]
    named = all(isinstance(word, str) and is_text(word) for word in words)
    lists = isinstance(body.get("blocked"), list) and isinstance(body.get("failed"), list)
    if body.get("format") != GUARDS_FORMAT or body.get("version") != GUARDS_VERSION or not named or not lists:
        raise DataError(f"{str(path)!r} is not of format {GUARDS_FORMAT} version {GUARDS_VERSION}; {_REMEDY}")
    if not all(_fits(row) for row in body["blocked"]) or not all(type(line) is int for line in body["failed"]):
        raise DataError(f"{str(path)!r} holds a line that no guard writes; {_REMEDY}")
    if not seal.is_file() or read_json(seal).get("sha256") != body.get("records"):
        raise DataError(f"{str(path)!r} is about other records than those of {path.stem!r}; {_REMEDY}")
    return body


def _fits(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 3:
        return False
    line, side, facets = row
    names = isinstance(facets, list) and all(isinstance(name, str) and name in FACETS for name in facets)
    return type(line) is int and isinstance(side, str) and side in _SIDE_CODES and names


def harmful(records: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which answers did what is not wanted of safety, as they were graded without a guard."""
    unwanted = [FACET_COLUMNS[name] for name, facet in FACETS.items() if facet.kind == "safety" and not facet.wanted]
    found: npt.NDArray[np.bool_] = (records[unwanted].to_numpy(dtype=np.float64) == 1.0).any(axis=1)
    return found
