"""How often are the gate and its statistics wrong? Simulations against known truths; no model is loaded.

    python -m bench.calibration [--fast] [--seed 0] [--out calibration.json] [--design RUN]

Takes 12 minutes on two cores, with ``--fast`` seconds; results: docs/results/calibration.md. The figures of the whole
table ship as kvaudit/reports/verdict/error_rates.json, and every report quotes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.calibration.case import FAST, FULL, LEADERS, NOT_ASKED, Figure
from bench.calibration.design import RunDesign
from bench.calibration.table import CHECKS, TIMES, Calibration, all_cases, as_json, of_run
from bench.calibration.table import calibrate as simulated
from kvaudit.audit.commands.base import check_seed, print_line, user_errors, wide_console
from kvaudit.audit.runs.launchers.local import idle_cores
from kvaudit.audit.runs.progress import Meter
from kvaudit.core.errors import SpecError
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.run import drift_and_rules
from kvaudit.reports.verdict.family import gated_cells
from kvaudit.reports.verdict.rules import GateOverrides

FAILED = 3


def calibrate(
    *,
    fast: Annotated[bool, typer.Option("--fast", help="Fewer designs and draws: seconds instead of minutes.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("calibration.json"),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: the idle cores.", show_default=False)
    ] = None,
    design: Annotated[
        Path | None,
        typer.Option(help="A run folder: simulate its own templates, samples and margins.", show_default=False),
    ] = None,
) -> None:
    """Simulate how often the gate and its statistics are wrong; exits with 3 if a figure misses its requirement."""
    with user_errors():
        raise typer.Exit(_calibrate(fast=fast, seed=seed, out=out, workers=workers, design=design))


def _calibrate(*, fast: bool, seed: int, out: Path, workers: int | None, design: Path | None) -> int:
    """Simulate, write ``out`` and print the table; returns 0 if every figure meets its requirement, else 3."""

    check_seed(seed)
    scale = FAST if fast else FULL
    checks = CHECKS if design is None else of_run(_designs(design))
    total = len(all_cases(scale, checks))
    _check_writable(out)
    with Meter(Console(stderr=True), "calibrate", total) as meter:
        done = simulated(scale, seed=seed, workers=workers or idle_cores(), progress=meter.at, checks=checks)
        meter.at(total, "all cases")
    out.write_text(json.dumps(as_json(done, checks), indent=1) + "\n", encoding="utf-8")
    _print(done)
    print_line(wide_console(), f"written: {out}")
    return 0 if done.ok else FAILED


def _designs(run: Path) -> list[RunDesign]:
    """Return the designs of a run; raises SpecError if it gates nothing."""
    found = designs(load_run(run))
    if not found:
        raise SpecError(f"--design {str(run)!r} has no gated suite with a margin and records: nothing to simulate")
    return found


def designs(data: RunData) -> list[RunDesign]:
    """Return the gated suites of a run as designs to simulate, whatever drift it measured."""
    drift, rules = drift_and_rules(data, GateOverrides(), everything=False)
    gated = [c.rows[0].contrast for c in gated_cells(drift, rules)]
    return [
        RunDesign(
            suite=suite,
            context_tokens=context,
            counts=tuple(int(n) for n in own[0].sums[0].counts),
            draws=panel.samples * max(1, len(own[0].seeds)),
            reference=float(np.mean([c.rates.reference for c in own if c.rates])),
            discordance=float(np.mean([c.churn for c in own if c.churn is not None])),
            graded=panel.graded,
            margin=rules.margins[suite],
            alpha=rules.alpha,
        )
        for (suite, context), panel in data.panels.items()
        if suite in rules.margins
        and (own := [c for c in gated if (c.suite, c.context_tokens) == (suite, context) and c.rates and c.sums])
    ]


def _check_writable(out: Path) -> None:
    """Raise SpecError if ``out`` cannot be written, before the simulations and not after."""
    is_new = not out.exists()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a"):
            pass
    except OSError as error:
        raise SpecError(f"--out is {str(out)!r} ({error.strerror}), wanted a file that can be written") from None
    if is_new:
        out.unlink()


def _print(done: Calibration) -> None:

    console = wide_console()
    table = Table("row", "check", "asked", "at first", "reached", "cases", "simulations", "core seconds", "ok")
    for figure in done.figures:
        table.add_row(*_cells(figure))
    console.print(table, markup=False)
    short = [figure for figure in done.figures if not figure.ok]
    drawn = f"{done.simulations:,} simulations, seed {done.seed}, {done.seconds:.0f} s in {done.workers} processes"
    print_line(console, f"{drawn}; rows share simulations.")
    if done.repeated:
        repeated = f"the {LEADERS} most extreme cases drawn again, {TIMES} times as often"
        print_line(console, f"what is asked of any case is reached by {repeated}.")
    verdict = "every figure keeps to what was asked" if not short else f"{len(short)} figures miss what was asked"
    print_line(console, verdict)


def _cells(figure: Figure) -> list[str]:

    asked = figure.asked if not figure.slack else f"{figure.asked} (+- {figure.slack:.4f})"
    ok = "-" if figure.asked == NOT_ASKED else "yes" if figure.ok else "NO"
    numbers = (
        f"{figure.first:.4f}",
        f"{figure.value:.4f}",
        f"{figure.cases:,}",
        f"{figure.simulations:,}",
        f"{figure.seconds:.1f}",
    )
    return [str(figure.row), figure.what, asked, *numbers, ok]


if __name__ == "__main__":
    typer.run(calibrate)
