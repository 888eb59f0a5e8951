"""The statuses of a verdict, their order and exit codes, the decided cells of a verdict, and waivers of its cells.

By a waiver a named person accepts cells that do not pass, until a date at most a year ahead; INVALID is never waived:

waivers:
- who: Ada Byron
  why: regression is known and fixed on the branch that ships
  expires: 2026-12-31
  status: [FAIL]
  cells: {suite: refusal, arm: naive, policy: none, context_tokens: 192, estimand: alike}

All given selectors must match; an omitted one matches everything, and at least one is needed. ``suite`` is a metric: a
suite's score, or one facet by its full name (refusal.unsafe), which a waiver of the suite does not cover.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.facets import FORMER_CONTRASTS, GATED, PARITY
from kvaudit.core.files import YamlFile, check_keys, read_yaml
from kvaudit.core.policy_names import match_policies
from kvaudit.core.text import short_repr, short_text
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellName, Contrast, Drift, Rates, SeedDrift
from kvaudit.reports.verdict.controls import Control
from kvaudit.reports.verdict.reasons import Reason, ReasonCode
from kvaudit.reports.verdict.rules import WARN, Ratio, Rules


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
    """How many times as many templates a cell needs to pass with power .8 if there is no drift, in words."""

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
    """The verdict on one cell. ``recipe`` is the verdict with seed variance added, None with fewer than 3 seeds.

    ``status`` follows from the data, by human labels if there are any; a ``waiver`` does not change it. If the cell's
    difference is ``worst``, the numbers are those of the worst of its ``policies``.
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
        """Whether a PASS of this cell was held back because the data do not name the templates of its items."""
        return any(reason.code == ReasonCode.NO_CLUSTERS for reason in self.reasons)

    @property
    def standing(self) -> Status:
        """The status after waivers: WAIVED with a waiver, else ``status``."""
        return Status.WAIVED if self.waiver else self.status

    @property
    def room(self) -> float:
        """How far the confidence bound is from the margin, in score units: negative beyond it, -inf without a number.

        Under "parity", which limits drift to either side, it is the smaller of two.
        """
        if self.effect is None:
            return -inf
        bound = min(self.effect.lower, -self.effect.upper) if self.estimand == PARITY else self.effect.lower
        return bound + (self.margin or 0.0)


@dataclass(frozen=True)
class ArmVerdict:
    """The verdict of an arm over its gated cells, and by suite.

    ``status`` is about the checkpoints. ``recipe`` is the same with seed variance added, None with fewer than 3 seeds;
    ``unwaived`` is ``status`` without waivers.
    """

    arm: str
    status: Status
    recipe: Status | None
    suites: dict[str, Status]
    unwaived: Status


@dataclass(frozen=True)
class Adjustment:
    """How p-values are adjusted for multiple testing.

    ``method`` is max-T, or Holm for the ``reason`` given; ``floor`` is the smallest possible p-value. ``critical`` is
    how many standard errors below 0 the lowest cell must lie for a FAIL, infinite without cells.
    """

    method: str
    reason: str
    floor: float
    critical: float


@dataclass(frozen=True)
class Verdict:
    """The run's verdict; ``headline`` is the index of the decision that the banner quotes, None if INVALID.

    ``status`` is about the checkpoints of this run, averaged over their seeds; ``unwaived`` is the same without
    waivers. ``recipe`` is the status of the claim about any seed ("training this way does this"), with the variance
    between seeds added; None with fewer than three paired seeds.
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
        """The decisions on the cells that decide the verdict."""
        return [d for d in self.decisions if d.gated]

    @property
    def head(self) -> Decision | None:
        """The decision that the banner quotes, None if no cell has an effect."""
        return None if self.headline is None else self.decisions[self.headline]


def exit_code(status: Status, rules: Rules) -> int:
    """Return the exit code of a gate; the rules may turn INCONCLUSIVE and NOT MEASURABLE into warnings (0)."""
    actions = {Status.INCONCLUSIVE: rules.on_inconclusive, Status.NOT_MEASURABLE: rules.not_measurable}
    return 0 if actions.get(status) == WARN else EXIT_CODES[status]


def worst_exit_code(statuses: Iterable[Status], rules: Rules) -> int:
    """Return the exit code of the worst status whose code is not 0; 0 if every status passes or only warns."""
    codes = (exit_code(status, rules) for status in sorted(set(statuses), key=PRECEDENCE.index))
    return next((code for code in codes if code), 0)


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst status, which is the one that comes first in ``PRECEDENCE``."""
    return min(statuses, key=PRECEDENCE.index)


def worst_recipe(statuses: Sequence[Status | None]) -> Status | None:
    """Return the worst of the statuses of recipes (ways of training); None if any of them is None."""
    verdicts = [status for status in statuses if status]
    return worst(verdicts) if verdicts and len(verdicts) == len(statuses) else None


@dataclass(frozen=True)
class Decided:
    """A decided run: its drift, rules, waivers and verdict, from which its report follows."""

    drift: Drift
    rules: Rules
    verdict: Verdict
    waivers: tuple[Waiver, ...] = ()

    @property
    def comparison(self) -> Comparison:
        """The comparison that the run makes: its arms and policies, and what each is compared with."""
        return self.drift.comparison

    @property
    def contrasts(self) -> Iterator[Contrast]:
        """The measured differences in suites' scores, and in facets that have a margin or ratio.

        The report shows all other facets in a separate section.
        """
        facets = self.comparison.facets
        return (c for c in self.drift.contrasts if c.suite not in facets or self.rules.has_limit(c.suite))


