"""The values of a drift: how far behaviour moved. Rates and drifts are in score units (0.05 = 5 pp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.judges import JudgeError
from kvaudit.reports.verdict.comparison import Comparison, Look
from kvaudit.reports.verdict.reasons import Reason
from kvaudit.reports.verdict.reference_answers import Answers

CellPlace = tuple[str, str, str, str, int]  # estimand, arm, policy, suite, context_tokens


@dataclass(frozen=True)
class CellName:
    """The cell that a contrast or a decision is about."""

    estimand: str  # alike | deployed | serving | interaction | selectivity | change
    arm: str
    policy: str
    suite: str
    context_tokens: int

    @property
    def place(self) -> CellPlace:
        """The cell as a tuple."""
        return self.estimand, self.arm, self.policy, self.suite, self.context_tokens

    @property
    def name(self) -> CellName:
        """The cell alone, without what a subclass adds."""
        return CellName(*self.place)


@dataclass(frozen=True)
class Cell:
    """One arm under one policy on one suite at one length, averaged over its seeds.

    ``rate`` counts degenerate and unscored samples as 0; ``rate_if_desired`` counts unscored ones as 1. ``kv_ratio``
    (allocated bytes) and ``kv_live_ratio`` (bytes of the entries) are each divided by the bytes of the same tokens
    uncompressed, and by the same ratio under policy ``none``: so they are 1 for ``none``, and None where ``none`` was
    not served or records have no live bytes. ``survival`` is the kept share by role.
    """

    arm: str
    policy: str
    suite: str
    context_tokens: int
    seeds: tuple[int, ...]
    n_items: int
    n_clusters: int
    n_samples: int
    rate: float
    rate_if_desired: float
    seed_rates: tuple[float, ...]
    outcomes: dict[str, int]
    retention: float | None  # None, like all bytes, where an engine does not show its cache
    kv_bytes_peak: float | None  # mean bytes per row
    kv_bytes_dense: float | None
    kv_bytes_live: float | None
    kv_ratio: float | None
    kv_live_ratio: float | None
    survival: dict[str, float]
    new_tokens: float
    unsure: int = 0  # samples whose grade is only the best guess of a judge


@dataclass(frozen=True)
class Rates:
    """The two rates of a difference, averaged over paired seeds."""

    reference: float
    candidate: float

    def as_event_rates(self, *, wanted: bool) -> tuple[float, float]:
        """Return both as rates of the event that a facet names: of an unwanted event 1 - rate."""
        return (self.reference, self.candidate) if wanted else (1 - self.reference, 1 - self.candidate)


@dataclass(frozen=True)
class ClusterSums:
    """The differences of one suite summed by cluster, for sign-flips and the template rule.

    A contrast of several suites has one of these for each, with its weight. Clusters of equal name are the same.
    """

    suite: str
    weight: float
    clusters: tuple[str, ...]
    sums: npt.NDArray[np.float64]  # [C]
    counts: npt.NDArray[np.float64]  # [C] items, or pairs of answers that people labelled


@dataclass(frozen=True)
class UnwantedEvents:
    """The unwanted events on both sides of a difference, summed by cluster.

    ``before`` counts those of the reference alone, ``after`` those of the candidate alone, over all items.
    """

    reference: npt.NDArray[np.float64]  # [C]
    candidate: npt.NDArray[np.float64]  # [C]
    before: float
    after: float
    counts: npt.NDArray[np.float64]  # [C] items


@dataclass(frozen=True)
class SeedDrift:
    """The drift of one paired training seed, with its own interval and bounds."""

    seed: int
    estimate: float
    low: float
    high: float
    lower: float
    upper: float
    pvalue_drop: float


@dataclass(frozen=True)
class LabelSummary:
    """The judge of a cell compared with human labels of its answers.

    ``discordant`` counts the pairs that the judge grades differently, all of them labelled; ``concordant`` those drawn
    from the others and labelled. ``templates`` counts the templates that have others, ``unseen`` those of which nobody
    labelled one. ``bias`` is the largest drift that the judge's errors alone could make (None where one kind of label
    is missing), ``bias_upper`` its upper limit.
    """

    pairs: int
    discordant: int
    concordant: int
    templates: int
    unseen: int
    reference: JudgeError
    candidate: JudgeError
    bias: float | None
    bias_upper: float


def judge_may_pass(people: LabelSummary, margin: float) -> bool:
    """Whether the judge's bias is at most half the margin, so that its labels alone may pass the cell."""
    return people.bias_upper <= margin / 2


@dataclass(frozen=True)
class Contrast(CellName):
    """One estimand in one cell; ``reasons`` is non-empty exactly when ``effect`` is None.

    ``effect`` is about the checkpoints at hand, averaged over paired seeds, and ``sums`` are its templates; ``recipe``
    (three seeds or more) adds the seed variance. The estimate takes a judge's best guess for answers that it was unsure
    of; its bounds also hold with all of these counted as desired, or as undesired, on both sides, and with unscored
    answers counted for and against the candidate (``best``, ``worst``). ``readings`` are the templates under each of
    these. ``seed_noise`` is the variance of one seed's estimate from its items alone, ``by_seed`` the drift of every
    seed where several are averaged.
    """

    effect: Effect | None = None
    recipe: Effect | None = None
    seeds: tuple[int, ...] = ()
    seed_estimates: tuple[float, ...] = ()
    worst: float | None = None
    best: float | None = None
    reasons: tuple[Reason, ...] = ()
    look: Look | None = field(default=None, compare=False, repr=False)  # of a run in rounds; not written
    rates: Rates | None = None  # of alike, deployed and serving: an interaction has four sides
    unread: Rates | None = None  # of the same: shares of answers that could not be read or scored
    sums: tuple[ClusterSums, ...] = field(default=(), compare=False, repr=False)  # not written
    readings: tuple[tuple[ClusterSums, ...], ...] = field(default=(), compare=False, repr=False)  # not written
    judged: Effect | None = None  # by the judge's labels; ``effect`` and ``sums`` are then by human labels
    judged_sums: tuple[ClusterSums, ...] = field(default=(), compare=False, repr=False)  # not written
    people: LabelSummary | None = None  # the judge compared with those human labels
    churn: float | None = None  # P(the candidate's grade differs from the reference's), of alike, deployed and serving
    rerun: float | None = None  # A/A: the same for two answers of one checkpoint; None with one sample
    seed_noise: float = 0.0
    by_seed: tuple[SeedDrift, ...] = ()
    seed_sums: tuple[tuple[ClusterSums, ...], ...] = field(default=(), compare=False, repr=False)  # not written
    # by the judge's labels, then by each reading of uncertain answers; an interaction has none. Not written
    unwanted: tuple[UnwantedEvents, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Drift:
    """Every rate and every difference of a run; ``decide`` makes the verdict from it.

    ``reasons`` are run-wide breaches of the data contract: any of them makes the verdict INVALID. ``alpha`` is the
    level of the one-sided bounds, ``weights`` the sha256 of the reference's checkpoints by seed, as in the records.
    ``unclustered`` is set where nothing says which items share a template, so that each item is its own cluster.
    ``answers`` are those of the reference under each serving policy, from which its controls are made.
    """

    run: str
    comparison: Comparison
    alpha: float
    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...]
    reasons: tuple[Reason, ...]
    n_records: int
    weights: Mapping[int, frozenset[str]] = field(default_factory=dict)
    unclustered: Reason | None = None
    answers: Mapping[str, tuple[Answers, ...]] = field(default_factory=dict, compare=False, repr=False)  # not written
