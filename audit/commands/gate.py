"""``kvaudit gate``: the verdict of a run as an exit code. No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvaudit.audit.commands.command_line import GateFile, OnInconclusive, Run, Waivers, user_errors, wide_console
from kvaudit.audit.commands.report import asked_of, print_verdict
from kvaudit.core.provenance import check_checkpoints

if TYPE_CHECKING:
    from kvaudit.reports.gate.rules import Asked


def gate(
    run: Run,
    *,
    gate_file: GateFile = None,
    waivers: Waivers = None,
    on_inconclusive: OnInconclusive = None,
) -> None:
    """Print a run's verdict; exits with 0 PASS, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID, 6 NOT MEASURABLE."""
    with user_errors(f"kvaudit gate {run}"):
        raise typer.Exit(_decide(run, asked_of(gate_file, waivers, on_inconclusive)))


def _decide(run: Path, asked: Asked) -> int:
    """Print the verdict of a run's records and return its exit code; a gate file that came after the run is refused."""
    from kvaudit.reports.gate.rules import refuse_late
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decided

    check_checkpoints(run)
    findings = decided(load_run(run), asked, everything=False)
    refuse_late(findings.rules)
    print_verdict(wide_console(), findings)
    return findings.verdict.exit_code
