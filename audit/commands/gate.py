"""``kvaudit gate``: the verdict of a run as an exit code. No model is loaded."""

from __future__ import annotations

from pathlib import Path

from audit.commands.command_line import wide_console
from audit.commands.gate_options import GateOptions
from audit.commands.report import print_verdict
from audit.core.intact import check_checkpoints
from reports.gate.gate_file import refuse_late
from reports.records.load import load_run
from reports.run import decided


def decide_run(run: Path, options: GateOptions) -> int:
    """Print the verdict of a run's records and return its exit code; a gate file that came after the run is refused."""
    check_checkpoints(run)
    findings = decided(load_run(run), options.asked())
    refuse_late(findings.rules)
    print_verdict(wide_console(), findings)
    return findings.verdict.exit_code
