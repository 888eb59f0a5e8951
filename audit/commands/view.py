"""``kvaudit view``: the answers behind a run's losses and gains, as pages to look at. No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from audit.commands.command_line import Run, say, user_errors, wide_console
from audit.core.text import inline

Out = Annotated[Path | None, typer.Option(help="The folder to write; by default RUN/view.", show_default=False)]


def view(run: Run, *, out: Out = None) -> None:
    """Write pages that show every answer a run lost or gained, reference and candidate side by side."""
    with user_errors(f"kvaudit view {run}"):
        _view(run, out or run / "view")


def _view(run: Path, out: Path) -> None:
    from reports.drift.comparison import comparison_of
    from reports.records.load import load_run
    from reports.view.folder import write_view

    data = load_run(run)
    flips = write_view(data, comparison_of(data.spec, data.records, data.provenance), out)
    console = wide_console()
    say(console, inline(f"view: {out / 'index.html'}"))
    say(console, f"{len(flips)} flips of {len({flip.item for flip in flips})} items")