# --- waivers ---------------------------------------------------------------------------------------------------------


WAIVER_KEYS = ("who", "why", "expires", "status", "cells")
WAIVER_SELECTORS = ("suite", "arm", "policy", "context_tokens", "estimand")
WAIVABLE = ("FAIL", "NOT MEASURABLE", "INCONCLUSIVE")
LONGEST = timedelta(days=366)


@dataclass(frozen=True)
class Waiver:
    """A waiver: who accepts which cells that do not pass, why, and until which day (inclusive).

    A selector of None accepts every value.
    """

    who: str
    why: str
    expires: str  # ISO date
    status: tuple[str, ...]
    suite: str | None = None
    arm: str | None = None
    policy: str | None = None
    context_tokens: int | None = None
    estimand: str | None = None

    def covers(self, status: str, place: Mapping[str, Any]) -> bool:
        """Return whether the waiver covers a cell with this ``status``.

        ``place`` gives the cell's value of each selector, such as its suite.
        """
        selectors = {name: getattr(self, name) for name in WAIVER_SELECTORS}
        return status in self.status and all(place[k] == v for k, v in selectors.items() if v is not None)


def read_waivers(path: Path) -> YamlFile:
    """Read a waiver file; ``parse_waivers`` checks its content against a comparison."""
    return read_yaml(path, "waiver file")


def active_waivers(comparison: Comparison, file: YamlFile | None, today: date | None) -> tuple[Waiver, ...]:
    """Return the waivers of a file that are valid ``today``, none if ``file`` is None.

    Raises SpecError like ``parse_waivers``.
    """
    return () if file is None else parse_waivers(file, comparison, today or date.today())


def parse_waivers(file: YamlFile, comparison: Comparison, today: date) -> tuple[Waiver, ...]:
    """Return the waivers of a file.

    Raises SpecError for a waiver that has expired, and for names that the run does not have.
    """
    check_keys(file.table, ("format", "waivers"), file.name)
    if file.table.get("format", 1) != 1:
        raise SpecError(f"{file.name}: format is {short_repr(file.table['format'])}, wanted 1")
    rows = file.table.get("waivers")
    if not isinstance(rows, list) or not rows:
        raise SpecError(f"{file.name}: waivers is {short_repr(rows)}, wanted a list of at least one waiver")
    return tuple(_waiver(row, f"{file.name}: waiver {i}", comparison, today) for i, row in enumerate(rows, 1))


def _waiver(row: Any, where: str, comparison: Comparison, today: date) -> Waiver:
    if not isinstance(row, Mapping):
        raise SpecError(f"{where} is {short_repr(row)}, wanted a mapping with {', '.join(WAIVER_KEYS)}")
    check_keys(row, WAIVER_KEYS, where)
    expires = _date(row.get("expires"), where)
    who, why = (_text(row.get(key), f"{where}: {key}") for key in ("who", "why"))
    if expires > today + LONGEST:
        raise SpecError(
            f"{where} by {short_text(who)} expires on {expires.isoformat()}, more than {LONGEST.days} days after today "
            f"({today.isoformat()}); waivers are signed for a year at most"
        )
    if expires < today:
        raise SpecError(
            f"{where} by {short_text(who)} expired on {expires.isoformat()} (today is {today.isoformat()}); "
            "remove it, or have it signed again"
        )
    return Waiver(
        who, why, expires.isoformat(), _statuses(row, where), **_selectors(row.get("cells"), where, comparison)
    )


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SpecError(f"{name} is {short_repr(value)}, wanted text")
    return value.strip()


def _date(value: Any, where: str) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):  # datetime is a subclass of date
        return value
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise SpecError(f"{where}: expires is {short_repr(value)}, wanted a date such as 2026-12-31") from None


def _statuses(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    value = row.get("status")
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(name in WAIVABLE for name in names):
        raise SpecError(
            f"{where}: status is {short_repr(value)}, wanted some of {', '.join(WAIVABLE)}; INVALID is never waived"
        )
    return tuple(dict.fromkeys(names))


def _selectors(cells: Any, where: str, comparison: Comparison) -> dict[str, Any]:
    if not isinstance(cells, Mapping) or not cells:
        raise SpecError(f"{where}: cells is {short_repr(cells)}, wanted at least one of {', '.join(WAIVER_SELECTORS)}")
    check_keys(cells, WAIVER_SELECTORS, f"cells of {where}")
    names: dict[str, Sequence[Any]] = {
        "suite": (*comparison.suites, *comparison.facets),
        "arm": comparison.arms,
        "policy": comparison.policies,
        "context_tokens": comparison.contexts,
        "estimand": GATED,
    }
    selectors = dict(cells)
    if isinstance(selectors.get("policy"), str):  # may be a short name
        selectors["policy"] = match_policies([selectors["policy"]], comparison.policies)[0]
    if isinstance(selectors.get("estimand"), str):  # may be a former name
        selectors["estimand"] = FORMER_CONTRASTS.get(selectors["estimand"], selectors["estimand"])
    for name, value in selectors.items():
        if isinstance(value, bool) or value not in names[name]:  # True == 1 could be among the numbers
            raise UnknownName(f"{name} in {where}", short_text(value), map(short_text, names[name]))
    return selectors
