"""The frozen, JSON-able values a report is made of. Scores and drifts are in score units: 0.05 = 5 pp."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from reports.analysis.displacement import Displacement
from reports.analysis.results import Analysis
from reports.calibration.stamp import Stamp
from reports.drift.plan import Plan
from reports.gate.waivers import Waiver
from reports.stats.effect import Effect

if TYPE_CHECKING:
    from reports.labels.panel import Adjudication

FORMAT = 1


@dataclass(frozen=True)
class Reason:
    """Why there is no number: a code for programs, a sentence for people."""

    code: str
    text: str


@dataclass(frozen=True)
class Cell:
    """One arm under one policy on one suite at one length, averaged over its seeds.

    ``rate`` counts degenerate and unscored samples as 0; ``rate_if_desired`` counts unscored ones as 1. ``kv_ratio``
    is allocated peak bytes over the bytes of an uncompressed cache; ``survival`` the kept share by role.
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
    retention: float
    kv_bytes_peak: float  # mean bytes per row
    kv_bytes_dense: float
    kv_ratio: float | None
    survival: dict[str, float]
    new_tokens: float


@dataclass(frozen=True)
class Rates:
    """The two rates of a difference, averaged over paired seeds; ``reference_lower`` is the one-sided bound."""

    reference: float
    candidate: float
    reference_lower: float


@dataclass(frozen=True)
class ClusterSums:
    """Item differences of one suite summed inside their clusters: what a sign-flip over many cells needs.

    A contrast of several suites has one for each, with the weight of its mean; clusters of one name are the same.
    """

    suite: str
    weight: float
    clusters: tuple[str, ...]
    sums: npt.NDArray[np.float64]  # [C]
    counts: npt.NDArray[np.float64]  # [C] items


@dataclass(frozen=True)
class Contrast:
    """One estimand in one cell; ``reasons`` is non-empty exactly when ``effect`` is None.

    ``effect`` is about the checkpoints at hand, averaged over paired seeds; ``recipe`` (three seeds or more) adds the
    seed variance. ``worst`` and ``best`` are the estimate with unscored samples counted against and for the candidate.
    """

    estimand: str  # E1 | E2 | E4 | E5 | selectivity
    arm: str
    policy: str
    suite: str
    context_tokens: int
    effect: Effect | None
    recipe: Effect | None
    seeds: tuple[int, ...]
    seed_estimates: tuple[float, ...]
    worst: float | None
    best: float | None
    reasons: tuple[Reason, ...]
    rates: Rates | None = None  # E1, E2 and E4 only: an interaction has four sides
    sums: tuple[ClusterSums, ...] = field(default=(), compare=False, repr=False)  # not written
    judged: Effect | None = None  # by the judge's labels, where human labels give ``effect``
    churn: float | None = None  # E7: P(candidate's answer is not the reference's), of E1, E2 and E4


@dataclass(frozen=True)
class Curve:
    """Telemetry of one arm: mean, lowest and highest over its seeds at each step that is kept."""

    arm: str
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    series: dict[str, tuple[float | None, ...]]
    lowest: dict[str, tuple[float | None, ...]]
    highest: dict[str, tuple[float | None, ...]]
    mean: dict[str, float]  # over all seeds and steps
    first: dict[str, float]  # mean over seeds of the first tenth of the steps
    last: dict[str, float]  # mean over seeds of the last tenth of the steps
    largest: dict[str, float]  # over all seeds and steps


@dataclass(frozen=True)
class Turn:
    """One message of an example; ``text`` is the model's or the suite's and must be escaped."""

    role: str
    text: str


@dataclass(frozen=True)
class Example:
    """An item the reference got right and the candidate lost."""

    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    item_id: str
    cluster_id: str
    loss: float
    outcome: str
    candidate: tuple[Turn, ...]
    reference_answer: str


@dataclass(frozen=True)
class Report:
    """Everything that is said about a run. The verdict is a pure function of it: ``gate.decide(report)``."""

    run: str
    plan: Plan
    reasons: tuple[Reason, ...]  # run-wide: any of them makes the verdict INVALID
    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...]
    curves: tuple[Curve, ...]
    examples: tuple[Example, ...]
    problems: tuple[str, ...]
    n_records: int
    provenance: dict[str, Any] = field(default_factory=dict)
    waivers: tuple[Waiver, ...] = ()
    analysis: Analysis = field(default_factory=Analysis)
    displacement: tuple[Displacement, ...] = ()
    adjudication: Adjudication | None = None  # what people said of the judge's labels
    calibration: Stamp | None = None  # how often the gate is wrong
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, without the cluster sums."""
        body = asdict(replace(self, contrasts=tuple(replace(c, sums=()) for c in self.contrasts)))
        for row in body["contrasts"]:
            del row["sums"]
        return body
