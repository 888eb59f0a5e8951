"""What a check is made of: cases to simulate, their outcomes, and figures that must keep to a number."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

NOT_ASKED = "not asked"
CaseRates = dict[str, float]  # share of a case's simulations in which something happened


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One setting of a simulation, drawn ``simulations`` times; its name is unique and keys its random stream."""

    simulations: int

    @property
    @abstractmethod
    def name(self) -> str:
        """All that matters."""

    @abstractmethod
    def rates(self, seed: int) -> CaseRates:
        """Simulate."""

    def repeated(self, times: int) -> Self:
        """The same setting, drawn that many times as often."""
        return replace(self, simulations=times * self.simulations)


class Simulated(NamedTuple):
    """A simulated case."""

    case: Case
    rates: CaseRates
    seconds: float  # of a core, whatever else ran beside


@dataclass(frozen=True)
class Scale:
    """How much to simulate: a share of the full table's draws, of all its cases or of six.

    ``slack`` standard errors of the simulation are granted on top of what is asked. The full table gets none; it
    repeats the cases that came out most extreme (``confirms``), because the extreme of hundreds of cases is otherwise
    the simulation's own noise.
    """

    name: str
    share: float
    every_case: bool
    slack: float
    confirms: bool

    def draws(self, full: int) -> int:
        """Simulations per case where the full table has ``full``."""
        return round(full * self.share)


FULL = Scale("full", 1.0, every_case=True, slack=0.0, confirms=True)
FAST = Scale("fast", 0.2, every_case=False, slack=3.0, confirms=False)
LEADERS = 3  # cases that are repeated for a figure


@dataclass(frozen=True)
class Figure:
    """One number of the table: what was asked (``low <= value <= high``) and what the simulations reached.

    ``slack`` is granted on both sides; ``simulations`` is the sum over the ``cases`` that it summarises. ``leaders``
    are the cases whose ``rate`` was most extreme, the most extreme first, where the figure is an extreme. ``first`` is
    the value before they were drawn again.
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
    first: float
    rate: str
    leaders: tuple[Case, ...]

    @property
    def ok(self) -> bool:
        """Whether it keeps to what was asked."""
        return self.low - self.slack <= self.value <= self.high + self.slack


def at_most(row: int, what: str, outcomes: Sequence[Simulated], key: str, bound: float, *, scale: Scale) -> Figure:
    """The largest rate of any case; none may exceed ``bound``."""
    asked = "exactly 0" if bound == 0 else f"<= {bound:g}"
    return _figure(
        row, what, asked, outcomes, key, (0.0, bound), _largest, _slack(bound, outcomes[0].case.simulations, scale)
    )


def at_least(row: int, what: str, outcomes: Sequence[Simulated], key: str, bound: float, *, scale: Scale) -> Figure:
    """The smallest rate of any case; none may fall short of ``bound``."""
    slack = _slack(bound, outcomes[0].case.simulations, scale)
    return _figure(row, what, f">= {bound:g}", outcomes, key, (bound, 1.0), _smallest, slack)


def mean_between(
    row: int, what: str, outcomes: Sequence[Simulated], key: str, bounds: tuple[float, float], *, scale: Scale
) -> Figure:
    """The mean rate over the cases."""
    slack = _slack(bounds[1], sum(o.case.simulations for o in outcomes), scale)
    return _figure(row, what, f"{bounds[0]:g} to {bounds[1]:g}", outcomes, key, bounds, None, slack)


def reported(row: int, what: str, outcomes: Sequence[Simulated], key: str) -> Figure:
    """The largest rate of any case, where nothing was asked: what lies beyond the acceptance table."""
    return _figure(row, what, NOT_ASKED, outcomes, key, (0.0, 1.0), _largest, 0.0)


def confirmed(figure: Figure, again: Mapping[str, Simulated]) -> Figure:
    """The figure from its leaders alone, simulated ``again`` (by name); as it is where they were not."""
    outcomes = [again[case.name] for case in figure.leaders if case.name in again]
    if not outcomes:
        return figure
    rates = [o.rates[figure.rate] for o in outcomes]
    return replace(
        figure,
        value=max(rates) if figure.low == 0 else min(rates),  # ``at_most`` begins at 0
        simulations=figure.simulations + sum(o.case.simulations for o in outcomes),
        seconds=figure.seconds + sum(o.seconds for o in outcomes),
    )


def _largest(rates: Sequence[float]) -> list[int]:
    return sorted(range(len(rates)), key=lambda i: -rates[i])


def _smallest(rates: Sequence[float]) -> list[int]:
    return sorted(range(len(rates)), key=lambda i: rates[i])


def _slack(bound: float, simulations: int, scale: Scale) -> float:
    return scale.slack * math.sqrt(bound * (1 - bound) / simulations)


def _figure(
    row: int,
    what: str,
    asked: str,
    outcomes: Sequence[Simulated],
    key: str,
    bounds: tuple[float, float],
    order: Callable[[Sequence[float]], list[int]] | None,
    slack: float,
) -> Figure:
    """``order`` sorts the cases, the one that counts first; without it the mean counts."""
    rates = [o.rates[key] for o in outcomes]
    leaders = [outcomes[i].case for i in order(rates)] if order else []
    value = rates[order(rates)[0]] if order else sum(rates) / len(rates)
    return Figure(
        row=row,
        what=what,
        asked=asked,
        low=bounds[0],
        high=bounds[1],
        slack=slack,
        value=value,
        simulations=sum(o.case.simulations for o in outcomes),
        cases=len(outcomes),
        seconds=sum(o.seconds for o in outcomes),
        first=value,
        rate=key,
        leaders=tuple(leaders[:LEADERS]),
    )
