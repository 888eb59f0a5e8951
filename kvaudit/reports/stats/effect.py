"""The interface of a statistic: a ``Statistic`` is declared in the file of its function, where the tests find it.

A statistic is a function of paired item differences and their clusters. It returns a frozen result with an estimate, a
p-value and the names of its method and source (an ``Effect`` if the gate uses it). If a file of this folder declares no
statistic, its docstring has a line "No statistic:" that says what the file has instead.
No statistic: the interface alone.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

import kvaudit.reports.stats

LEVEL = 0.95  # of every two-sided interval that is printed


class Bounds(NamedTuple):
    """Intervals and p-values of many samples at once, each field [...]; named as in ``Effect``."""

    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    lower: npt.NDArray[np.float64]
    upper: npt.NDArray[np.float64]
    pvalue: npt.NDArray[np.float64]
    pvalue_drop: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Effect:
    """A mean paired difference with its uncertainty, in score units (0.05 = 5 pp).

    ``low, high`` is the two-sided 95 % interval; ``lower, upper`` are the one-sided bounds at ``alpha`` that the gate
    reads. ``pvalue`` is two-sided against 0, ``pvalue_drop`` is one-sided for "the mean is below 0". ``losses`` is the
    size of the sum of all negative item differences, ``gains`` the sum of all positive ones. ``deff`` is the design
    effect of the clusters.
    """

    estimate: float
    low: float
    high: float
    lower: float
    upper: float
    alpha: float
    pvalue: float
    pvalue_drop: float
    method: str
    source: str
    n_items: int
    n_clusters: int
    losses: float
    gains: float
    deff: float
    df: float


Array = npt.NDArray[np.float64]


class Result(Protocol):
    """The interface of a statistic's result; a result with an interval also has ``low`` and ``high``."""

    @property
    def estimate(self) -> float:
        """The estimate of candidate - reference, in score units."""

    @property
    def pvalue(self) -> float:
        """The two-sided p-value against no difference."""

    @property
    def pvalue_drop(self) -> float:
        """The one-sided p-value for a drop."""

    @property
    def method(self) -> str:
        """The name of the method, for a table."""

    @property
    def source(self) -> str:
        """The publication of the method."""


@dataclass(frozen=True)
class Statistic:
    """The declaration of a statistic: its function, and the name of the test that compares it with external numbers.

    ``of`` calls ``function`` with differences and clusters; it is needed if ``function`` takes other arguments.
    """

    function: Callable[..., Result]
    oracle: str  # tests/FILE.py::TEST
    of: Callable[[Array, npt.NDArray[np.int64]], Result] | None = None

    def __call__(self, z: Array, clusters: npt.NDArray[np.int64]) -> Result:
        """Compute the statistic of item differences z [N] in clusters [N]."""
        return (self.of or self.function)(z, clusters)


def statistics() -> dict[str, Statistic]:
    """Return every statistic by the name of its function."""
    found: dict[str, Statistic] = {}
    for entry in pkgutil.iter_modules(kvaudit.reports.stats.__path__, kvaudit.reports.stats.__name__ + "."):
        declared = [v for v in vars(importlib.import_module(entry.name)).values() if isinstance(v, Statistic)]
        found |= {statistic.function.__name__: statistic for statistic in declared}
    return found
