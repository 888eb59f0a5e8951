"""What every report says about its own error rates, from the calibration that ships with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Stamp:
    """Error rates of the gate, as shares; maxima and minima are over the simulated designs.

    ``false_pass_*`` are about a drift of exactly the margin; ``broken_templates_max`` about 5 % of templates lost
    altogether, in the hardest design tried, which is beyond what the interval was asked to withstand.
    """

    scale: str
    seed: int
    simulations: int
    false_pass_mean: float
    false_pass_max: float
    false_pass_simulations: int
    false_pass_designs: int
    type_one_max: float
    coverage_min: float
    broken_templates_max: float

    @property
    def sentence(self) -> str:
        """One sentence for the report."""
        return (
            f"This gate falsely passes {100 * self.false_pass_mean:.1f} % of {self.false_pass_simulations:,} "
            f"simulated audits whose drift is exactly the margin (at most {100 * self.false_pass_max:.1f} % in any of "
            f"{self.false_pass_designs} designs)."
        )


@cache
def stamp() -> Stamp:
    """The stamp of the shipped calibration."""
    held = shipped()
    return Stamp(held["scale"], held["seed"], held["simulations"], **held["stamp"])


def shipped() -> dict[str, Any]:
    """The calibration that ships with the package."""
    held: dict[str, Any] = json.loads((files("reports") / "calibration.json").read_text(encoding="utf-8"))
    return held
