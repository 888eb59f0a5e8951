"""``kvaudit gate``: the verdict of a run as an exit code, and its lines in the drift ledger. No model is loaded."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from audit.commands.console import say, wide_console
from audit.commands.gate_options import GateOptions
from audit.commands.report import print_verdict
from audit.core.intact import check_checkpoints
from reports.drift_ledger import append, entries_of, history, read_ledger
from reports.gate import Status, Verdict, decide
from reports.gate_file import Asked
from reports.load import load_run
from reports.pin import pin_from
from reports.report import Report
from reports.run_report import run_report


def decide_run(run: Path, options: GateOptions, ledger: Path | None = None) -> int:
    """Print the verdict of a run's records and return its exit code; every file is read before anything is printed."""
    check_checkpoints(run)
    asked = options.asked()
    if ledger is not None:
        read_ledger(ledger)
    report = run_report(load_run(run), asked)
    verdict = decide(report)
    print_verdict(wide_console(), report, verdict)
    if ledger is not None:
        _enter(ledger, report, verdict, asked)
    return verdict.exit_code


def _enter(ledger: Path, report: Report, verdict: Verdict, asked: Asked) -> None:
    """Append the gated cells and print how far each has moved from the pin, run by run."""
    console = wide_console()
    if verdict.status is Status.INVALID:
        say(console, f"ledger: nothing added to {ledger}, an INVALID run has no drift from the pin")
        return
    kept = pin_from(report.provenance) if report.plan.rules.pin is not None and asked.pin is None else asked.pin
    known = read_ledger(ledger)
    new = entries_of(report, verdict, kept, date.today().isoformat())
    say(console, f"ledger: {append(ledger, new)} lines added to {ledger}; drift from pin {new[0].pin[:12]} so far:")
    for line in history(known, new, report.plan):
        say(console, line)
