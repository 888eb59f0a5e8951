"""How far behaviour moved: frozen values. Rates and drifts are in score units: 0.05 = 5 pp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvaudit.reports.verdict.reference_answers import Answers
from kvaudit.reports.verdict.comparison import Comparison, Look, Reason
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.judges import JudgeError

CellPlace = tuple[str, str, str, str, int]  # estimand, arm, policy, suite, context_tokens


@dataclass(frozen=True)
class CellName:
    """Which cell, and what everything that stands in one begins with."""

    estimand: str  # alike | deployed | serving | interaction | selectivity | change
    arm: str
    policy: str
    suite: str
    context_tokens: int

    @property
    def place(self) -> CellPlace:
        """The same for two things of one cell."""
        return self.estimand, self.arm, self.policy, self.suite, self.context_tokens

    @property
    def name(self) -> CellName:
        """The name and nothing else."""
        return CellName(*self.place)


@dataclass(frozen=True)
class Cell:
    """One arm under one policy on one suite at one length, averaged over its seeds.

    ``rate`` counts degenerate and unscored samples as 0; ``rate_if_desired`` counts unscored ones as 1. Bytes
    are counted in two ways, each held against itself: ``kv_ratio`` is what was allocated and ``kv_live_ratio`` what the
    entries took, per byte of the same tokens uncompressed, over the same under policy ``none`` (1 for ``none``; None
    where ``none`` was not served, or records hold no live bytes). ``survival`` is the kept share by role.
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
    retention: float | None  # None, as all bytes, where an engine shows nobody its cache
    kv_bytes_peak: float | None  # mean bytes per row
    kv_bytes_dense: float | None
    kv_bytes_live: float | None
    kv_ratio: float | None
    kv_live_ratio: float | None
    survival: dict[str, float]
    new_tokens: float
    unsure: int = 0  # samples of which the grade is only the best guess of a judge


@dataclass(frozen=True)
class Rates:
    """The two rates of a difference, averaged over paired seeds."""

    reference: float
    candidate: float

    def told(self, *, wanted: bool) -> tuple[float, float]:
        """Both as what happened is told: of what is not wanted how often it happened, and not how often it did not."""
        return (self.reference, self.candidate) if wanted else (1 - self.reference, 1 - self.candidate)


@dataclass(frozen=True)
class ClusterSums:
    """Differences of one suite summed inside their clusters: what sign-flips and the template rule need.

    A contrast of several suites has one for each, with the weight of its mean; clusters of one name are the same.
    """

    suite: str
    weight: float
    clusters: tuple[str, ...]
    sums: npt.NDArray[np.float64]  # [C]
    counts: npt.NDArray[np.float64]  # [C] items, or pairs of answers that people labelled


@dataclass(frozen=True)
class Unwanted:
    """How often what is not wanted happened on both sides of a difference, summed inside its clusters.

    ``before`` is what happened with the reference alone, ``after`` with the candidate alone, over all items.
    """

    reference: npt.NDArray[np.float64]  # [C]
    candidate: npt.NDArray[np.float64]  # [C]
    before: float
    after: float
    counts: npt.NDArray[np.float64]  # [C] items


@dataclass(frozen=True)
class SeedDrift:
    """The drift of one paired training seed by itself, with the bounds that the gate's interval gives for it alone."""

    seed: int
    estimate: float
    low: float
    high: float
    lower: float
    upper: float
    pvalue_drop: float


@dataclass(frozen=True)
class People:
    """What human labels of a cell's answers say of the judge.

    ``discordant`` pairs are those that the judge tells apart, all of them labelled; ``concordant`` how many of the
    others were drawn and labelled. ``templates`` hold others, and nobody looked at one in ``unseen`` of them. ``bias``
    is the largest drift that the judge's gap between the arms makes by itself (None without labels of a kind),
    ``bias_upper`` its upper limit.
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


def judge_may_pass(people: People, margin: float) -> bool:
    """Whether the judge's own bias is at most half the margin, so that its labels alone may pass the cell."""
    return people.bias_upper <= margin / 2


@dataclass(frozen=True)
class Contrast(CellName):
    """One estimand in one cell; ``reasons`` is non-empty exactly when ``effect`` is None.

    ``effect`` is about the checkpoints at hand, averaged over paired seeds, and ``sums`` are its templates; ``recipe``
    (three seeds or more) adds the seed variance. ``worst`` and ``best`` are the estimate with unscored samples counted
    against and for the candidate, and the bounds of ``effect`` hold with both. It is that of a judge's best guesses;
    its bounds also hold with every answer that the judge was unsure of counted as desired, and as not, on both sides.
    ``readings`` are the templates under each of these. ``seed_noise`` is the variance that one
    seed's estimate has from its items alone, ``by_seed`` every seed by itself where several are averaged.
    """

    effect: Effect | None = None
    recipe: Effect | None = None
    seeds: tuple[int, ...] = ()
    seed_estimates: tuple[float, ...] = ()
    worst: float | None = None
    best: float | None = None
    reasons: tuple[Reason, ...] = ()
    looked: Look | None = field(default=None, compare=False, repr=False)  # of a run in rounds; not written
    rates: Rates | None = None  # alike, deployed and serving only: an interaction has four sides
    unread: Rates | None = None  # of the same: answers to the metric's own items that could not be read, or be scored
    sums: tuple[ClusterSums, ...] = field(default=(), compare=False, repr=False)  # not written
    readings: tuple[tuple[ClusterSums, ...], ...] = field(default=(), compare=False, repr=False)  # not written
    judged: Effect | None = None  # by the judge's labels, where human labels give ``effect`` and ``sums``
    judged_sums: tuple[ClusterSums, ...] = field(default=(), compare=False, repr=False)  # not written
    people: People | None = None  # the judge held against those human labels
    churn: float | None = None  # P(candidate's answer is not the reference's), of alike, deployed and serving
    rerun: float | None = None  # A/A: the same of two answers of one checkpoint; None with one sample
    seed_noise: float = 0.0  # of less than two seeds
    by_seed: tuple[SeedDrift, ...] = ()
    seed_sums: tuple[tuple[ClusterSums, ...], ...] = field(default=(), compare=False, repr=False)  # not written
    # by the judge's labels, then by each reading of what it was unsure of; none of an interaction. Not written
    unwanted: tuple[Unwanted, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Drift:
    """Every rate and every difference of a run. It knows no verdict: ``gate.decide`` makes one of it, once.

    ``reasons`` are run-wide breaches of the data contract: any of them makes a verdict INVALID. ``alpha`` is the level
    of the one-sided bounds, ``weights`` the sha256 of the reference's checkpoints by seed, as the records name them.
    ``unclustered`` is there where nothing says which items share a template, so that each stands for itself.
    ``answers`` are the reference's own under each serving policy: what its controls are read from.
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
