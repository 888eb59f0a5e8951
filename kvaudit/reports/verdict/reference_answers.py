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

from kvaudit.core.facets import FACETS, WELL_FORMED
from kvaudit.core.records import Outcome
from kvaudit.reports.records.blocks import UNREAD
from kvaudit.reports.records.rows import FACET_COLUMNS

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
    formless: int  # rows in which the metric could not be read

    @property
    def metric(self) -> str:
        """SUITE or SUITE.FACET."""
        return f"{self.suite}.{self.facet}" if self.facet else self.suite


_NEEDED = ("policy", "suite", "context_tokens", "item_id", "cluster_id", "score", "outcome")


def reference_answers(records: pd.DataFrame, reference: str) -> dict[str, tuple[Answers, ...]]:
    """Serving policy -> what the reference answered under it."""
    needed = [name for name in (*_NEEDED, *FACET_COLUMNS.values()) if name in records]
    own = records.loc[records["arm"] == reference, needed]
    return {str(policy): tuple(answers_of(part)) for policy, part in own.groupby("policy", observed=True)}


def answers_of(rows: pd.DataFrame) -> Iterator[Answers]:
    """Every metric and length of rows of one checkpoint; ``outcome`` and the columns of facets may be missing."""
    for index, part in rows.groupby(["suite", "context_tokens"], sort=True, observed=True):
        suite, context = str(cast(tuple[str, int], index)[0]), int(cast(tuple[str, int], index)[1])
        said = _Said(suite, context, _words(part, "item_id"), _words(part, "cluster_id"), _read(part))
        score = part["score"].to_numpy(dtype=np.float64)
        yield from said.answers("", score, ~np.isnan(score), said.read == 0)
        for name, column in FACET_COLUMNS.items():
            if column in part:
                value = part[column].to_numpy(dtype=np.float64)
                # what was said before a cut is known, although the answer has not the form of one
                formless = (said.read == 0) & (name != WELL_FORMED) & (np.isnan(value) | (value == UNREAD))
                good = np.where(formless, 0.0, value == FACETS[name].wanted)
                # an answer with form and without a value is one that nobody judged
                yield from said.answers(name, good, ~np.isnan(value) & ((value != UNREAD) | formless), formless)


def _words(part: pd.DataFrame, column: str) -> npt.NDArray[np.str_]:
    return part[column].astype(str).to_numpy(dtype=np.str_)


def _read(part: pd.DataFrame) -> Array:
    """1 where an answer had a form, 0 where it had none: by its facet, else by its outcome."""
    outcomes = part["outcome"].astype(str).to_numpy(dtype=np.str_) if "outcome" in part else np.array([""])
    read: Array = np.ones(len(part)) * (outcomes != Outcome.DEGENERATE.value)  # [n]
    column = FACET_COLUMNS[WELL_FORMED]
    if column not in part:
        return read
    value = part[column].to_numpy(dtype=np.float64)
    return np.where(np.isnan(value) | (value == UNREAD), read, value)


class _Said:
    """The rows of one suite at one length."""

    def __init__(
        self, suite: str, context: int, items: npt.NDArray[np.str_], clusters: npt.NDArray[np.str_], read: Array
    ) -> None:
        self.suite, self.context, self.clusters, self.read = suite, context, clusters, read
        self.items = np.unique(items, return_inverse=True)[1]  # [n], the number of a row's item

    def answers(
        self, facet: str, good: Array, known: npt.NDArray[np.bool_], formless: npt.NDArray[np.bool_]
    ) -> Iterator[Answers]:
        """The known rows, averaged inside the item; nothing where there are none. ``formless`` ones are not good."""
        if not known.any():
            return
        good, read = good[known], self.read[known]
        # from rows [n] to items [N], each with the template of its first row
        _, first, item = np.unique(self.items[known], return_index=True, return_inverse=True)
        names = self.clusters[known][first]  # [N]
        order = np.argsort(names, kind="stable")
        count = np.bincount(item).astype(np.float64)  # [N] answers
        yield Answers(
            suite=self.suite,
            facet=facet,
            context_tokens=self.context,
            wanted=(np.bincount(item, weights=good) / count)[order],
            readable=(np.bincount(item, weights=read) / count)[order],
            clusters=names[order],
            draws=int(count.max()),
            graded=bool(np.any((good > 0) & (good < 1))),
            answers=len(good),
            hits=float(good.sum()),
            formless=int(formless[known].sum()),
        )
