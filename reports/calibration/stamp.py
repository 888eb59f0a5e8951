"""What every report says about its own error rates, from the calibration that ships with the package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from reports.page.plain import percent


@dataclass(frozen=True)
class Stamp:
    """Error rates of the gate, as shares; maxima and minima are over the simulated designs.

    ``false_pass_*`` are about a drift of exactly ``margin`` at ``level`` with a reference at ``reference_rate``, and
    ``release_max`` about the gate's interval at ``release_level``, else alike. What was not asked of the gate and went
    worse: ``broken_*`` with 5 % of templates lost altogether, in the hardest design tried, and ``beyond_max`` for the
    interval at ``level`` with a reference at ``beyond_rate`` and ``beyond_margin``.
    """

    scale: str
    seed: int
    simulations: int
    level: float
    release_level: float
    margin: float
    reference_rate: float
    false_pass_mean: float
    false_pass_max: float
    false_pass_simulations: int
    false_pass_designs: int
    release_max: float
    release_designs: int
    type_one_max: float
    coverage_min: float
    broken_templates_max: float
    broken_templates_release_max: float
    beyond_max: float
    beyond_rate: float
    beyond_margin: float

    def sentence(self, alpha: float, margins: Iterable[float]) -> str:
        """What was simulated of a gate at one-sided ``alpha`` and ``margins`` in score units, and what went worse."""
        others = sorted({margin for margin in margins if not _same(margin, self.margin)})
        lines = [self._foreign(alpha, others), self._release() if _same(alpha, self.release_level) else self._level()]
        return " ".join(line for line in (*lines, self._worse(alpha)) if line)

    def _foreign(self, alpha: float, margins: list[float]) -> str:
        """What of this gate the figures are not about."""
        parts = []
        if not _same(alpha, self.level) and not _same(alpha, self.release_level):
            parts.append(f"at this level ({alpha:g})")
        if margins:
            parts.append(f"at a margin of {', '.join(f'{100 * margin:g}' for margin in margins)} pp")
        return f"The gate was not simulated {' or '.join(parts)}." if parts else ""

    def _setting(self, level: float) -> str:
        return f"level {level:g}, a margin of {_points(self.margin)} and a reference at {_whole(self.reference_rate)}"

    def _level(self) -> str:
        return (
            f"At {self._setting(self.level)}, the gate falsely passes {percent(self.false_pass_mean)} of "
            f"{self.false_pass_simulations:,} simulated audits whose drift is exactly the margin (at most "
            f"{percent(self.false_pass_max)} in any of {self.false_pass_designs} designs)."
        )

    def _release(self) -> str:
        return (
            f"At {self._setting(self.release_level)}, the gate's interval falsely clears a drift of exactly the "
            f"margin in at most {percent(self.release_max)} of the simulated audits of any of {self.release_designs} "
            "designs."
        )

    def _worse(self, alpha: float) -> str:
        release = _same(alpha, self.release_level)
        broken = self.broken_templates_release_max if release else self.broken_templates_max
        return (
            f"Worse: up to {percent(broken)} where 5 % of templates break altogether (uneven templates or several "
            f"samples), and up to {percent(self.beyond_max)} (the interval, level {self.level:g}) with a reference at "
            f"{_whole(self.beyond_rate)} and a margin of {_points(self.beyond_margin)}."
        )


def _same(one: float, other: float) -> bool:
    return abs(one - other) < 1e-9


def _points(share: float) -> str:
    return f"{100 * share:g} pp"


def _whole(share: float) -> str:
    return f"{100 * share:g} %"


@cache
def stamp() -> Stamp:
    """The stamp of the shipped calibration."""
    held = shipped()
    return Stamp(held["scale"], held["seed"], held["simulations"], **held["stamp"])


def shipped() -> dict[str, Any]:
    """The calibration that ships with the package."""
    held: dict[str, Any] = json.loads((files("reports.calibration") / "calibration.json").read_text(encoding="utf-8"))
    return held
