"""What a run was served under besides, where a gated policy failed: the remedies in the order they are tested in.

RUN/remedies/tried.json     {"format": "kvaudit.remedies", "version": 1, "tried": [{"remedy": text, "declared": when,
                             "instead": {policy that may fail: policy that is served in its place}}]}
RUN/remedies/<unit>.jsonl   records and seals as those of the run's own grid
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvaudit.core.errors import DataError
from kvaudit.core.files import read_json
from kvaudit.core.text import is_text
from kvaudit.reports.records.floor import units_beside
from kvaudit.reports.records.rows import Problem

REMEDIES_FOLDER, TRIED_FILE, REMEDIES_FORMAT, REMEDIES_VERSION = "remedies", "tried.json", "kvaudit.remedies", 1
WITH_RUN, AFTER_RUN = "with the run", "after the run"
_MEND = "delete the folder and serve the remedies again: kvaudit replay remedy RUN"


class Tried(NamedTuple):
    """One remedy, and what it makes of every gated policy that it has a hold on: canonical texts."""

    remedy: str
    declared: str
    instead: Mapping[str, str]


@dataclass(frozen=True)
class Served:
    """What was tried in order, the records of finished units, and what of these could not be read."""

    tried: tuple[Tried, ...]
    records: pd.DataFrame
    problems: tuple[Problem, ...]


def read_tried(run: Path) -> tuple[Tried, ...]:
    """The family of remedies of a run; raises DataError for a file that no run writes."""
    path = run / REMEDIES_FOLDER / TRIED_FILE
    if not path.is_file():
        return ()
    body = read_json(path)
    rows = body.get("tried")
    if body.get("format") != REMEDIES_FORMAT or body.get("version") != REMEDIES_VERSION or not isinstance(rows, list):
        raise DataError(f"{str(path)!r} is not of format {REMEDIES_FORMAT} version {REMEDIES_VERSION}; {_MEND}")
    if not all(map(_fits, rows)):
        raise DataError(f"{str(path)!r} holds an entry that no run writes; {_MEND}")
    return tuple(Tried(row["remedy"], row["declared"], row["instead"]) for row in rows)


def read_served(run: Path, records: pd.DataFrame) -> Served:
    """What was served beside the grid; raises DataError where it changed, or is not of the run's own checkpoints."""
    tried, problems = read_tried(run), list[Problem]()
    # which units are unfinished is of no use here
    found = units_beside(run / REMEDIES_FOLDER, records, problems, [], _MEND)
    return Served(tried, records.iloc[:0] if found is None else found, tuple(problems))


def _fits(row: Any) -> bool:
    if not isinstance(row, dict) or set(row) != {"remedy", "declared", "instead"}:
        return False
    instead = row["instead"]
    texts = [row["remedy"], *instead, *instead.values()] if isinstance(instead, dict) else [None]
    return row["declared"] in (WITH_RUN, AFTER_RUN) and all(isinstance(text, str) and is_text(text) for text in texts)
