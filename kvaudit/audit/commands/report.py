"""``kvaudit report``, and how a verdict is printed: no model is loaded."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from kvaudit.audit.commands.base import Command
from kvaudit.audit.commands.base import (
    GateFile,
    OnInconclusive,
    Run,
    Waivers,
    check_report_folder,
    print_line,
    say_unfinished,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import SpecError
from kvaudit.core.provenance import check_checkpoints
from kvaudit.reports.verdict.pin import load_pin

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.reports.page.findings import Findings
    from kvaudit.reports.verdict.rules import GateOverrides


def report(
    run: Run, *, gate_file: GateFile = None, waivers: Waivers = None, on_inconclusive: OnInconclusive = None
) -> None:
    """Write a run's report again from its records."""
    with user_errors("kvaudit", "report", run):
        asked = asked_of(gate_file, waivers, on_inconclusive)
        check_checkpoints(run)
        say_unfinished(run)
        write_report(run, asked)


def asked_of(gate: Path | None, waivers: Path | None, on_inconclusive: str | None) -> GateOverrides:
    """What the command line adds to the gate of a run, read and checked; raises SpecError and DataError in one line."""
    from kvaudit.reports.verdict.rules import BLOCK, WARN, GateOverrides, load_gate_file
    from kvaudit.reports.verdict.waivers import read_waivers

    if on_inconclusive not in (None, BLOCK, WARN):
        raise SpecError(f"--on-inconclusive is {on_inconclusive!r}, wanted {BLOCK} or {WARN}")
    file = None if gate is None else load_gate_file(gate)
    named = None if file is None else file.table.get("pin")
    return GateOverrides(
        gate=file,
        # a pin is looked for beside the gate file that names it
        pin=load_pin(gate.parent / named) if gate and isinstance(named, str) else None,
        waivers=None if waivers is None else read_waivers(waivers),
        on_inconclusive=on_inconclusive,
        today=date.today(),
    )


def write_report(run: Path, asked: GateOverrides | None = None) -> None:
    """Write the report, print the answers and where the report lies."""
    from kvaudit.reports.run import write_report

    check_report_folder(run)
    print_verdict(wide_console(), write_report(run, asked), run)


def print_verdict(console: Console, findings: Findings, run: Path | None = None) -> None:
    """The answers, on at most a dozen lines; ``run`` where its report lies."""
    from kvaudit.reports.page.terminal import terminal_lines

    for line in terminal_lines(findings, run):
        print_line(console, line)


COMMAND = Command("report", group="Audit", order=4, call=report)
