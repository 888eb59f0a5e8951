"""A judge compared with human labels: agreement, error rates, and the drift that its errors can cause.

Agreement is Cohen's kappa (Cohen 1960; large-sample variance of Fleiss, Cohen & Everitt 1969, Psychological Bulletin
72:323). A judge with equal errors in both arms only shrinks a drift. Unequal errors move it by up to rate*|gap in
sensitivity| + (1-rate)*|gap in specificity|, where rate is the true rate of desired answers (Rogan & Gladen 1978).
``adjudication`` corrects both. Error rates have exact intervals (Clopper & Pearson 1934, Biometrika 26:404, by
quantiles of the beta distribution).
No statistic: error rates of a judge, and the interval of one unpaired share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.effect import LEVEL
from kvaudit.reports.stats.mover import WeightedEstimate, mover
from kvaudit.reports.stats.tango import Interval


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share with its exact two-sided interval; without trials the estimate is None and the interval [0, 1]."""

    estimate: float | None
    low: float
    high: float
    successes: float  # whole numbers, or weighted ones (Korn & Graubard 1998, Survey Methodology 24:193)
    trials: float
    level: float
    method: str = "Clopper-Pearson"
    source: str = "Clopper & Pearson 1934"


def clopper_pearson(successes: float, trials: float, *, level: float = LEVEL) -> Proportion:
    """Return the exact (Clopper-Pearson) interval of a proportion of independent trials."""
    assert 0 < level < 1, level
    assert 0 <= successes <= trials, (successes, trials)
    failures, tail = trials - successes, (1 - level) / 2
    # betaincinv needs positive shapes; the ends of the scale are set explicitly
    low = float(special.betaincinv(successes, failures + 1, tail)) if successes else 0.0
    high = float(special.betaincinv(successes + 1, failures, 1 - tail)) if failures else 1.0
    return Proportion(successes / trials if trials else None, low, high, successes, trials, level)


# --- agreement of two judges -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kappa:
    """Kappa with its interval, and the raw share of equal labels.

    The estimate is None if a judge used only one label, since agreement beyond chance is then undefined. The interval
    is None there too, and where the large-sample variance is 0, as for judges who agree on every transcript.
    """

    estimate: float | None
    low: float | None
    high: float | None
    agreement: float
    n: int
    level: float
    method: str = "Cohen's kappa"
    source: str = "Cohen 1960; Fleiss, Cohen & Everitt 1969"


def kappa(first: npt.ArrayLike, second: npt.ArrayLike) -> Kappa:
    """Return the agreement of two judges' labels [n] of the same transcripts, two kinds of labels or more."""
    a, b = np.asarray(first), np.asarray(second)
    assert a.ndim == 1, a.shape
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.size, "agreement needs a label"
    n = len(a)
    kinds, codes = np.unique(np.concatenate([a, b]), return_inverse=True)
    table = np.zeros((len(kinds), len(kinds)))  # [L, L] shares: the first judge's label by row, the second's by column
    np.add.at(table, (codes[:n], codes[n:]), 1 / n)
    agreement = float(np.trace(table))
    rows, columns = table.sum(axis=1), table.sum(axis=0)  # each [L]
    chance = float(rows @ columns)
    if max(rows.max(), columns.max()) > 1 - 0.5 / n:  # a judge used one label only; with one exception it is 1 - 1/n
        return Kappa(None, None, None, agreement, n, LEVEL)
    estimate = (agreement - chance) / (1 - chance)
    half = float(special.ndtri(0.5 + LEVEL / 2)) * _error(table, estimate, chance, n)
    if half < 1e-9:
        return Kappa(estimate, None, None, agreement, n, LEVEL)
    return Kappa(estimate, max(-1.0, estimate - half), min(1.0, estimate + half), agreement, n, LEVEL)


def _error(table: npt.NDArray[np.float64], estimate: float, chance: float, n: int) -> float:
    """Return the standard error of kappa.

    ``table`` [L, L] holds the shares of pairs of labels by two judges, ``estimate`` is kappa, ``chance`` the agreement
    expected by chance, ``n`` the number of pairs.
    """
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    diagonal = np.sum(np.diag(table) * (1 - (rows + columns) * (1 - estimate)) ** 2)
    # labels i and j are each multiplied by the other judge's share: column i, row j
    crossed = table * (columns[:, None] + rows[None, :]) ** 2
    off_diagonal = (1 - estimate) ** 2 * (crossed.sum() - np.trace(crossed))
    centre = (estimate - chance * (1 - estimate)) ** 2
    return float(np.sqrt(max(diagonal + off_diagonal - centre, 0.0) / n) / (1 - chance))


