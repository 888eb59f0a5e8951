"""``kvaudit report``, and how a verdict is printed: no model is loaded."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from audit.commands.command_line import say, wide_console
from audit.commands.gate_options import GateOptions
from audit.core.intact import check_checkpoints
from reports.gate.gate_file import Asked
from reports.page.findings import Findings
from reports.page.story import banner
from reports.page.tables import Table as Rows
from reports.page.tables import decided
from reports.page.tables import gate as gate_table
from reports.run import write_report

_LAST_COLUMN = "one-sided bounds, margin"  # a terminal has no room for what the report shows beyond it


def write(run: Path, options: GateOptions) -> None:
    """Write the report of a run whose checkpoints are as they were finished; raises DataError where one is not."""
    check_checkpoints(run)
    write_checked(run, options.asked())


def write_checked(run: Path, asked: Asked | None = None) -> None:
    """Write the report, print the verdict tables and where the report lies."""
    findings = write_report(run, asked)
    console = wide_console()
    print_verdict(console, findings)
    say(console, f"report: {run / 'report' / 'report.html'}")


def print_verdict(console: Console, findings: Findings) -> None:
    """The gate table, one line per arm, and the sentences of the banner."""
    top = banner(findings)
    _print_table(console, gate_table(findings, findings.verdict.decisions, gated=True), _LAST_COLUMN)
    _print_table(console, decided(findings))
    if top.alarm:
        say(console, f"NOT THE GATE: {top.alarm}")
    say(console, f"verdict: {top.status.value} {top.number}".rstrip())
    for line in (top.sentence, top.about, *top.asides):
        if line:
            say(console, line)


def _print_table(console: Console, rows: Rows, last: str | None = None) -> None:
    width = len(rows.headers) if last is None else rows.headers.index(last) + 1
    table = Table(*rows.headers[:width])
    for row in rows.rows:
        table.add_row(*row[:width])
    console.print(table, markup=False)
