"""How high a share is shown to be, and whether two kinds of items are told apart: what a reference must show.

Clopper & Pearson's exact bound (1934, Biometrika 26:404) at the cluster-robust effective sample size, with Korn &
Graubard's factor for the few templates that the design effect is estimated from (1998, Survey Methodology 24:193).
An exact bound and no score interval, because what is to be excluded lies near 0, where the score interval's lower end
is liberal. Telling apart is Youden's J (1950, Cancer 3:32): the wanted share of one kind plus that of its twin, less 1.
A behaviour that does not depend on the kind has at most 0, refusing everything as well as refusing one in three. The
bound of J puts the two gaps together as MOVER does (Zou & Donner 2008).
No statistic: one-sided bounds of shares, without a pair.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import Array, cr3_variance, many_totals
from kvaudit.reports.stats.tango import deff_floors, design_effects

SHOWN_LEVEL = (
    0.0075  # of every one-sided bound here; .01 is kept where templates are whole, few or uneven (bench.calibration)
)
READABLE = 0.5  # the share of answers with a form that must be exceeded
_ENDS = 1e-9  # what rounding leaves of no item, or of all of them


class ShownShare(NamedTuple):
    """Rates [...] with their one-sided bounds, each at ``SHOWN_LEVEL``."""

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
    """Mean item scores of samples [..., N] in [0, 1] that stand in order of cluster, ``counts`` [C] in each.

    One cluster alone shows nothing.
    """
    sizes = np.asarray(counts, dtype=np.int64)
    items, clusters = int(sizes.sum()), len(sizes)
    if clusters < 2:
        rate = values.mean(axis=-1, dtype=np.float64)
        return ShownShare(rate, np.zeros_like(rate), np.ones_like(rate))
    t = many_totals(values, sizes)
    deff = design_effects(t, cr3_variance(t.residuals, t.counts), floor=deff_floors(values, draws, graded=graded))
    # below 1: the design effect is itself an estimate from few templates
    few = special.stdtrit(items - 1, 1 - level) / special.stdtrit(clusters - 1, 1 - level)
    worth = items / deff * few**2  # in independent items
    hits = np.clip(t.mean, 0, 1) * worth
    # the beta distribution wants positive shapes; the ends of the scale are set by hand
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
    """The same of one sample [N] with labels [N]."""
    scores = np.asarray(values, dtype=np.float64)
    _, codes, counts = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    return shares(scores[np.argsort(codes, kind="stable")], counts, draws=draws, graded=graded)


def told_apart(wanted: ShownShare, twin: ShownShare, together: npt.ArrayLike) -> ShownShare:
    """Youden's J of two kinds of items: 1 for whoever does what is wanted of both, 0 for any constant behaviour.

    ``together`` [...] is ``correlation``: where templates make both kinds easy, or hard, the two gaps add up.
    """
    rate = wanted.rate + twin.rate - 1
    low = rate - _joined(wanted.rate - wanted.low, twin.rate - twin.low, together)
    high = rate + _joined(wanted.high - wanted.rate, twin.high - twin.rate, together)
    return ShownShare(rate, np.maximum(low, -1.0), np.minimum(high, 1.0))


def _joined(one: Array, other: Array, together: npt.ArrayLike) -> Array:
    joined: Array = np.sqrt(one**2 + other**2 + 2 * np.asarray(together) * one * other)
    return joined


def correlation(one: Array, other: Array) -> Array:
    """Of residual totals [..., C] of the same clusters, 0 where one lacks the kind or the sign is negative."""
    scale = np.sqrt(np.sum(one**2, axis=-1) * np.sum(other**2, axis=-1))
    joint = np.sum(one * other, axis=-1)
    found: Array = np.divide(joint, scale, out=np.zeros_like(joint), where=scale > 0)
    return np.clip(found, 0.0, 1.0)
