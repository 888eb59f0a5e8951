"""Bounds of shares of the reference's answers: could a loss show, and are two kinds of items treated differently?

Clopper & Pearson's exact bound (1934, Biometrika 26:404) at the cluster-robust effective sample size, with Korn &
Graubard's factor for a design effect estimated from few templates (1998, Survey Methodology 24:193). The bound is exact
because the shares to exclude lie near 0, where the lower end of a score interval is too liberal. Two kinds of items are
compared by Youden's J (1950, Cancer 3:32): the wanted share of one kind plus that of its twin, minus 1. J is at most 0
for behaviour that does not depend on the kind, such as refusing everything, or refusing one item in three of both
kinds. The bound of J combines the two gaps like MOVER (Zou & Donner 2008).
No statistic: one-sided bounds of unpaired shares.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import Array, cr3_variance, many_totals
from kvaudit.reports.stats.tango import deff_floors, design_effects

SHOWN_LEVEL = (
    0.0075  # of every one-sided bound here; the true level stays below .01 for whole, few and uneven templates too
)
READABLE = 0.5  # the share of readable answers that must be exceeded
_ENDS = 1e-9  # rounding error of a share of 0 or 1


class ShownShare(NamedTuple):
    """Rates [...] with one-sided lower and upper bounds, at the level ``SHOWN_LEVEL`` if no other is given."""

    rate: Array
    low: Array
    high: Array


def shares(
    values: npt.NDArray[np.floating],
    counts: npt.ArrayLike,
    *,
    draws: int = 1,
    graded: bool = False,
    level: float = SHOWN_LEVEL,
) -> ShownShare:
    """Return the mean item score of each sample [..., N] with one-sided bounds at ``level``.

    Scores are in [0, 1], and items are in order of cluster, ``counts`` [C] in each. An item's score averages ``draws``
    answers, each 0 or 1, or between them if ``graded``. With a single cluster the bounds are 0 and 1.
    """
    sizes = np.asarray(counts, dtype=np.int64)
    items, clusters = int(sizes.sum()), len(sizes)
    if clusters < 2:
        rate = values.mean(axis=-1, dtype=np.float64)
        return ShownShare(rate, np.zeros_like(rate), np.ones_like(rate))
    t = many_totals(values, sizes)
    deff = design_effects(t, cr3_variance(t.residuals, t.counts), floor=deff_floors(values, draws, graded=graded))
    # below 1, because the design effect is an estimate from few templates
    few = special.stdtrit(items - 1, 1 - level) / special.stdtrit(clusters - 1, 1 - level)
    worth = items / deff * few**2  # effective number of independent items
    hits = np.clip(t.mean, 0, 1) * worth
    # the beta distribution needs positive shapes; the ends of the scale are set explicitly
    some, all_ = hits > _ENDS * worth, hits < worth * (1 - _ENDS)
    low = special.betaincinv(np.where(some, hits, 1.0), worth - np.where(some, hits, 1.0) + 1, level)
    high = special.betaincinv(np.where(all_, hits, 0.0) + 1, worth - np.where(all_, hits, 0.0), 1 - level)
    return ShownShare(t.mean, np.where(some, low, 0.0), np.where(all_, high, 1.0))


def share(
    values: npt.ArrayLike,
    clusters: npt.ArrayLike,
    *,
    draws: int = 1,
    graded: bool = False,
) -> ShownShare:
    """Return the mean of the item scores ``values`` [N] of one sample, with one-sided bounds.

    ``clusters`` [N] holds the label of each item's template. An item's score is the mean over ``draws`` answers, each 0
    or 1, or between them if ``graded``. ``shares`` does the same for many samples at once.
    """
    scores = np.asarray(values, dtype=np.float64)
    _, codes, counts = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    return shares(scores[np.argsort(codes, kind="stable")], counts, draws=draws, graded=graded)


def told_apart(wanted: ShownShare, twin: ShownShare, together: npt.ArrayLike) -> ShownShare:
    """Return Youden's J of two kinds of items, with bounds: 1 if both always have the wanted behaviour.

    J is 0 or less for behaviour that does not depend on the kind. A bound of J combines the distances of both rates
    from their bounds. ``together`` [...] is the ``correlation`` of the two kinds: at 1, if templates make both easy or
    both hard, the distances add up; at 0 their squares do.
    """
    rate = wanted.rate + twin.rate - 1
    low = rate - _joined(wanted.rate - wanted.low, twin.rate - twin.low, together)
    high = rate + _joined(wanted.high - wanted.rate, twin.high - twin.rate, together)
    return ShownShare(rate, np.maximum(low, -1.0), np.minimum(high, 1.0))


def _joined(one: Array, other: Array, together: npt.ArrayLike) -> Array:
    joined: Array = np.sqrt(one**2 + other**2 + 2 * np.asarray(together) * one * other)
    return joined


def correlation(one: Array, other: Array) -> Array:
    """Return the correlation [...], over C templates, of two rates' residuals; 0 if it is negative or undefined.

    ``one`` and ``other`` [..., C] are the residuals of each rate, summed by template.
    """
    scale = np.sqrt(np.sum(one**2, axis=-1) * np.sum(other**2, axis=-1))
    joint = np.sum(one * other, axis=-1)
    found: Array = np.divide(joint, scale, out=np.zeros_like(joint), where=scale > 0)
    return np.clip(found, 0.0, 1.0)
