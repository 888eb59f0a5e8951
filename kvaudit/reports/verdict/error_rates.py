"""The error rates of the gate that every report states, from the calibration that ships with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class ErrorRates:
    """Error rates of the gate, as shares; maxima and minima are over the simulated designs.

    ``false_pass_max``: false PASS at ``level`` for a drift of exactly the margin, spread over the items (reference at
    ``reference_rate``, ``margin``) or by whole templates (also at 10 pp). ``release_max``: the same at
    ``release_level``; for a spread drift of the interval alone. Not covered by these limits: ``beyond_max``, the
    interval at ``level`` with a reference at ``beyond_rate`` and ``beyond_margin``, and ``unnamed_max``, whole
    templates that are not declared. ``recipe_three_seeds_max``: two-sided type I error of a recipe's 95 % interval from
    three seeds. ``nothing_to_lose_max``: how often a reference with nothing to lose counts as measurable;
    ``turned_away_max``: how often a healthy one does not.
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
    """Return the error rates of the shipped calibration."""
    calibration = shipped_calibration()
    return ErrorRates(calibration["scale"], calibration["seed"], calibration["simulations"], **calibration["stamp"])


def shipped_calibration() -> dict[str, Any]:
    """Read the calibration that ships with the package."""
    path = files("kvaudit.reports.verdict") / "error_rates.json"
    calibration: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return calibration
