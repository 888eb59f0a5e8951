"""The answers of a checkpoint to the items of one metric: item means of the wanted outcome, and readable shares.

An unreadable answer counts as unwanted, here and for every facet. An answer that was not judged is not counted.
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
    """One checkpoint, or its seeds together, on one metric at one length; items are in order of cluster.

    ``draws`` is the largest number of answers of an item, over samples and seeds. ``wanted`` averages them.
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
    """Return serving policy -> answers of the reference under it."""
    needed = [name for name in (*_NEEDED, *FACET_COLUMNS.values()) if name in records]
    rows = records.loc[records["arm"] == reference, needed]
    return {str(policy): tuple(answers_of(group)) for policy, group in rows.groupby("policy", observed=True)}


def answers_of(rows: pd.DataFrame) -> Iterator[Answers]:
    """Yield the answers of every metric and length; ``outcome`` and the columns of facets may be missing."""
    for index, group in rows.groupby(["suite", "context_tokens"], sort=True, observed=True):
        suite, context = str(cast(tuple[str, int], index)[0]), int(cast(tuple[str, int], index)[1])
        table = _SuiteRows(suite, context, _texts(group, "item_id"), _texts(group, "cluster_id"), _read(group))
        score = group["score"].to_numpy(dtype=np.float64)
        yield from table.answers("", score, ~np.isnan(score), table.read == 0)
        for name, column in FACET_COLUMNS.items():
            if column in group:
                value = group[column].to_numpy(dtype=np.float64)
                # a truncated answer without form may still have a value, from its text before the cut
                formless = (table.read == 0) & (name != WELL_FORMED) & (np.isnan(value) | (value == UNREAD))
                good = np.where(formless, 0.0, value == FACETS[name].wanted)
                # an answer with form and without a value was not judged
                yield from table.answers(name, good, ~np.isnan(value) & ((value != UNREAD) | formless), formless)


def _texts(rows: pd.DataFrame, column: str) -> npt.NDArray[np.str_]:
    return rows[column].astype(str).to_numpy(dtype=np.str_)


def _read(rows: pd.DataFrame) -> Array:
    """Return 1 for answers with a readable form and 0 for others [n]: by their facet, else by their outcome."""
    outcomes = rows["outcome"].astype(str).to_numpy(dtype=np.str_) if "outcome" in rows else np.array([""])
    read: Array = np.ones(len(rows)) * (outcomes != Outcome.DEGENERATE.value)  # [n]
    column = FACET_COLUMNS[WELL_FORMED]
    if column not in rows:
        return read
    value = rows[column].to_numpy(dtype=np.float64)
    return np.where(np.isnan(value) | (value == UNREAD), read, value)


class _SuiteRows:
    """The rows of one suite at one length."""

    def __init__(
        self, suite: str, context: int, items: npt.NDArray[np.str_], clusters: npt.NDArray[np.str_], read: Array
    ) -> None:
        self.suite, self.context, self.clusters, self.read = suite, context, clusters, read
        self.items = np.unique(items, return_inverse=True)[1]  # [n], the number of a row's item

    def answers(
        self, facet: str, good: Array, known: npt.NDArray[np.bool_], formless: npt.NDArray[np.bool_]
    ) -> Iterator[Answers]:
        """Yield the known rows averaged by item, if there are any; ``formless`` rows are not good."""
        if not known.any():
            return
        good, read = good[known], self.read[known]
        # rows [n] to items [N], each with the template of its first row
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
