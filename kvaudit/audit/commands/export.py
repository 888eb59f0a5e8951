"""``kvaudit harness export``: a run's records as logs that Inspect opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.base import Run, print_line, user_errors, wide_console
from kvaudit.core.errors import RunError
from kvaudit.core.provenance import read_provenance
from kvaudit.core.text import inline, install_command


def export(run: Run, *, out: Annotated[Path, option(help="The folder of the logs.")]) -> None:
    """Write a run's records as Inspect logs.

    Every finished unit becomes a `.eval` file.
    """
    with user_errors("kvaudit", "harness", "export", run, "--out", out):
        try:
            from kvaudit.audit.serving.harness.inspect_log import write_logs
        except ImportError:
            raise RunError(f"writing Inspect logs needs another package: {install_command('inspect')}") from None
        created = str(read_provenance(run).get("started") or "1970-01-01T00:00:00+00:00")
        written = list(write_logs(run, out, created))
        print_line(
            wide_console(), f"logs: {len(written)} in {inline(str(out))}; look at them with: inspect view --log-dir DIR"
        )


COMMAND = Command("export", group="harness", order=1, call=export, old={"export": "harness export"})
