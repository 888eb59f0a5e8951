"""What a checkpoint answered to the items of one metric: item means as wanted, and whether they had a form to read.

An answer without form counts as not what was wanted, here and for every facet: what it was cannot be read off it. One
that nobody could judge counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.core.facets import FACETS, WELL_FORMED
from audit.core.records import Outcome
from reports.records.rows import FACET_COLUMNS, UNREAD

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """One checkpoint, or its seeds together, on one metric at one length; items stand in order of cluster.

    ``draws`` is how many answers an item has at most, over samples and seeds. ``wanted`` averages them.
    """

    suite: str
    facet: str  # empty for the score
    context_tokens: int
    wanted: Array  # [N] in [0, 1]
    readable: Array  # [N] share of an item's answers
    clusters: npt.NDArray[np.str_]  # [N] names
    draws: int
    graded: bool
    answers: int  # rows
    hits: float  # summed over the rows
    formless: int  # rows

    @property
    def metric(self) -> str:
        """SUITE or SUITE.FACET."""
        return f"{self.suite}.{self.facet}" if self.facet else self.suite


def reference_answers(records: pd.DataFrame, reference: str) -> dict[str, tuple[Answers, ...]]:
    """Serving policy -> what the reference answered under it."""
    own = records[records["arm"] == reference]
    return {str(policy): tuple(answers_of(part)) for policy, part in own.groupby("policy", observed=True)}


def answers_of(rows: pd.DataFrame) -> Iterator[Answers]:
    """Every metric and length of rows of one checkpoint; ``outcome`` and the columns of facets may be missing."""
    for index, part in rows.groupby(["suite", "context_tokens"], sort=True, observed=True):
        suite, context = str(cast(tuple[str, int], index)[0]), int(cast(tuple[str, int], index)[1])
        read = _read(part)
        score = part["score"].to_numpy(dtype=np.float64)
        known = ~np.isnan(score)
        yield from _answers((suite, "", context), part[known], score[known], read[known])
        for name, column in FACET_COLUMNS.items():
            if column in part:
                value = part[column].to_numpy(dtype=np.float64)
                formless = read == 0
                # an answer with form and without a value is one that nobody judged
                known = ~np.isnan(value) & ((value != UNREAD) | (formless & (name != WELL_FORMED)))
                good = (value == FACETS[name].wanted).astype(np.float64)
                good[formless & (name != WELL_FORMED)] = 0.0
                yield from _answers((suite, name, context), part[known], good[known], read[known])


def _read(part: pd.DataFrame) -> Array:
    """1 where an answer had a form, 0 where it had none: by its facet, else by its outcome."""
    outcomes = part["outcome"].astype(str).to_numpy(dtype=np.str_) if "outcome" in part else np.array([""])
    read: Array = np.ones(len(part)) * (outcomes != Outcome.DEGENERATE.value)
    column = FACET_COLUMNS[WELL_FORMED]
    if column not in part:
        return read
    value = part[column].to_numpy(dtype=np.float64)
    return np.where(np.isnan(value) | (value == UNREAD), read, value)


def _answers(place: tuple[str, str, int], part: pd.DataFrame, good: Array, read: Array) -> Iterator[Answers]:
    if not len(part):
        return
    _, first, item = np.unique(part["item_id"].astype(str).to_numpy(), return_index=True, return_inverse=True)
    names = part["cluster_id"].astype(str).to_numpy(dtype=np.str_)[first]
    order = np.argsort(names, kind="stable")
    count = np.bincount(item).astype(np.float64)
    suite, facet, context = place
    yield Answers(
        suite=suite,
        facet=facet,
        context_tokens=context,
        wanted=(np.bincount(item, weights=good) / count)[order],
        readable=(np.bincount(item, weights=read) / count)[order],
        clusters=names[order],
        draws=int(count.max()),
        graded=bool(np.any((good > 0) & (good < 1))),
        answers=len(part),
        hits=float(good.sum()),
        formless=int((read == 0).sum()),
    )
