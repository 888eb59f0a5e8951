"""What an engine answered again, beside the grid: the first items of its units twice more, once in another order.

RUN/floor/again/<unit>.jsonl       the same requests in the same order
RUN/floor/shuffled/<unit>.jsonl    the same in another order; records and seals as those of the run's own grid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from kvaudit.core.errors import DataError
from kvaudit.core.files import read_json
from kvaudit.core.provenance import check_sealed, seal_of
from kvaudit.reports.records.rows import Columns, Problem, names_under, read_unit

FLOOR_FOLDER, AGAIN, SHUFFLED = "floor", "again", "shuffled"
WAYS = (AGAIN, SHUFFLED)
ONE_ANSWER = ["arm", "train_seed", "policy", "suite", "context_tokens", "item_id", "sample_index"]
_SAME = {"checkpoint": ["arm", "train_seed"], "suite_version": ["suite"], "policy_hash": ["policy"]}


@dataclass(frozen=True)
class AskedAgain:
    """The records of finished units by the way they were asked again; ``unfinished`` are units without a seal."""

    records: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unfinished: tuple[str, ...] = ()


def read_floor(run: Path, records: pd.DataFrame) -> AskedAgain:
    """What was asked again; raises DataError where it changed, or is not of the run's own checkpoints."""
    found, problems, unfinished = dict[str, pd.DataFrame](), list[Problem](), list[str]()
    for way in WAYS:
        columns, folder = Columns(), run / FLOOR_FOLDER / way
        for unit in sorted(folder.glob("*.jsonl")):
            if seal_of(unit).is_file():
                check_sealed(unit, read_unit(unit, columns, problems), read_json(seal_of(unit)))
            else:
                unfinished.append(f"{way}/{unit.name}")
        if columns.rows:
            found[way] = columns.frame().drop_duplicates(ONE_ANSWER)
            _check_same((records, found[way]), folder)
    return AskedAgain(found, tuple(problems), tuple(unfinished))


def _check_same(tables: Sequence[pd.DataFrame], folder: Path) -> None:
    """Pairs are of one checkpoint, of one version of a suite and of one condition."""
    for column, by in _SAME.items():
        several = names_under(tables, column, by)
        if (several > 1).any():
            raise DataError(
                f"records in {str(folder)!r} have another {column} than those of the run; delete the folder and "
                "resume the run to ask again"
            )
