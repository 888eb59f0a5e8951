"""``kvaudit grade guard``: show the stored conversations of a run to a guard; nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command
from kvaudit.audit.commands.command_line import Plugins, Run, say, set_data, user_errors, wide_console
from kvaudit.core.errors import SpecError
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.audit.runs.folder import RunFolder
    from kvaudit.audit.runs.guard import BlockedCounts

Guards = Annotated[
    list[str] | None,
    typer.Option("--guard", help="NAME or NAME:option=value,... (kvaudit list guards) instead of the spec's guards."),
]


def guard(run: Run, *, guard: Guards = None, plugin: Plugins = None) -> None:
    """Show a run's stored answers to a guard.

    What it blocks is kept beside the run's records.
    """
    words = [word for text in guard or () for word in ("--guard", text)]
    with user_errors("kvaudit", "grade", "guard", run, *words):
        from kvaudit.audit.runs.folder import begun_run
        from kvaudit.audit.runs.names import load_plugins

        load_plugins(plugin or ())
        begun = begun_run(run)
        set_data(begun.spec)
        if not (chosen := guard or begun.spec.guard):
            raise SpecError("the run's spec names no guard; give --guard NAME:option=value,... (kvaudit list guards)")
        guard_all(begun, chosen)
        say(wide_console(), f"guarded: {inline(str(run))}; show it with: kvaudit report {inline(str(run))}")


def guard_all(run: RunFolder, texts: Sequence[str]) -> None:
    """Set each guard before the run's stored answers and print what it blocked; all are known before one begins."""
    from rich.console import Console

    from kvaudit.audit.judges.guards.base import GUARDS
    from kvaudit.audit.runs.guard import Guarding
    from kvaudit.core.options import parse_named

    for text, chosen in [(text, parse_named(GUARDS, text)) for text in texts]:
        stage = Guarding(run, chosen, text, Console(stderr=True))
        _print(chosen.folder, stage.work())
        if stage.unfinished:
            say(wide_console(), f"left out: {len(stage.unfinished)} unfinished units, first {stage.unfinished[0]}")


def _print(label: str, found: Sequence[BlockedCounts]) -> None:
    from rich.table import Table

    table = Table("suite", "answers", "input blocked", "output blocked", "guard failed", title=label)
    for row in found:
        table.add_row(inline(row.suite), *map(str, row[1:]))
    console = wide_console()
    console.print(table, markup=False)
    if failed := sum(row.failed for row in found):
        say(console, f"unknown: the guard failed on {failed} answers; the same command asks it again")


COMMAND = Command("guard", group="grade", order=2, call=guard, old={"guard": "grade guard"})
