"""The A/A floor of an engine: how many answers change when the same requests are sent again.

Requests are repeated in the same and in another order, because the answers of a compressed engine can depend on the
rest of the batch. So a changed answer counts as an effect of the setting only beyond the floors of the setting and of
its reference. The floors decide only whether a setting acts at all (``verdict.controls``): A/A flips go both ways, and
the variance of the interval already contains them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd

from kvaudit.reports.records.load import ANSWER_COLUMNS, SHUFFLED, RepeatedAnswers
from kvaudit.reports.records.rows import ANSWER_HASH, FACET_COLUMNS, SCORE, facet_scores
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast

_UNIT = ["arm", "train_seed", "policy", "suite", "context_tokens"]


@dataclass(frozen=True)
class RepeatFlips:
    """How one metric changed between two answers to the same request, over answers that could be read both times.

    ``drift`` is the mean of second minus first answer.
    """

    metric: str  # SUITE or SUITE.FACET
    answers: int
    lost: int
    gained: int
    drift: float  # in score units: 0.05 = 5 pp

    @property
    def share(self) -> float:
        """The share of answers that changed."""
        return (self.lost + self.gained) / self.answers


@dataclass(frozen=True)
class FloorUnit:
    """The repeats of one unit (checkpoint, policy, suite, length) asked in one way, compared with its first answers."""

    way: str  # again | shuffled
    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    answers: int
    same: int  # answers with the same text
    flips: tuple[RepeatFlips, ...]


def floor_of(records: pd.DataFrame, repeats: RepeatedAnswers, comparison: Comparison) -> tuple[FloorUnit, ...]:
    """Return the A/A floor of every unit that has repeats; answers without a repeat are left out."""
    units = [unit for way, repeated in repeats.records.items() for unit in _units(way, records, repeated)]
    places = {policy: i for i, policy in enumerate(comparison.policies)}
    return tuple(
        sorted(units, key=lambda u: (u.suite, u.context_tokens, places.get(u.policy, -1), u.arm, u.seed, u.way))
    )


def _units(way: str, records: pd.DataFrame, repeated: pd.DataFrame) -> Iterator[FloorUnit]:
    metrics = [SCORE, *(column for column in FACET_COLUMNS.values() if column in records and column in repeated)]
    columns = [*ANSWER_COLUMNS, ANSWER_HASH, *metrics]
    pairs = records[columns].merge(repeated[columns], on=ANSWER_COLUMNS, suffixes=("", "_again"))
    for index, rows in pairs.groupby(_UNIT, observed=True):
        arm, seed, policy, suite, context = cast(tuple[str, int, str, str, int], index)
        yield FloorUnit(
            way=way,
            arm=str(arm),
            seed=int(seed),
            policy=str(policy),
            suite=str(suite),
            context_tokens=int(context),
            answers=len(rows),
            same=int((rows[ANSWER_HASH] == rows[f"{ANSWER_HASH}_again"]).sum()),
            flips=tuple(_flips(str(suite), rows)),
        )


def _flips(suite: str, pairs: pd.DataFrame) -> Iterator[RepeatFlips]:
    """Yield, from pairs of answers to the same request, how often the score and each facet changed.

    A facet is left out if it could not be read both times in any answer.
    """
    metrics = [(suite, SCORE, None), *((f"{suite}.{name}", column, name) for name, column in FACET_COLUMNS.items())]
    for metric, column, facet in metrics:
        if column not in pairs:
            continue
        before, after = (facet_scores(pairs[name], facet) for name in (column, f"{column}_again"))
        change = (after - before)[~np.isnan(before) & ~np.isnan(after)]
        if len(change):
            lost, gained = int((change < 0).sum()), int((change > 0).sum())
            yield RepeatFlips(metric, len(change), lost, gained, float(change.mean()))


@dataclass(frozen=True)
class FloorCell:
    """The A/A floor of one metric, over the answers of all seeds of one arm, policy and length."""

    way: str
    answers: int
    same: int
    lost: int
    gained: int
    read: int  # answers that could be read both times


def floor_at(
    units: tuple[FloorUnit, ...], arm: str, policy: str, metric: str, context_tokens: int
) -> tuple[FloorCell, ...]:
    """Return the A/A floor of a cell for each way of asking again; empty if its requests were not repeated."""
    cells = []
    cell_units = [u for u in units if (u.arm, u.policy, u.context_tokens) == (arm, policy, context_tokens)]
    for way in dict.fromkeys(u.way for u in cell_units):
        unit_flips = [(u, f) for u in cell_units if u.way == way for f in u.flips if f.metric == metric]
        if unit_flips:
            counts = [(u.answers, u.same, f.lost, f.gained, f.answers) for u, f in unit_flips]
            cells.append(FloorCell(way, *(sum(column) for column in zip(*counts, strict=True))))
    return tuple(cells)


def covering_floor(units: tuple[FloorUnit, ...], c: Contrast) -> float | None:
    """Return the share of answers that another order of requests changes, if it covers the change by the setting.

    It covers that change if the setting changes no more answers (by the contrast's churn). Otherwise, and if the share
    is 0 or was not measured, the result is None.
    """
    cells = floor_at(units, c.arm, c.policy, c.suite, c.context_tokens)
    shares = [(cell.lost + cell.gained) / cell.read for cell in cells if cell.way == SHUFFLED]
    return next((share for share in shares if c.churn is not None and 0 < share >= c.churn), None)
