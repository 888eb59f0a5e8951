"""What an engine answered again, beside the grid: the first items of its units twice more, once in another order.

RUN/floor/again/<unit>.jsonl       the same requests in the same order
RUN/floor/shuffled/<unit>.jsonl    the same in another order; records and seals as those of the run's own grid
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from kvaudit.core.errors import DataError
from kvaudit.core.files import plain_files, read_json
from kvaudit.core.provenance import check_sealed, seal_path
from kvaudit.reports.records.rows import Columns, Problem, count_distinct, read_unit

FLOOR_FOLDER, SAME_ORDER, SHUFFLED = "floor", "again", "shuffled"
ORDERS = (SAME_ORDER, SHUFFLED)
ANSWER_COLUMNS = ["arm", "train_seed", "policy", "suite", "context_tokens", "item_id", "sample_index"]
_REMEDY = "delete the folder and resume the run to ask again"
_SAME = {"checkpoint": ["arm", "train_seed"], "suite_version": ["suite"], "policy_hash": ["policy"]}


@dataclass(frozen=True)
class RepeatedAnswers:
    """The records of finished units by the way they were asked again; ``unfinished`` are units without a seal."""

    records: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unfinished: tuple[str, ...] = ()


def read_floor(run: Path, records: pd.DataFrame) -> RepeatedAnswers:
    """What was asked again; raises DataError where it changed, or is not of the run's own checkpoints."""
    problems, unfinished = list[Problem](), list[str]()
    folders = [run / FLOOR_FOLDER / way for way in ORDERS]
    read = {folder.name: _units_of(folder, records, problems, unfinished) for folder in folders}
    # a line that stands twice counts once
    found = {way: again.drop_duplicates(ANSWER_COLUMNS) for way, again in read.items() if again is not None}
    return RepeatedAnswers(found, tuple(problems), tuple(unfinished))


def _units_of(
    folder: Path, records: pd.DataFrame, problems: list[Problem], unfinished: list[str]
) -> pd.DataFrame | None:
    """The records of the finished units in a folder beside the grid, None without any; adds to the two lists.

    Raises DataError where they changed, or pair with no record of the run: they are to be of
    its checkpoints, its versions of suites and its conditions.
    """
    columns = Columns()
    for unit in plain_files(folder, "*.jsonl"):
        if seal_path(unit).is_file():
            check_sealed(unit, read_unit(unit, columns, problems), read_json(seal_path(unit)))
        else:
            unfinished.append(f"{folder.name}/{unit.name}")
    if not columns.rows:
        return None
    found = columns.frame()
    for column, by in _SAME.items():
        # over both tables, so that a checkpoint of another run is a second name
        if (count_distinct((records, found), column, by) > 1).any():
            raise DataError(f"records in {str(folder)!r} have another {column} than those of the run; {_REMEDY}")
    return found
