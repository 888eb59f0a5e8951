"""The parts of a check of the calibration: cases to simulate, their outcomes, and figures with a requirement."""

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
    """One setting of a simulation, drawn ``simulations`` times; its unique name seeds its random stream."""

    simulations: int

    @property
    @abstractmethod
    def name(self) -> str:
        """A name with every parameter that matters."""

    @abstractmethod
    def rates(self, seed: int) -> CaseRates:
        """Simulate; returns the share of simulations with each event."""

    def repeated(self, times: int) -> Self:
        """Return the same setting with ``times`` as many simulations."""
        return replace(self, simulations=times * self.simulations)


class Simulated(NamedTuple):
    """A simulated case and its rates."""

    case: Case
    rates: CaseRates
    seconds: float  # of a core, whatever else ran beside


@dataclass(frozen=True)
class Scale:
    """How much to simulate: a share of the full table's draws, and all of its cases or six of each check.

    Requirements are loosened by ``slack`` standard errors of the simulation, in the full table by none. There the most
    extreme cases are simulated again (``confirms``), since the extreme of hundreds of cases is partly noise.
    """

    name: str
    share: float
    every_case: bool
    slack: float
    confirms: bool

    def draws(self, full: int) -> int:
        """Return the simulations per case where the full table has ``full``."""
        return round(full * self.share)


FULL = Scale("full", 1.0, every_case=True, slack=0.0, confirms=True)
FAST = Scale("fast", 0.2, every_case=False, slack=3.0, confirms=False)
LEADERS = 3  # cases that are repeated for a figure


@dataclass(frozen=True)
class Figure:
    """One number of the table, and its requirement ``low <= value <= high``.
    ``slack`` is allowed on both sides; ``simulations`` is the sum over the ``cases`` that it summarises. If the figure
    is an extreme, ``leaders`` are the cases with the most extreme ``rate``, the most extreme first, and ``first`` is
    the value before they were simulated again.
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
        """Whether the value meets its requirement."""
        return self.low - self.slack <= self.value <= self.high + self.slack


def at_most(row: int, what: str, outcomes: Sequence[Simulated], key: str, bound: float, *, scale: Scale) -> Figure:
    """Return the largest rate of any case, required to be at most ``bound``."""
    asked = "exactly 0" if bound == 0 else f"<= {bound:g}"
    return _figure(
        row, what, asked, outcomes, key, (0.0, bound), _largest, _slack(bound, outcomes[0].case.simulations, scale)
    )


def at_least(row: int, what: str, outcomes: Sequence[Simulated], key: str, bound: float, *, scale: Scale) -> Figure:
    """Return the smallest rate of any case, required to be at least ``bound``."""
    slack = _slack(bound, outcomes[0].case.simulations, scale)
    return _figure(row, what, f">= {bound:g}", outcomes, key, (bound, 1.0), _smallest, slack)


def mean_between(
    row: int, what: str, outcomes: Sequence[Simulated], key: str, bounds: tuple[float, float], *, scale: Scale
) -> Figure:
    """Return the mean rate over the cases, required to be within ``bounds``."""
    slack = _slack(bounds[1], sum(o.case.simulations for o in outcomes), scale)
    return _figure(row, what, f"{bounds[0]:g} to {bounds[1]:g}", outcomes, key, bounds, None, slack)


def reported(row: int, what: str, outcomes: Sequence[Simulated], key: str, *, smallest: bool = False) -> Figure:
    """Return the largest rate of any case, or the smallest, without a requirement."""
    return _figure(row, what, NOT_ASKED, outcomes, key, (0.0, 1.0), _smallest if smallest else _largest, 0.0)


def confirmed(figure: Figure, again: Mapping[str, Simulated]) -> Figure:
    """Return the figure of its leaders as simulated ``again`` (by name), or unchanged if none was."""
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
    """Return a figure; ``order`` sorts the cases, the deciding one first, and without it the mean decides."""
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