# --- the errors of a judge -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JudgeError:
    """The errors of a judge on one arm's answers: its sensitivity and its specificity.

    ``informedness`` is sensitivity + specificity - 1 (Youden's J), ``informedness_low`` its lower limit.
    """

    sensitivity: Proportion
    specificity: Proportion
    informedness: float | None
    informedness_low: float
    method: str = "Clopper-Pearson; J by MOVER"
    source: str = "Rogan & Gladen 1978"


@dataclass(frozen=True, slots=True)
class DifferentialBias:
    """The largest drift that unequal errors of the judge in the two arms could cause, in score units.

    ``bound`` follows from the estimated error rates; it is None if an arm lacks human labels of 0 or of 1. ``upper`` is
    its upper confidence limit. The gaps are those of sensitivity and specificity, candidate - reference.
    """

    bound: float | None
    upper: float
    sensitivity_gap: Interval
    specificity_gap: Interval
    method: str = "rate*|sensitivity gap| + (1-rate)*|specificity gap|, MOVER"
    source: str = "Rogan & Gladen 1978; Zou & Donner 2008"


def judge_error(judged: npt.ArrayLike, human: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> JudgeError:
    """Return the error rates of one arm from the judge's and the human's 0/1 labels [n] of the same transcripts.

    ``weights`` [n] are the numbers of transcripts that each labelled one represents. The intervals are computed for an
    effective number of labels: each label counts as its weight divided by the largest weight. The idea is that of Korn
    & Graubard 1998, whose effective number is larger.
    """
    label, truth = np.asarray(judged), np.asarray(human)
    share = np.ones(len(label)) if weights is None else np.asarray(weights, dtype=np.float64)
    share = share / share.max(initial=1e-300)  # 1 for the heaviest; ``initial`` avoids dividing by 0 without labels
    assert label.shape == truth.shape == share.shape, (label.shape, truth.shape, share.shape)
    assert np.isin(label, (0, 1)).all(), "labels are 0 or 1"
    assert np.isin(truth, (0, 1)).all(), "labels are 0 or 1"
    sensitivity, specificity = (
        clopper_pearson(float(share[(label == kind) & (truth == kind)].sum()), float(share[truth == kind].sum()))
        for kind in (1, 0)
    )
    if sensitivity.estimate is None or specificity.estimate is None:
        # no estimate; the lower limit follows from both limits
        return JudgeError(sensitivity, specificity, None, sensitivity.low + specificity.low - 1)
    both = mover([_part(1.0, sensitivity), _part(1.0, specificity)])
    return JudgeError(sensitivity, specificity, both.estimate - 1, both.low - 1)


def differential_bias(reference: JudgeError, candidate: JudgeError, rate: float) -> DifferentialBias:
    """Return the drift that the judge's errors alone could cause if ``rate`` is the true rate of desired answers.

    A cell cannot pass on the judge's labels if ``upper`` of the result exceeds half the margin.
    """
    assert 0 <= rate <= 1, rate
    pairs = (
        (reference.sensitivity, candidate.sensitivity),
        (reference.specificity, candidate.specificity),
    )
    gaps = [_gap(*pair) for pair in pairs]
    total = mover([_absolute(weight, gap) for weight, gap in zip((rate, 1 - rate), gaps, strict=True)])
    has_labels = all(p.estimate is not None for pair in pairs for p in pair)
    return DifferentialBias(
        bound=total.estimate if has_labels else None,
        upper=min(1.0, total.high),
        sensitivity_gap=Interval(gaps[0].low, gaps[0].high),
        specificity_gap=Interval(gaps[1].low, gaps[1].high),
    )


def _part(weight: float, proportion: Proportion) -> WeightedEstimate:
    assert proportion.estimate is not None
    return WeightedEstimate(weight, proportion.estimate, proportion.low, proportion.high)


def _gap(reference: Proportion, candidate: Proportion) -> WeightedEstimate:
    """Return the gap candidate - reference of one rate (sensitivity or specificity) of the judge, with its interval.

    If an arm has no labels, the interval is the widest that is possible.
    """
    if reference.estimate is None or candidate.estimate is None:
        return WeightedEstimate(1.0, 0.0, candidate.low - reference.high, candidate.high - reference.low)
    gap = mover([_part(1.0, candidate), _part(-1.0, reference)])
    return WeightedEstimate(1.0, gap.estimate, gap.low, gap.high)


def _absolute(weight: float, gap: WeightedEstimate) -> WeightedEstimate:
    """Return |gap| with its ``weight``, as one part of a MOVER sum.

    If the interval of the gap includes 0, that of |gap| begins at 0.
    """
    return WeightedEstimate(weight, abs(gap.estimate), max(0.0, gap.low, -gap.high), max(abs(gap.low), abs(gap.high)))
