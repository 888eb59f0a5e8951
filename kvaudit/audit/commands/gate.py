"""``kvaudit gate``: the verdict of a run as an exit code. No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
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

Runs = Annotated[list[Path], argument(metavar="RUN", help="The folder of a run; with --pin, finished checkpoints.")]
PinFlag = Annotated[
    bool,
    typer.Option(
        "--pin",
        help="Instead: pin a reference by its weights for later gates. RUN is a finished checkpoint, an arm's folder "
        "or an adapter, or several.",
    ),
]
PinOut = Annotated[Path | None, option("--out", help="With --pin: the file to write, or pin.json.")]


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
    with user_errors(*([] if pin else ["kvaudit", "gate", run[0]])):
        if pin:
            from kvaudit.audit.commands.pin import write_pin

            if gate_file or waivers or on_inconclusive:
                raise SpecError("--pin decides nothing; leave out --gate, --waivers and --on-inconclusive")
            write_pin(run, out or Path("pin.json"))
            return
        if len(run) > 1 or out is not None:
            raise SpecError("a gate is of one run and writes no file; several checkpoints and --out go with --pin")
        from kvaudit.reports.records.load import load_run
        from kvaudit.reports.run import decided
        from kvaudit.reports.verdict.rules import refuse_late_rules

        asked = asked_of(gate_file, waivers, on_inconclusive)
        check_checkpoints(run[0])
        say_unfinished(run[0])
        findings = decided(load_run(run[0]), asked, everything=False)
        refuse_late_rules(findings.rules)  # a gate file that came after the run
        print_verdict(wide_console(), findings)
        raise typer.Exit(findings.verdict.exit_code)


COMMAND = Command("gate", group="Audit", order=5, call=gate, old={"pin": "gate --pin"})
