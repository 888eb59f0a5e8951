"""What a check is made of: cases to simulate, their outcomes, and figures that must keep to a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NOT_ASKED = "not asked"
Rates = dict[str, float]  # share of a case's simulations in which something happened


class Case(Protocol):
    """One setting of a simulation; its name keys its random stream."""

    @property
    def name(self) -> str:
        """Unique over all checks."""

    @property
    def simulations(self) -> int:
        """How often it is drawn."""

    def rates(self, seed: int) -> Rates:
        """Simulate."""


class Outcome(NamedTuple):
    """A simulated case."""

    case: Case
    rates: Rates
    seconds: float


@dataclass(frozen=True)
class Scale:
    """How much to simulate: a share of the full table's draws, of all its cases or of six.

    ``slack`` standard errors of the simulation are granted on top of what is asked; the full table gets none.
    """

    name: str
    share: float
    every_case: bool
    slack: float

    def draws(self, full: int) -> int:
        """Simulations per case where the full table has ``full``."""
        return round(full * self.share)


FULL = Scale("full", 1.0, every_case=True, slack=0.0)
FAST = Scale("fast", 0.2, every_case=False, slack=3.0)


@dataclass(frozen=True)
class Figure:
    """One number of the table: what was asked (``low <= value <= high``) and what the simulations reached.

    ``slack`` is granted on both sides; ``simulations`` is the sum over the ``cases`` that it summarises.
    """

    row: int
    what: str
    asked: str
    low: float
    high: float
    slack: float
    value: float
    simulations: int
    cases: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it keeps to what was asked."""
        return self.low - self.slack <= self.value <= self.high + self.slack


def at_most(row: int, what: str, outcomes: Sequence[Outcome], key: str, bound: float, *, scale: Scale) -> Figure:
    """The largest rate of any case; none may exceed ``bound``."""
    asked = "exactly 0" if bound == 0 else f"<= {bound:g}"
    return _figure(
        row, what, asked, outcomes, key, (0.0, bound), max, _slack(bound, outcomes[0].case.simulations, scale)
    )


def at_least(row: int, what: str, outcomes: Sequence[Outcome], key: str, bound: float, *, scale: Scale) -> Figure:
    """The smallest rate of any case; none may fall short of ``bound``."""
    slack = _slack(bound, outcomes[0].case.simulations, scale)
    return _figure(row, what, f">= {bound:g}", outcomes, key, (bound, 1.0), min, slack)


def mean_between(
    row: int, what: str, outcomes: Sequence[Outcome], key: str, bounds: tuple[float, float], *, scale: Scale
) -> Figure:
    """The mean rate over the cases."""
    slack = _slack(bounds[1], sum(o.case.simulations for o in outcomes), scale)
    return _figure(row, what, f"{bounds[0]:g} to {bounds[1]:g}", outcomes, key, bounds, _mean, slack)


def reported(row: int, what: str, outcomes: Sequence[Outcome], key: str) -> Figure:
    """The largest rate of any case, where nothing was asked: what lies beyond the acceptance table."""
    return _figure(row, what, NOT_ASKED, outcomes, key, (0.0, 1.0), max, 0.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _slack(bound: float, simulations: int, scale: Scale) -> float:
    return scale.slack * math.sqrt(bound * (1 - bound) / simulations)


def _figure(
    row: int,
    what: str,
    asked: str,
    outcomes: Sequence[Outcome],
    key: str,
    bounds: tuple[float, float],
    summary: Callable[[list[float]], float],
    slack: float,
) -> Figure:
    return Figure(
        row=row,
        what=what,
        asked=asked,
        low=bounds[0],
        high=bounds[1],
        slack=slack,
        value=summary([o.rates[key] for o in outcomes]),
        simulations=sum(o.case.simulations for o in outcomes),
        cases=len(outcomes),
        seconds=sum(o.seconds for o in outcomes),
    )
