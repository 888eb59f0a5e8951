"""``kvaudit judge``: grade the stored transcripts of a run again, into another run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from audit.commands.command_line import Plugins, Run, say, user_errors, wide_console
from audit.commands.run import set_data
from audit.core.text import inline

if TYPE_CHECKING:
    from audit.runs.judge import Change


def judge(
    run: Run,
    *,
    out: Annotated[Path, typer.Option(help="The folder of the judged run.", show_default=False)],
    plugin: Plugins = None,
) -> None:
    """Grade a run's stored transcripts again, as suites grade now; samples nothing and leaves the run as it is."""
    with user_errors(f"kvaudit judge {run} --out {out}"):
        _judge(run, out, tuple(plugin or ()))


def _judge(path: Path, out: Path, plugins: Sequence[Path]) -> None:
    """Judge what is not judged yet, print what changed by suite and how to see the rest."""
    from rich.console import Console

    from audit.runs.folder import begun_run
    from audit.runs.judge import Judging
    from audit.runs.names import load_plugins

    files = load_plugins(plugins)
    source = begun_run(path)
    set_data(source.spec)
    judging = Judging(source, out, Console(stderr=True), files)
    _print(judging.work())
    console = wide_console()
    if judging.unfinished:
        say(console, f"left out: {len(judging.unfinished)} unfinished units, first {inline(judging.unfinished[0])}")
    say(console, f"judged: {inline(str(out))}; show it with: kvaudit report {inline(str(out))}")


def _print(changes: Sequence[Change]) -> None:
    from rich.table import Table

    table = Table("suite", "version", "answers", "scores changed", "outcomes changed")
    for change in changes:
        table.add_row(inline(change.suite), inline(change.versions), *map(str, change[2:]))
    wide_console().print(table, markup=False)
