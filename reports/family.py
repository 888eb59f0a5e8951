"""One family of tests for all gated cells: max-T by joint cluster sign-flip, Holm where that cannot be had.

FAIL needs a drop that holds for the family. Under no drift anywhere the differences of a template are as likely as
their negatives, in all cells at once: one sign per template flips every cell that holds it, so max-T knows how much the
cells have in common, and has more power than Holm. Templates of one name in one suite are the same also at another
length; suites have none in common and are flipped independently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reports.report import ClusterSums, Contrast
from reports.stats.effect import Effect
from reports.stats.holm import holm
from reports.stats.signflip import (
    BLOCK,
    EXHAUSTIVE_CLUSTERS,
    FEWEST_CLUSTERS,
    flip_statistics,
    max_t_pvalues,
    signs,
    studentised,
)

Array = npt.NDArray[np.float64]
DRAWS = 9999
MAX_T, HOLM = "max-T", "Holm"
NO_SUMS = "the item differences of a cell are not at hand"
FEW = f"a cell has fewer than {FEWEST_CLUSTERS} templates"


class Row(NamedTuple):
    """One test of the family: that a contrast lies below 0, or above it where ``sign`` is -1."""

    contrast: Contrast
    sign: int


@dataclass(frozen=True)
class Family:
    """Adjusted one-sided p-values of the rows, 1 where a row has no number, by ``method`` and by Holm beside it.

    ``reason`` says why the method is Holm; it is empty for max-T. ``floor`` is the smallest p-value it can reach.
    """

    pvalues: tuple[float, ...]
    holm: tuple[float, ...]
    method: str
    reason: str
    floor: float


def joint_family(rows: Sequence[Row], *, draws: int = DRAWS, seed: int = 0) -> Family:
    """The family of the checkpoints at hand."""
    by_holm = holm_family([_toward(row.contrast.effect, row.sign) for row in rows])
    known = [i for i, row in enumerate(rows) if row.contrast.effect]
    reason = _reason_for_holm([rows[i] for i in known])
    if reason or not known:
        return Family(by_holm, by_holm, HOLM, reason, 0.0)
    observed, flipped, exact = _statistics([rows[i] for i in known], draws, seed)
    adjusted = [1.0] * len(rows)
    for i, pvalue in zip(known, max_t_pvalues(observed, flipped, exact=exact), strict=True):
        adjusted[i] = float(pvalue)
    floor = 1 / flipped.shape[-1] if exact else 1 / (flipped.shape[-1] + 1)
    return Family(tuple(adjusted), by_holm, MAX_T, "", floor)


def holm_family(pvalues: Sequence[float | None]) -> tuple[float, ...]:
    """Holm-adjusted p-values in order; 1 where there is none."""
    known = [i for i, value in enumerate(pvalues) if value is not None]
    result = [1.0] * len(pvalues)
    for index, value in zip(known, holm([p for p in pvalues if p is not None]), strict=True):
        result[index] = value
    return tuple(result)


def _toward(effect: Effect | None, sign: int) -> float | None:
    """The one-sided p-value of a drop, or of a gain."""
    return None if effect is None else effect.pvalue_drop if sign > 0 else 1 - effect.pvalue_drop


def _reason_for_holm(rows: Sequence[Row]) -> str:
    if not all(row.contrast.sums for row in rows):
        return NO_SUMS
    return FEW if any(len(part.counts) < FEWEST_CLUSTERS for row in rows for part in row.contrast.sums) else ""


def _statistics(rows: Sequence[Row], draws: int, seed: int) -> tuple[Array, Array, bool]:
    """Observed [K] and flipped [K, B] statistics, and whether the flips are all there are."""
    suites: dict[str, dict[str, int]] = {}
    for part in (part for row in rows for part in row.contrast.sums):
        suites.setdefault(part.suite, {}).update(dict.fromkeys(part.clusters, 0))
    for names in suites.values():
        names.update({name: i for i, name in enumerate(sorted(names))})
    sizes = {suite: len(suites[suite]) for suite in sorted(suites)}
    exact = len(sizes) == 1 and max(sizes.values()) <= EXHAUSTIVE_CLUSTERS
    observed = np.array([_observed(row) for row in rows])
    blocks = [
        np.stack([_flipped(row, patterns, suites) for row in rows])
        for patterns in _patterns(sizes, draws, seed, exact=exact)
    ]
    return observed, np.concatenate(blocks, axis=-1), exact


def _patterns(sizes: Mapping[str, int], draws: int, seed: int, *, exact: bool) -> Iterator[dict[str, Array]]:
    """Blocks of sign patterns [B, C] of every suite."""
    if exact:
        yield {suite: signs(clusters, draws, seed).patterns for suite, clusters in sizes.items()}
        return
    streams = {suite: np.random.default_rng([seed, i]) for i, suite in enumerate(sizes)}
    rows = max(1, BLOCK // sum(sizes.values()))
    for start in range(0, draws, rows):
        size = min(rows, draws - start)
        yield {suite: _random_signs(rng, size, sizes[suite]) for suite, rng in streams.items()}


def _random_signs(rng: np.random.Generator, draws: int, clusters: int) -> Array:
    patterns: Array = rng.integers(0, 2, (draws, clusters)).astype(np.float64)
    return 2 * patterns - 1


def _observed(row: Row) -> float:
    if len(row.contrast.sums) == 1:
        [part] = row.contrast.sums
        return float(studentised(row.sign * part.weight * part.sums, part.counts))
    return float(_joined(row, {id(part): np.ones((1, len(part.counts))) for part in row.contrast.sums})[0])


def _flipped(row: Row, patterns: Mapping[str, Array], suites: Mapping[str, Mapping[str, int]]) -> Array:
    """Statistics [B] of one row."""
    own = {
        id(part): patterns[part.suite][:, [suites[part.suite][name] for name in part.clusters]]
        for part in row.contrast.sums
    }
    if len(row.contrast.sums) == 1:
        [part] = row.contrast.sums
        t: Array = flip_statistics(row.sign * part.weight * part.sums[None], part.counts, own[id(part)])[0]
        return t
    return _joined(row, own)


def _joined(row: Row, patterns: Mapping[int, Array]) -> Array:
    """Statistics [B] of a weighted sum of independent suites: summed means over the root of summed CR3 variances."""
    moments = [flip_moments(part, patterns[id(part)]) for part in row.contrast.sums]
    mean: Array = row.sign * np.sum([m for m, _ in moments], axis=0)
    variance: Array = np.sum([v for _, v in moments], axis=0)
    flat = variance <= 1e-15
    t: Array = mean / np.sqrt(np.where(flat, 1.0, variance))
    ends: Array = np.copysign(np.where(np.abs(mean) <= 1e-12, 0.0, np.inf), mean)
    joined: Array = np.where(flat, ends, t)
    return joined


def flip_moments(part: ClusterSums, patterns: Array) -> tuple[Array, Array]:
    """Weighted mean [B] of a suite's differences and its CR3 variance [B] under sign patterns [B, C]."""
    total, clusters = part.counts.sum(), len(part.counts)
    weights = (total - part.counts) ** -2.0
    mean: Array = patterns @ part.sums / total
    cross = patterns @ (weights * part.counts * part.sums)
    squares = (weights * part.sums**2).sum()
    spread = squares - 2 * mean * cross + mean**2 * (weights * part.counts**2).sum()
    variance = np.maximum((clusters - 1) / clusters * spread, 0.0)
    return part.weight * mean, part.weight**2 * variance
