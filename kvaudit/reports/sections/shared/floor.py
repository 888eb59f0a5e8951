"""The A/A floor of an engine: what changes where nothing was changed, when the same is asked again or in another order.

What a compressed engine answers can depend on what is answered beside it. A flip under a condition is one of the
setting only beyond what the condition and its reference do by themselves, so both floors stand beside every figure.
They decide whether a setting acts at all (``drift.canary``), and nothing else: flips of an A/A go both ways, and are in
the variance of the interval already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd

from kvaudit.reports.records.floor import ANSWER_COLUMNS, SHUFFLED, RepeatedAnswers
from kvaudit.reports.records.rows import ANSWER_HASH, FACET_COLUMNS, SCORE, facet_scores
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast

_UNIT = ["arm", "train_seed", "policy", "suite", "context_tokens"]


@dataclass(frozen=True)
class RepeatFlips:
    """One metric of answers that could be read both times: how many lost it, gained it, and the net drift of all."""

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
    """One unit asked again in one way, beside what it answered in the grid."""

    way: str  # again | shuffled
    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    answers: int
    same: int  # of them with the same text
    flips: tuple[RepeatFlips, ...]


def floor_of(records: pd.DataFrame, asked: RepeatedAnswers, comparison: Comparison) -> tuple[FloorUnit, ...]:
    """Every unit that was asked again, in the order of the comparison; answers without their pair are left out."""
    found = [unit for way, again in asked.records.items() for unit in _units(way, records, again)]
    places = {policy: i for i, policy in enumerate(comparison.policies)}
    return tuple(
        sorted(found, key=lambda u: (u.suite, u.context_tokens, places.get(u.policy, -1), u.arm, u.seed, u.way))
    )


def _units(way: str, records: pd.DataFrame, again: pd.DataFrame) -> Iterator[FloorUnit]:
    metrics = [SCORE, *(column for column in FACET_COLUMNS.values() if column in records and column in again)]
    columns = [*ANSWER_COLUMNS, ANSWER_HASH, *metrics]
    pairs = records[columns].merge(again[columns], on=ANSWER_COLUMNS, suffixes=("", "_again"))
    for index, part in pairs.groupby(_UNIT, observed=True):
        arm, seed, policy, suite, context = cast(tuple[str, int, str, str, int], index)
        yield FloorUnit(
            way=way,
            arm=str(arm),
            seed=int(seed),
            policy=str(policy),
            suite=str(suite),
            context_tokens=int(context),
            answers=len(part),
            same=int((part[ANSWER_HASH] == part[f"{ANSWER_HASH}_again"]).sum()),
            flips=tuple(_flips(str(suite), part)),
        )


def _flips(suite: str, part: pd.DataFrame) -> Iterator[RepeatFlips]:
    """The score and every facet that some answer could be read for, both times."""
    known = [(suite, SCORE, None), *((f"{suite}.{name}", column, name) for name, column in FACET_COLUMNS.items())]
    for metric, column, facet in known:
        if column not in part:
            continue
        before, after = (facet_scores(part[name], facet) for name in (column, f"{column}_again"))
        change = (after - before)[~np.isnan(before) & ~np.isnan(after)]
        if len(change):
            lost, gained = int((change < 0).sum()), int((change > 0).sum())
            yield RepeatFlips(metric, len(change), lost, gained, float(change.mean()))


@dataclass(frozen=True)
class FloorCell:
    """The floor of an arm under a condition in one metric at one length, over its seeds, in one way of asking."""

    way: str
    answers: int
    same: int
    lost: int
    gained: int
    read: int  # answers that the flips are of


def floor_at(
    units: tuple[FloorUnit, ...], arm: str, policy: str, metric: str, context_tokens: int
) -> tuple[FloorCell, ...]:
    """The floor of a cell, by way of asking; empty where it was not asked again."""
    found = []
    own = [u for u in units if (u.arm, u.policy, u.context_tokens) == (arm, policy, context_tokens)]
    for way in dict.fromkeys(u.way for u in own):
        both = [(u, f) for u in own if u.way == way for f in u.flips if f.metric == metric]
        if both:
            counts = [(u.answers, u.same, f.lost, f.gained, f.answers) for u, f in both]
            found.append(FloorCell(way, *(sum(column) for column in zip(*counts, strict=True))))
    return tuple(found)


def covering_floor(units: tuple[FloorUnit, ...], c: Contrast) -> float | None:
    """The share of answers that change by asking in another order, where no more change under the condition."""
    cells = floor_at(units, c.arm, c.policy, c.suite, c.context_tokens)
    shares = [(cell.lost + cell.gained) / cell.read for cell in cells if cell.way == SHUFFLED]
    return next((share for share in shares if c.churn is not None and 0 < share >= c.churn), None)
