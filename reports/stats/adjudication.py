"""The drift on the human scale, from human labels of the pairs that matter most.

Every pair the judge calls discordant is labelled, and a random sample of the others: the drift is the sum of the first
part over all items and N_concordant/N times the mean of the second. Their intervals, ESS-Tango and Tango, are added by
MOVER (Zou & Donner 2008); a plain t interval on the sum passes too often, because the sample is mostly zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.stats.clustered import totals
from reports.stats.effect import LEVEL, Effect
from reports.stats.mover import Bounds, mover_bounds
from reports.stats.statistic import Statistic
from reports.stats.tango import design_effect, tango_bounds

Array = npt.NDArray[np.float64]
_SUREST = 1 - 1e-12  # p-values are not followed below its complement


class Labelled(NamedTuple):
    """What the labels of one comparison, or of many [...], come to."""

    losses: Array  # discordant pairs where the human saw a loss
    gains: Array
    items: Array  # N, discordant or not
    deff: Array  # design effect of the discordant part
    sample_losses: Array  # in the sample of concordant pairs
    sample_gains: Array
    sample_size: Array  # F, at least 1
    weight: Array  # N_concordant / N


def adjudicated(
    discordant: npt.ArrayLike, human_z: npt.ArrayLike, clusters: npt.ArrayLike, *, alpha: float = 0.05
) -> Effect:
    """Drift from N pairs of which all judge-discordant and a random sample of the concordant ones are labelled.

    ``discordant`` [N] says where the judge's labels differ, ``human_z`` [N] is candidate - reference in human labels
    (-1, 0, 1; NaN where nobody looked), ``clusters`` [N]. A pair is an item, or one sample of it in its item's cluster.
    """
    apart, human = np.asarray(discordant, dtype=np.bool_), np.asarray(human_z, dtype=np.float64)
    assert apart.shape == human.shape, (apart.shape, human.shape)
    assert not np.isnan(human[apart]).any(), "every discordant pair needs a human label"
    sample = human[~apart & ~np.isnan(human)]
    weight = float(np.mean(~apart))
    assert len(sample) or weight == 0, "a random sample of the concordant pairs needs human labels"
    t = totals(np.where(apart, human, 0.0), clusters)
    deff = design_effect(t, floor=1.0)
    lost, won = float((sample < 0).sum()), float((sample > 0).sum())
    figures = (t.losses, t.gains, t.items, deff, lost, won, max(1, len(sample)), weight)
    labelled, df = Labelled(*(np.asarray(figure, dtype=np.float64) for figure in figures)), t.clusters - 1
    two, one = (adjudicated_bounds(labelled, df=df, confidence=c) for c in (0.5 + LEVEL / 2, 1 - alpha))
    drop = _drop_pvalue(labelled, df)
    return Effect(
        estimate=float(two.estimate),
        low=float(two.low),
        high=float(two.high),
        lower=float(one.low),
        upper=float(one.high),
        alpha=alpha,
        pvalue=min(1.0, 2 * min(drop, 1 - drop)),
        pvalue_drop=drop,
        method="adjudicated, ESS-Tango and Tango by MOVER",
        source="Zou & Donner 2008",
        n_items=t.items,
        n_clusters=t.clusters,
        losses=t.losses + lost * weight * t.items / max(1, len(sample)),
        gains=t.gains + won * weight * t.items / max(1, len(sample)),
        deff=deff,
        df=float(df),
    )


def adjudicated_bounds(labelled: Labelled, *, df: float, confidence: float) -> Bounds:
    """Estimates [...] and their bounds, each one-sided at ``confidence``."""
    x = labelled
    ends = np.array([1.0, -1.0])
    b, c, n = x.losses / x.deff, x.gains / x.deff, x.items / x.deff
    wide = tango_bounds(b, c, n, float(special.stdtrit(df, confidence)) * ends)
    narrow = tango_bounds(x.sample_losses, x.sample_gains, x.sample_size, float(special.ndtri(confidence)) * ends)
    apart = (x.gains - x.losses) / x.items
    alike = (x.sample_gains - x.sample_losses) / x.sample_size
    low, high = (np.stack(np.broadcast_arrays(wide[end], narrow[end]), axis=-1) for end in (0, 1))
    weights = np.stack(np.broadcast_arrays(1.0, x.weight), axis=-1)
    return mover_bounds(weights, np.stack(np.broadcast_arrays(apart, alike), axis=-1), low, high)


def _drop_pvalue(labelled: Labelled, df: float) -> float:
    """The one-sided level at which the bound on the far side of 0 reaches it."""
    from scipy import optimize  # slow to import, and reports that need none of it should not wait

    estimate = float(adjudicated_bounds(labelled, df=df, confidence=0.75).estimate)
    if estimate == 0:
        return 0.5

    def beyond(confidence: float) -> float:
        bounds = adjudicated_bounds(labelled, df=df, confidence=confidence)
        return float(bounds.high if estimate < 0 else -bounds.low)

    least = 0.5 + 1e-9
    if beyond(_SUREST) < 0:
        confidence = _SUREST
    elif beyond(least) >= 0:
        confidence = least
    else:
        confidence = float(optimize.brentq(beyond, least, _SUREST, xtol=1e-13))
    return 1 - confidence if estimate < 0 else confidence


STATISTIC = Statistic(
    adjudicated,
    oracle="tests/test_stats_judge.py::test_adjudicated_drift_of_a_small_example",
    of=lambda z, clusters: adjudicated(z != 0, z, clusters),  # people looked at every pair and agree with the judge
)
