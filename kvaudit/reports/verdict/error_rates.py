"""What every report says about its own error rates, from the calibration that ships with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class ErrorRates:
    """Error rates of the gate, as shares; maxima and minima are over the simulated designs.

    ``false_pass_max`` is about a drift of exactly the margin at ``level``, spread over the items (with a reference at
    ``reference_rate`` and ``margin``) or by whole templates (at 10 pp too); ``release_max`` is the same at
    ``release_level``, there of the interval where the drift is spread. What nothing was asked of: ``beyond_max``, the
    interval at ``level`` with a reference at ``beyond_rate`` and ``beyond_margin``, and ``unnamed_max``, whole
    templates that nobody named. ``recipe_three_seeds_max`` is the two-sided type I error of a recipe's 95 % interval
    from three seeds. ``nothing_to_lose_max`` is how often a reference that has nothing to lose counts as measurable,
    ``turned_away_max`` how often a healthy one does not.
    """

    scale: str
    seed: int
    simulations: int
    level: float
    release_level: float
    margin: float
    reference_rate: float
    false_pass_max: float
    false_pass_designs: int
    release_max: float
    release_designs: int
    type_one_max: float
    coverage_min: float
    unnamed_max: float
    beyond_max: float
    beyond_rate: float
    beyond_margin: float
    recipe_three_seeds_max: float
    nothing_to_lose_max: float
    turned_away_max: float


@cache
def shipped_rates() -> ErrorRates:
    """The error rates that the shipped calibration found."""
    held = shipped_calibration()
    return ErrorRates(held["scale"], held["seed"], held["simulations"], **held["stamp"])


def shipped_calibration() -> dict[str, Any]:
    """The calibration that ships with the package."""
    path = files("kvaudit.reports.verdict") / "error_rates.json"
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return held
