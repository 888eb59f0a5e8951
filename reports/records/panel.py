"""The score table of one suite at one length: items by (arm, seed, policy), samples averaged inside the item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.core.facets import FACETS
from reports.records.rows import FACET_COLUMNS, UNREAD

Array = npt.NDArray[np.float64]
_Mask = npt.NDArray[np.bool_]


class CellKey(NamedTuple):
    """One checkpoint served under one policy."""

    arm: str
    seed: int
    policy: str


@dataclass(frozen=True)
class Panel:
    """Scores [N] of every cell; NaN where a cell lacks the item.

    Of a suite's score ``scores`` counts unscored samples as 0, as ``floor`` does, and ``best`` as 1. Of a facet, whose
    scores are 1 where it is as wanted, ``scores`` averages the samples that could be read (NaN where none could),
    ``floor`` counts the others as 0 and ``best`` as 1. ``samples`` is the largest number of draws per item;
    ``graded`` says that some draw is neither 0 nor 1.
    """

    suite: str  # or SUITE.FACET
    context_tokens: int
    items: tuple[str, ...]
    clusters: npt.NDArray[np.int64]  # [N] codes
    cluster_names: tuple[str, ...]  # [C]
    n_clusters: int
    scores: Mapping[CellKey, Array]
    floor: Mapping[CellKey, Array]
    best: Mapping[CellKey, Array]
    unscored: Mapping[CellKey, float]  # share of samples of a suite's score
    samples: int
    graded: bool
    uneven_samples: frozenset[CellKey]  # cells whose items were drawn a different number of times
    split_items: int  # items that stand in more than one cluster


Panels = Mapping[tuple[str, int], Panel]  # by suite, or SUITE.FACET, and context length


def panels(records: pd.DataFrame) -> dict[tuple[str, int], Panel]:
    """One panel per (suite, context), and one per (suite.facet, context) that some record has."""
    found = {}
    for index, part in records.groupby(["suite", "context_tokens"], sort=True, observed=True):
        suite, context = str(cast(tuple[str, int], index)[0]), int(cast(tuple[str, int], index)[1])
        score = part["score"].to_numpy(dtype=np.float64)
        found[suite, context] = _panel(suite, context, part, score, read=np.ones(len(score), dtype=np.bool_))
        for name, eligible, good, read in _facets(part):
            metric = f"{suite}.{name}"
            found[metric, context] = _panel(metric, context, part[eligible], good[eligible], read=read[eligible])
    return found


def facets_of(records: pd.DataFrame) -> list[str]:
    """SUITE.FACET of everything that some record has, in the order of the vocabulary."""
    known = [(name, column) for name, column in FACET_COLUMNS.items() if column in records]
    suites = {name: set(records.loc[records[column].notna(), "suite"].astype(str)) for name, column in known}
    return [
        f"{suite}.{name}"
        for suite in sorted(set(records["suite"].astype(str)))
        for name in suites
        if suite in suites[name]
    ]


def _facets(part: pd.DataFrame) -> Iterator[tuple[str, _Mask, Array, _Mask]]:
    """Every facet of some row: which rows are eligible, 1 where it is as wanted, which rows could be read."""
    for name, column in FACET_COLUMNS.items():
        if column in part:
            value = part[column].to_numpy(dtype=np.float64)
            eligible, read = ~np.isnan(value), value != UNREAD
            if eligible.any():
                yield name, eligible, (value == FACETS[name].wanted).astype(np.float64), read


def _panel(suite: str, context: int, part: pd.DataFrame, score: Array, *, read: _Mask) -> Panel:
    keys, cell = _cells(part)
    items, item = _coded(part["item_id"])
    names, name = _coded(part["cluster_id"])
    first = np.zeros(len(items), dtype=np.int64)
    first[item[::-1]] = name[::-1]  # of several clusters the one of the item's first row
    used, clusters = np.unique(first, return_inverse=True)
    shape = (len(items), len(keys))
    place = item * len(keys) + cell
    missing = np.isnan(score)
    low, high = np.where(missing | ~read, 0.0, score), np.where(missing | ~read, 1.0, score)
    counts = _counts(place, np.ones(len(place), dtype=np.bool_), shape)
    most = int(counts.max())
    return Panel(
        suite=suite,
        context_tokens=context,
        items=tuple(items),
        clusters=clusters.astype(np.int64),
        cluster_names=tuple(names[code] for code in used),
        n_clusters=len(used),
        # what could not be read adds 0 to the sum, so only the count has to leave it out
        scores=_by_cell(keys, _means(place, low, _counts(place, read, shape))),
        floor=_by_cell(keys, _means(place, low, counts)),
        best=_by_cell(keys, _means(place, high, counts)),
        unscored=dict(zip(keys, (_total(cell, missing, len(keys)) / counts.sum(axis=0)).tolist(), strict=True)),
        samples=most,
        graded=bool(np.any((score > 0) & (score < 1))),
        uneven_samples=frozenset(
            key for key, column in zip(keys, counts.T, strict=True) if ((column > 0) & (column != most)).any()
        ),
        split_items=len(np.unique(item[name != first[item]])),
    )


def _cells(part: pd.DataFrame) -> tuple[list[CellKey], npt.NDArray[np.int64]]:
    """The cells of these rows in order, and each row's cell."""
    arms, arm = _coded(part["arm"])
    seeds, seed = np.unique(part["train_seed"].to_numpy(), return_inverse=True)
    policies, policy = _coded(part["policy"])
    # arm, seed and policy as the digits of one number, which sorts as they do
    numbers, cell = np.unique((arm * len(seeds) + seed) * len(policies) + policy, return_inverse=True)
    rest, last = np.divmod(numbers, len(policies))
    keys = [
        CellKey(arms[a], int(seeds[s]), policies[p]) for a, s, p in zip(*np.divmod(rest, len(seeds)), last, strict=True)
    ]
    return keys, cell.astype(np.int64)


def _coded(column: pd.Series) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The words of a column in order, and each row's place among them."""
    categories = column.astype("category")
    used, codes = np.unique(categories.cat.codes.to_numpy(), return_inverse=True)
    return [str(word) for word in categories.cat.categories[used]], codes.astype(np.int64)


def _total(place: npt.NDArray[np.int64], values: npt.NDArray[Any], size: int) -> Array:
    sums: Array = np.bincount(place, weights=values.astype(np.float64), minlength=size).astype(np.float64)
    return sums


def _counts(place: npt.NDArray[np.int64], kept: _Mask, shape: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Kept rows by [items, cells]."""
    found = np.bincount(place[kept], minlength=shape[0] * shape[1]).reshape(shape)
    return found.astype(np.int64)


def _means(place: npt.NDArray[np.int64], values: Array, counts: npt.NDArray[np.int64]) -> Array:
    """[items, cells], NaN where a cell lacks the item."""
    sums = _total(place, values, counts.size).reshape(counts.shape)
    means: Array = np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    return means


def _by_cell(keys: list[CellKey], table: Array) -> dict[CellKey, Array]:
    return {key: np.ascontiguousarray(table[:, i]) for i, key in enumerate(keys)}
