"""The repeated answers of engines: the first items of each unit answered twice more, the second time in another order.

RUN/floor/again/<unit>.jsonl       the same requests in the same order
RUN/floor/shuffled/<unit>.jsonl    the same requests in another order; records and seals as in the run's own grid
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
# column -> the columns that must determine it
_DETERMINED = {"checkpoint": ["arm", "train_seed"], "suite_version": ["suite"], "policy_hash": ["policy"]}


@dataclass(frozen=True)
class RepeatedAnswers:
    """The records of finished units by order; ``unfinished`` are units without a seal."""

    records: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unfinished: tuple[str, ...] = ()


def read_floor(run: Path, records: pd.DataFrame) -> RepeatedAnswers:
    """Return the repeated answers; raises DataError if files changed or are of other checkpoints than the run's."""
    problems, unfinished = list[Problem](), list[str]()
    folders = [run / FLOOR_FOLDER / order for order in ORDERS]
    frames = {folder.name: _read_units(folder, records, problems, unfinished) for folder in folders}
    unique = {order: frame.drop_duplicates(ANSWER_COLUMNS) for order, frame in frames.items() if frame is not None}
    return RepeatedAnswers(unique, tuple(problems), tuple(unfinished))


def _read_units(
    folder: Path, records: pd.DataFrame, problems: list[Problem], unfinished: list[str]
) -> pd.DataFrame | None:
    """Return the records of the finished units in a folder, None without any; adds to the two lists.

    Raises DataError if they changed, or have other checkpoints, suite versions or policies than the run.
    """
    columns = Columns()
    for unit in plain_files(folder, "*.jsonl"):
        if seal_path(unit).is_file():
            check_sealed(unit, read_unit(unit, columns, problems), read_json(seal_path(unit)))
        else:
            unfinished.append(f"{folder.name}/{unit.name}")
    if not columns.rows:
        return None
    frame = columns.frame()
    for column, by in _DETERMINED.items():
        # counted over both tables, so that a checkpoint of another run is a second value
        if (count_distinct((records, frame), column, by) > 1).any():
            raise DataError(
                f"records in {str(folder)!r} have another {column} than those of the run; delete the folder and resume "
                "the run to ask again"
            )
    return frame
