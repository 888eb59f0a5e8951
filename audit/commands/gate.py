"""``kvaudit gate``: the verdict of a run as an exit code. No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command
from kvaudit.audit.commands.command_line import (
    GateFile,
    OnInconclusive,
    Waivers,
    say_unfinished,
    user_errors,
    wide_console,
)
from kvaudit.audit.commands.report import asked_of, print_verdict
from kvaudit.core.errors import SpecError
from kvaudit.core.provenance import check_checkpoints

if TYPE_CHECKING:
    from kvaudit.reports.gate.rules import Asked


Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="The folder of a run; with --pin, finished checkpoints.", show_default=False),
]
PinFlag = Annotated[
    bool,
    typer.Option(
        "--pin",
        help="Instead: pin a reference by its weights for later gates. RUN is a finished checkpoint, an arm's folder "
        "or an adapter, or several.",
    ),
]
PinOut = Annotated[
    Path | None, typer.Option("--out", help="With --pin: the file to write, or pin.json.", show_default=False)
]


def gate(
    run: Runs,
    *,
    gate_file: GateFile = None,
    waivers: Waivers = None,
    on_inconclusive: OnInconclusive = None,
    pin: PinFlag = False,
    out: PinOut = None,
) -> None:
    """Print a run's verdict, which is also the exit code.

    0 PASS, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID, 6 NOT MEASURABLE.
    """
    with user_errors("" if pin else f"kvaudit gate {run[0]}"):
        if pin:
            from kvaudit.audit.commands.pin import write_pin

            if gate_file or waivers or on_inconclusive:
                raise SpecError("--pin decides nothing; leave out --gate, --waivers and --on-inconclusive")
            write_pin(run, out or Path("pin.json"))
            return
        if len(run) > 1 or out is not None:
            raise SpecError("a gate is of one run and writes no file; several checkpoints and --out go with --pin")
        raise typer.Exit(_decide(run[0], asked_of(gate_file, waivers, on_inconclusive)))


def _decide(run: Path, asked: Asked) -> int:
    """Print the verdict of a run's records and return its exit code; a gate file that came after the run is refused."""
    from kvaudit.reports.gate.rules import refuse_late
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decided

    check_checkpoints(run)
    say_unfinished(run)
    findings = decided(load_run(run), asked, everything=False)
    refuse_late(findings.rules)
    print_verdict(wide_console(), findings)
    return findings.verdict.exit_code


COMMAND = Command("gate", group="Audit", order=5, call=gate, old={"pin": "gate --pin"})
