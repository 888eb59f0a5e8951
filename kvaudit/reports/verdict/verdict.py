"""The statuses of a verdict, their order and exit codes, and the decided cells that a verdict is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellName, Contrast, Drift, Rates, SeedDrift
from kvaudit.reports.verdict.controls import Control
from kvaudit.reports.verdict.reasons import Reason, ReasonCode
from kvaudit.reports.verdict.rules import WARN, Ratio, Rules
from kvaudit.reports.verdict.waivers import Waiver


class Status(StrEnum):
    """The status of a cell or run. WAIVED: it does not pass, and a named person accepted that."""

    PASS = "PASS"  # noqa: S105
    PASS_NOTED = "PASS*"  # noqa: S105 - a drop is detectable, and within the margin
    FAIL = "FAIL"
    NOT_MEASURABLE = "NOT MEASURABLE"  # the reference has nothing to lose here, or cannot do the task (``controls``)
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    WAIVED = "WAIVED"


class Larger(StrEnum):
    """How many times the templates of a run would pass with power .8 if there were no drift."""

    TWICE = "about twice"
    TEN_TIMES = "about ten times"
    NEVER = "not at this margin"


PASSED = (Status.PASS, Status.PASS_NOTED)
EXIT_CODES = {
    Status.PASS: 0,
    Status.PASS_NOTED: 0,
    Status.WAIVED: 0,
    Status.FAIL: 3,
    Status.INCONCLUSIVE: 4,
    Status.INVALID: 5,
    Status.NOT_MEASURABLE: 6,
}
PRECEDENCE = (
    Status.FAIL,
    Status.INVALID,
    Status.INCONCLUSIVE,
    Status.NOT_MEASURABLE,
    Status.WAIVED,
    Status.PASS_NOTED,
    Status.PASS,
)


@dataclass(frozen=True)
class Decision(CellName):
    """The verdict of one cell. ``recipe`` is the verdict with seed variance added, None with fewer than 3 seeds.

    ``status`` follows from the data, by human labels if there are any; a ``waiver`` does not change it. For the
    estimand ``worst`` the numbers are those of the worst of ``policies``.
    """

    gated: bool
    status: Status
    recipe: Status | None
    reasons: tuple[Reason, ...]
    margin: float | None
    pvalue_drop: float | None  # adjusted over the gated cells by the verdict's ``adjustment``
    pvalue_holm: float | None  # the same by Holm
    clusters_required: int | None
    larger: Larger | None  # of an open cell; None if the estimate is past the margin, and for several suites
    blind_spot: float | None
    effect: Effect | None
    rates: Rates | None
    adjusted_by: str = "max-T"
    pvalue_floor: float = 0.0  # no adjusted p-value can be smaller
    worst: float | None = None  # the estimate with unscored samples counted against the candidate
    best: float | None = None
    template_bound: float | None = None  # the lowest drift that the template rule leaves open, if the interval passes
    worst_seed: SeedDrift | None = None  # the seed with the lowest drift, if several are averaged
    policies: tuple[str, ...] = ()
    statement: str = ""
    waiver: Waiver | None = None
    judged: Status | None = None  # by the judge's labels, if human labels decide
    ratio: Ratio | None = None  # if a ratio decides; ``margin`` is then the loss that its limit allows

    @property
    def is_measurable(self) -> bool:
        """Whether the reference could show a loss in this cell."""
        return self.status is not Status.NOT_MEASURABLE

    @property
    def is_unclustered(self) -> bool:
        """Whether this cell cannot pass only because the data do not name the templates of its items."""
        return any(reason.code == ReasonCode.NO_CLUSTERS for reason in self.reasons)

    @property
    def standing(self) -> Status:
        """The status that counts for the verdict: WAIVED with a waiver."""
        return Status.WAIVED if self.waiver else self.status


@dataclass(frozen=True)
class ArmVerdict:
    """An arm's verdict over its gated cells, and by suite; ``recipe`` adds seed variance, None below 3 seeds."""

    arm: str
    status: Status
    recipe: Status | None
    suites: dict[str, Status]
    unwaived: Status


@dataclass(frozen=True)
class Adjustment:
    """How p-values are adjusted for the family: the method, why it is not max-T, and the smallest possible p-value.

    ``critical`` is how many standard errors below 0 the lowest cell must lie for a FAIL.
    """

    method: str
    reason: str
    floor: float
    critical: float


@dataclass(frozen=True)
class Verdict:
    """The run's verdict; ``headline`` is the index of the decision that the banner quotes, None if INVALID.

    ``status`` is about the checkpoints of this run, averaged over their seeds; ``unwaived`` is the same without
    waivers. ``recipe`` is the decision with seed variance added ("training this way does this"), None with fewer than
    three paired seeds.
    """

    status: Status
    exit_code: int
    recipe: Status | None
    reasons: tuple[Reason, ...]
    arms: tuple[ArmVerdict, ...]
    decisions: tuple[Decision, ...]
    headline: int | None
    unwaived: Status
    adjustment: Adjustment
    judged: Status | None = None  # by the judge's labels alone, if people labelled answers
    controls: tuple[Control, ...] = ()  # of every metric with a margin, on the uncompressed reference

    @property
    def gated(self) -> list[Decision]:
        """The cells that decide the verdict."""
        return [d for d in self.decisions if d.gated]

    @property
    def head(self) -> Decision | None:
        """The decision that the banner quotes, None if no cell has a number."""
        return None if self.headline is None else self.decisions[self.headline]


def exit_code(status: Status, rules: Rules) -> int:
    """Return the exit code of a gate by these rules, which may turn INCONCLUSIVE and NOT MEASURABLE into warnings."""
    actions = {Status.INCONCLUSIVE: rules.on_inconclusive, Status.NOT_MEASURABLE: rules.not_measurable}
    return 0 if actions.get(status) == WARN else EXIT_CODES[status]


def worst_exit_code(statuses: Iterable[Status], rules: Rules) -> int:
    """Return the exit code of several statuses: that of the worst which is not only a warning."""
    codes = (exit_code(status, rules) for status in sorted(set(statuses), key=PRECEDENCE.index))
    return next((code for code in codes if code), 0)


def worst(statuses: Iterable[Status]) -> Status:
    """Return the status that decides, by precedence."""
    given = set(statuses)
    return next(status for status in PRECEDENCE if status in given)


def worst_recipe(statuses: Sequence[Status | None]) -> Status | None:
    """Return the worst recipe verdict, None if any is missing."""
    verdicts = [status for status in statuses if status]
    return worst(verdicts) if verdicts and len(verdicts) == len(statuses) else None


@dataclass(frozen=True)
class Decided:
    """A run with its verdict: the drift, the rules, the verdict and the waivers."""

    drift: Drift
    rules: Rules
    verdict: Verdict
    waivers: tuple[Waiver, ...] = ()

    @property
    def comparison(self) -> Comparison:
        """The two sides of every difference."""
        return self.drift.comparison

    @property
    def contrasts(self) -> Iterator[Contrast]:
        """The contrasts of suites and of the facets with a margin; other facets have their own section."""
        facets = self.comparison.facets
        return (c for c in self.drift.contrasts if c.suite not in facets or self.rules.holds(c.suite))
