"""The acceptance table of the calibration: the cases of every check, simulated and compared with requirements."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.calibration.case import NOT_ASKED, Case, Figure, Scale, Simulated, confirmed
from bench.calibration.checks import (
    doses,
    families,
    graded,
    intervals,
    judges,
    power,
    ratios,
    recipes,
    rounds,
    standing,
    templates,
)
from bench.calibration.design import RunDesign, design_cases, design_figures
from bench.calibration.run import Progress, simulate
from bench.calibration.sources import source_hashes

SCHEMA = 1


class Check(NamedTuple):
    """The cases of a check and its figures; ``confirms`` if ten times the draws take only seconds."""

    cases: Callable[[Scale], Sequence[Case]]
    figures: Callable[[Sequence[Simulated], Scale], list[Figure]]
    confirms: bool


CHECKS = (
    Check(intervals.cases, intervals.figures, True),
    Check(templates.cases, templates.figures, True),
    Check(families.cases, families.figures, False),
    Check(recipes.cases, recipes.figures, True),
    Check(judges.cases, judges.figures, True),
    Check(doses.cases, doses.figures, True),
    Check(power.cases, power.figures, False),
    Check(graded.cases, graded.figures, True),
    Check(standing.cases, standing.figures, True),
    Check(ratios.cases, ratios.figures, True),
    Check(rounds.cases, rounds.figures, False),
)
TIMES = 10  # the draws of a repeated case


@dataclass(frozen=True)
class Calibration:
    """The figures of one run of the table, its wall time in ``seconds`` and its number of ``simulations``.

    ``repeated`` is how many cases were simulated again because they decide a figure.
    """

    scale: str
    seed: int
    workers: int
    seconds: float
    simulations: int
    repeated: int
    figures: tuple[Figure, ...]
    sources: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every figure meets its requirement."""
        return all(figure.ok for figure in self.figures)


def all_cases(scale: Scale, checks: Sequence[Check] = CHECKS) -> list[Case]:
    """Return the cases of every check."""
    return [case for check in checks for case in check.cases(scale)]


def of_run(designs: Sequence[RunDesign]) -> tuple[Check, ...]:
    """Return the checks of one run's design, in place of the table's."""
    return (Check(lambda scale: design_cases(designs, scale), design_figures, True),)


def calibrate(
    scale: Scale, *, seed: int, workers: int, progress: Progress, checks: Sequence[Check] = CHECKS
) -> Calibration:
    """Simulate every check, and then again, with other draws, the cases that decide a figure."""
    started = time.perf_counter()
    outcomes = simulate(all_cases(scale, checks), seed=seed, workers=workers, progress=progress)
    figures = [(check, figure) for check in checks for figure in check.figures(outcomes, scale)]
    deciding = [f for check, f in figures if scale.confirms and check.confirms and f.high > 0 and f.asked != NOT_ASKED]
    leaders = {case.name: case for figure in deciding for case in figure.leaders}  # one case can decide several figures
    longer = [case.repeated(TIMES) for case in leaders.values()]
    fresh = zlib.crc32(f"{seed} again".encode())  # other draws than the first, and always the same
    again = simulate(
        longer, seed=fresh, workers=workers, progress=lambda _, name: progress(len(outcomes), f"again {name}")
    )
    by_name = {outcome.case.name: outcome for outcome in again}
    return Calibration(
        scale=scale.name,
        seed=seed,
        workers=workers,
        seconds=time.perf_counter() - started,
        simulations=sum(outcome.case.simulations for outcome in (*outcomes, *again)),
        repeated=len(again),
        figures=tuple(confirmed(f, by_name) if f in deciding else f for _, f in figures),
        sources=source_hashes(),
    )


def as_json(calibration: Calibration, checks: Sequence[Check] = CHECKS) -> dict[str, Any]:
    """Return the content of calibration.json; only the whole table has a stamp. Rates have seven digits."""
    c = calibration
    return {
        "schema": SCHEMA,
        "scale": c.scale,
        "seed": c.seed,
        "workers": c.workers,
        "seconds": round(c.seconds, 1),
        "simulations": c.simulations,
        "repeated_cases": c.repeated,
        "ok": c.ok,
        **({"stamp": _stamp(c.figures)} if checks is CHECKS else {}),
        "figures": [_entry(figure) for figure in c.figures],
        "sources": c.sources,
    }


def _stamp(figures: Sequence[Figure]) -> dict[str, float]:
    """Return the figures that every report quotes; extremes are the worse of the first and the second pass."""
    by_name = {figure.what: figure for figure in figures if figure.row != templates.ROW}  # row 4 repeats a name
    beyond, release = by_name[intervals.BEYOND_MOST], by_name[intervals.RELEASE_MOST]
    hardest = next(case for case in beyond.leaders if isinstance(case, intervals.IntervalCase))
    alarms, coverage = by_name[intervals.FALSE_ALARMS], by_name[intervals.COVERAGE]
    held = [by_name[intervals.GATE_MOST], *_whole_templates(figures, intervals.ALPHA)]
    at_release = [release, *_whole_templates(figures, intervals.RELEASE_ALPHA)]
    [unnamed] = [figure for figure in figures if figure.what == templates.UNNAMED]
    return {
        "level": intervals.ALPHA,
        "release_level": intervals.RELEASE_ALPHA,
        "margin": intervals.MARGIN,
        "reference_rate": intervals.RATE,
        "false_pass_max": _worst(held),
        "false_pass_designs": sum(figure.cases for figure in held),
        "release_max": _worst(at_release),
        "release_designs": sum(figure.cases for figure in at_release),
        "type_one_max": _worst([alarms]),
        "coverage_min": round(min(coverage.value, coverage.first), 7),
        "unnamed_max": _worst([unnamed]),
        "beyond_max": _worst([beyond]),
        "beyond_rate": hardest.model.reference,
        "beyond_margin": hardest.margin,
        "recipe_three_seeds_max": round(by_name[recipes.THREE_SEEDS].value, 7),
        "nothing_to_lose_max": _worst([by_name[standing.NOTHING_TO_LOSE]]),
        "turned_away_max": _worst([by_name[standing.TURNED_AWAY]]),
    }


def _worst(figures: Sequence[Figure]) -> float:
    """Return the largest rate of either pass; in rows 4 and 14, with many cases of few draws, of the second."""
    again = (templates.ROW, standing.CONTROLS_ROW)
    rates = ((f.value,) if f.row in again else (f.value, f.first) for f in figures)
    return round(max(rate for pair in rates for rate in pair), 7)


def _whole_templates(figures: Sequence[Figure], level: float) -> list[Figure]:
    """Return the figures of the gate at this level whose model lost the margin by whole templates."""
    return [
        figure
        for figure in figures
        if figure.asked != NOT_ASKED
        and any(isinstance(case, templates.TemplateCase) and case.alpha == level for case in figure.leaders)
    ]


def _entry(figure: Figure) -> dict[str, Any]:
    return {
        "row": figure.row,
        "what": figure.what,
        "asked": figure.asked,
        "low": figure.low,
        "high": figure.high,
        "slack": round(figure.slack, 7),
        "value": round(figure.value, 7),
        "first": round(figure.first, 7),
        "ok": None if figure.asked == NOT_ASKED else figure.ok,
        "cases": figure.cases,
        "simulations": figure.simulations,
        "core_seconds": round(figure.seconds, 1),
        "most_extreme": [case.name for case in figure.leaders],
    }
