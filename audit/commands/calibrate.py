"""``kvaudit calibrate``: simulates the gate and its statistics against known truths; no model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from audit.commands.command_line import check_seed, say, wide_console
from audit.core.errors import SpecError
from audit.runs.launchers.local import idle_cores
from audit.runs.progress import Meter
from reports.calibration.case import FAST, FULL, LEADERS, NOT_ASKED, Figure
from reports.calibration.table import TIMES, Calibration, all_cases, as_json, calibrate

FAILED = 3
REPEATED = f"the {LEADERS} most extreme cases drawn again, {TIMES} times as often"


def run(*, fast: bool, seed: int, out: Path, workers: int | None) -> int:
    """Simulate, write ``out``, print the table; returns 0 when every figure keeps to what was asked, else 3."""
    check_seed(seed)
    scale = FAST if fast else FULL
    total = len(all_cases(scale))
    _check_writable(out)
    with Meter(Console(stderr=True), "calibrate", total) as meter:
        done = calibrate(scale, seed=seed, workers=workers or idle_cores(), progress=meter.at)
        meter.at(total, "all cases")
    out.write_text(json.dumps(as_json(done), indent=1) + "\n", encoding="utf-8")
    _print(done)
    say(wide_console(), f"written: {out}")
    return 0 if done.ok else FAILED


def _check_writable(out: Path) -> None:
    """Raise SpecError for a place that cannot be written: before the minutes, not after."""
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
    say(console, f"{drawn}; rows share simulations.")
    if done.repeated:
        say(console, f"what is asked of any case, in rows 1 to 4 and 6 to 9, is reached by {REPEATED}.")
    verdict = "every figure keeps to what was asked" if not short else f"{len(short)} figures miss what was asked"
    say(console, verdict)


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
