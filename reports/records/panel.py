"""The score table of one suite at one length: items by (arm, seed, policy), samples averaged inside the item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

Array = npt.NDArray[np.float64]


class CellKey(NamedTuple):
    """One checkpoint served under one policy."""

    arm: str
    seed: int
    policy: str


@dataclass(frozen=True)
class Panel:
    """Scores [N] of every cell; NaN where a cell lacks the item.

    ``scores`` counts unscored samples as 0, ``best`` as 1. ``samples`` is the largest number of draws per item;
    ``graded`` says that some draw is neither 0 nor 1.
    """

    suite: str
    context_tokens: int
    items: tuple[str, ...]
    clusters: npt.NDArray[np.int64]  # [N] codes
    cluster_names: tuple[str, ...]  # [C]
    n_clusters: int
    scores: Mapping[CellKey, Array]
    best: Mapping[CellKey, Array]
    unscored: Mapping[CellKey, float]  # share of samples
    samples: int
    graded: bool
    uneven_samples: frozenset[CellKey]  # cells whose items were drawn a different number of times
    split_items: int  # items that stand in more than one cluster


def panels(records: pd.DataFrame) -> dict[tuple[str, int], Panel]:
    """One panel per (suite, context)."""
    found = {}
    for index, part in records.groupby(["suite", "context_tokens"], sort=True, observed=True):
        suite, context = cast(tuple[str, int], index)
        found[str(suite), int(context)] = _panel(str(suite), int(context), part)
    return found


def _panel(suite: str, context: int, part: pd.DataFrame) -> Panel:
    keys, cell = _cells(part)
    items, item = _coded(part["item_id"])
    names, name = _coded(part["cluster_id"])
    first = np.zeros(len(items), dtype=np.int64)
    first[item[::-1]] = name[::-1]  # of several clusters the one of the item's first row
    used, clusters = np.unique(first, return_inverse=True)
    shape = (len(items), len(keys))
    place = item * len(keys) + cell
    score = part["score"].to_numpy(dtype=np.float64)
    missing = np.isnan(score)
    counts = np.bincount(place, minlength=shape[0] * shape[1]).reshape(shape)
    most = int(counts.max())
    return Panel(
        suite=suite,
        context_tokens=context,
        items=tuple(items),
        clusters=clusters.astype(np.int64),
        cluster_names=tuple(names[code] for code in used),
        n_clusters=len(used),
        scores=_by_cell(keys, _means(place, np.where(missing, 0.0, score), counts)),
        best=_by_cell(keys, _means(place, np.where(missing, 1.0, score), counts)),
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


def _means(place: npt.NDArray[np.int64], values: Array, counts: npt.NDArray[np.int64]) -> Array:
    """[items, cells], NaN where a cell lacks the item."""
    sums = _total(place, values, counts.size).reshape(counts.shape)
    means: Array = np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    return means


def _by_cell(keys: list[CellKey], table: Array) -> dict[CellKey, Array]:
    return {key: np.ascontiguousarray(table[:, i]) for i, key in enumerate(keys)}
