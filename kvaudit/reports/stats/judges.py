"""The judge held against people: agreement, error rates, and what its mistakes can do to a drift.

Agreement is Cohen's kappa (Cohen 1960; large-sample variance of Fleiss, Cohen & Everitt 1969, Psychological Bulletin
72:323). A judge that errs alike in both arms only shrinks a drift; one that errs differently moves it by up to
rate*|gap in sensitivity| + (1-rate)*|gap in specificity| (Rogan & Gladen 1978). ``adjudication`` undoes either.
No statistic: what is said of a judge, and how far it may be off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.binomial import Proportion, clopper_pearson
from kvaudit.reports.stats.effect import LEVEL
from kvaudit.reports.stats.mover import Part, mover
from kvaudit.reports.stats.tango import Interval


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
    table = np.zeros((len(known), len(known)))  # [L, L] shares: the first judge's label by row, the second's by column
    np.add.at(table, (codes[: len(one)], codes[len(one) :]), 1 / len(one))
    agreement = float(np.trace(table))
    rows, columns = table.sum(axis=1), table.sum(axis=0)  # each [L]
    chance = float(rows @ columns)
    if max(rows.max(), columns.max()) > 1 - 0.5 / len(one):  # one label throughout; with one exception 1 - 1/n
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
    # labels i and j each by the other judge's share: column i, row j
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


def judge_error(
    judged: npt.ArrayLike, human: npt.ArrayLike, weights: npt.ArrayLike | None = None, *, level: float = LEVEL
) -> JudgeError:
    """Error rates of one arm from the judge's and the human's 0/1 labels [n] of the same transcripts.

    ``weights`` [n] say how many transcripts each stands for. The intervals are those of as many labels as would be
    left if each were kept with its share of the largest weight (Korn & Graubard 1998, at a smaller effective size).
    """
    said, true = np.asarray(judged), np.asarray(human)
    share = np.ones(len(said)) if weights is None else np.asarray(weights, dtype=np.float64)
    share = share / share.max(initial=1e-300)  # 1 for the heaviest; without labels there is nothing to divide by
    assert said.shape == true.shape == share.shape, (said.shape, true.shape, share.shape)
    assert np.isin(said, (0, 1)).all(), "labels are 0 or 1"
    assert np.isin(true, (0, 1)).all(), "labels are 0 or 1"
    sensitivity, specificity = (
        clopper_pearson(
            float(share[(said == kind) & (true == kind)].sum()), float(share[true == kind].sum()), level=level
        )
        for kind in (1, 0)
    )
    if sensitivity.estimate is None or specificity.estimate is None:
        # no estimate, and the least that both limits leave
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
    # an interval that holds 0 begins there
    least = max(0.0, gap.low, -gap.high)
    return Part(weight, abs(gap.estimate), least, max(abs(gap.low), abs(gap.high)))
