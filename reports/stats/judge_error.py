"""What a judge's mistakes can do to a drift, from human labels of both arms.

Rogan & Gladen 1978. A judge that errs alike in both arms only shrinks a drift; one that errs differently moves it by up
to rate*|gap in sensitivity| + (1-rate)*|gap in specificity|. ``adjudication`` undoes either with human labels.
No statistic: two judges' error rates from labels, without item differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.stats.binomial import Proportion, clopper_pearson
from reports.stats.effect import LEVEL
from reports.stats.mover import Part, mover
from reports.stats.tango import Interval


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
