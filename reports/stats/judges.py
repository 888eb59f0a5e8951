"""The judge held against people: agreement, what its mistakes can do to a drift, and the drift on the human scale.

Agreement is Cohen's kappa (Cohen 1960; large-sample variance of Fleiss, Cohen & Everitt 1969, Psychological Bulletin
72:323). A judge that errs alike in both arms only shrinks a drift; one that errs differently moves it by up to
rate*|gap in sensitivity| + (1-rate)*|gap in specificity| (Rogan & Gladen 1978). Human labels undo either: every pair
the judge calls discordant is labelled, and a random sample of the others, and the drift is the sum of the first part
over all items and N_concordant/N times the mean of the second. Their intervals, ESS-Tango and Tango, are added by
MOVER (Zou & Donner 2008); a plain t interval on the sum passes too often, because the sample is mostly zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.stats.binomial import Proportion, clopper_pearson
from reports.stats.clustered import totals
from reports.stats.effect import LEVEL, Effect, Statistic
from reports.stats.mover import Bounds, Part, mover, mover_bounds
from reports.stats.tango import Interval, design_effect, tango_bounds


@dataclass(frozen=True, slots=True)
class Kappa:
    """Kappa with its interval, and the raw share of equal labels.

    No estimate when a judge gave one label throughout: agreement beyond chance cannot show, whatever the other said. No
    interval there, nor where the large-sample variance is 0, as with judges who agree on every transcript.
    """

    estimate: float | None
    low: float | None
    high: float | None
    agreement: float
    n: int
    level: float
    method: str = "Cohen's kappa"
    source: str = "Cohen 1960; Fleiss, Cohen & Everitt 1969"


def kappa(first: npt.ArrayLike, second: npt.ArrayLike, *, level: float = LEVEL) -> Kappa:
    """Agreement of two judges' labels [n] of the same transcripts, two labels or more."""
    one, two = np.asarray(first), np.asarray(second)
    assert one.ndim == 1, one.shape
    assert one.shape == two.shape, (one.shape, two.shape)
    assert one.size, "agreement needs a label"
    known, codes = np.unique(np.concatenate([one, two]), return_inverse=True)
    table = np.zeros((len(known), len(known)))
    np.add.at(table, (codes[: len(one)], codes[len(one) :]), 1 / len(one))
    agreement = float(np.trace(table))
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    chance = float(rows @ columns)
    if max(rows.max(), columns.max()) > 1 - 0.5 / len(one):
        return Kappa(None, None, None, agreement, len(one), level)
    estimate = (agreement - chance) / (1 - chance)
    half = float(special.ndtri(0.5 + level / 2)) * _error(table, estimate, chance, len(one))
    if half < 1e-9:
        return Kappa(estimate, None, None, agreement, len(one), level)
    return Kappa(estimate, max(-1.0, estimate - half), min(1.0, estimate + half), agreement, len(one), level)


def _error(table: npt.NDArray[np.float64], estimate: float, chance: float, n: int) -> float:
    """Standard error of kappa from the shares [L, L] of label pairs."""
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    diagonal = np.sum(np.diag(table) * (1 - (rows + columns) * (1 - estimate)) ** 2)
    crossed = table * (columns[:, None] + rows[None, :]) ** 2
    apart = (1 - estimate) ** 2 * (crossed.sum() - np.trace(crossed))
    centre = (estimate - chance * (1 - estimate)) ** 2
    return float(np.sqrt(max(diagonal + apart - centre, 0.0) / n) / (1 - chance))


@dataclass(frozen=True, slots=True)
class JudgeError:
    """A judge's sensitivity and specificity for one arm, and J = sensitivity + specificity - 1 with its lower limit."""

    sensitivity: Proportion
    specificity: Proportion
    informedness: float | None
    informedness_low: float
    method: str = "Clopper-Pearson; J by MOVER"
    source: str = "Rogan & Gladen 1978"


@dataclass(frozen=True, slots=True)
class DifferentialBias:
    """Largest drift that the judge's gap between the arms could make by itself, in score units.

    ``bound`` from the estimated rates (None when an arm has no label of a kind), ``upper`` its upper limit. The gaps
    are candidate - reference.
    """

    bound: float | None
    upper: float
    sensitivity_gap: Interval
    specificity_gap: Interval
    method: str = "rate*|sensitivity gap| + (1-rate)*|specificity gap|, MOVER"
    source: str = "Rogan & Gladen 1978; Zou & Donner 2008"


def judge_error(judged: npt.ArrayLike, human: npt.ArrayLike, *, level: float = LEVEL) -> JudgeError:
    """Error rates of one arm from the judge's and the human's 0/1 labels [n] of the same transcripts."""
    said, true = np.asarray(judged), np.asarray(human)
    assert said.shape == true.shape, (said.shape, true.shape)
    assert np.isin(said, (0, 1)).all(), "labels are 0 or 1"
    assert np.isin(true, (0, 1)).all(), "labels are 0 or 1"
    hits, positives = int(((said == 1) & (true == 1)).sum()), int((true == 1).sum())
    rejections, negatives = int(((said == 0) & (true == 0)).sum()), int((true == 0).sum())
    sensitivity = clopper_pearson(hits, positives, level=level)
    specificity = clopper_pearson(rejections, negatives, level=level)
    if sensitivity.estimate is None or specificity.estimate is None:
        return JudgeError(sensitivity, specificity, None, sensitivity.low + specificity.low - 1)
    both = mover([_part(1.0, sensitivity), _part(1.0, specificity)])
    return JudgeError(sensitivity, specificity, both.estimate - 1, both.low - 1)


def differential_bias(reference: JudgeError, candidate: JudgeError, rate: float) -> DifferentialBias:
    """Bias at the true ``rate`` of desired behaviour; a cell cannot pass on judge labels when ``upper`` > margin/2."""
    assert 0 <= rate <= 1, rate
    pairs = (
        (reference.sensitivity, candidate.sensitivity),
        (reference.specificity, candidate.specificity),
    )
    weights = (rate, 1 - rate)
    gaps = [_gap(one, two) for one, two in pairs]
    total = mover([_absolute(weight, gap) for weight, gap in zip(weights, gaps, strict=True)])
    labelled = all(p.estimate is not None for pair in pairs for p in pair)
    return DifferentialBias(
        bound=total.estimate if labelled else None,
        upper=min(1.0, total.high),
        sensitivity_gap=Interval(gaps[0].low, gaps[0].high),
        specificity_gap=Interval(gaps[1].low, gaps[1].high),
    )


def _part(weight: float, proportion: Proportion) -> Part:
    assert proportion.estimate is not None
    return Part(weight, proportion.estimate, proportion.low, proportion.high)


def _gap(reference: Proportion, candidate: Proportion) -> Part:
    """candidate - reference, weight 1; without labels in an arm the widest gap its interval allows."""
    if reference.estimate is None or candidate.estimate is None:
        return Part(1.0, 0.0, candidate.low - reference.high, candidate.high - reference.low)
    gap = mover([_part(1.0, candidate), _part(-1.0, reference)])
    return Part(1.0, gap.estimate, gap.low, gap.high)


def _absolute(weight: float, gap: Part) -> Part:
    """The size of a gap: at least 0, at most its farther end."""
    least = max(0.0, gap.low, -gap.high)
    return Part(weight, abs(gap.estimate), least, max(abs(gap.low), abs(gap.high)))


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
