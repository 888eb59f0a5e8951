"""The command line: collects the commands, each a file of ``kvaudit.audit.commands`` with its options.

Exit codes: 0 done (gate: PASS), 1 crash, 2 usage or input, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID, 6 NOT MEASURABLE,
130 interrupted, 143 terminated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvaudit import __version__
from kvaudit.audit.commands.base import HELP_HEADINGS, Command, load_commands
from kvaudit.audit.commands.base import USAGE, end_on_sigterm
from kvaudit.core.removed import removed_command

_FOUND = load_commands()
_RENAMED = {old: new for command in _FOUND for old, new in command.old.items()}


class Listed(TyperGroup):
    """Commands under their headings, each with its whole summary."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        rows: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None)
            line = (command.help or "").partition("\n")[0].rstrip(".")
            rows.setdefault(heading if heading in HELP_HEADINGS else "Commands", []).append((name, line))
        widest = max(map(len, self.commands))
        for heading, own in rows.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), line) for name, line in own])


class Root(Listed):
    """What is typed behind ``kvaudit``; former names do what they did, and say what they are called now."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if (refusal := removed_command(args)) is not None:
            typer.echo(f"error: {refusal}", err=True)
            raise typer.Exit(USAGE)
        if args and args[0] in _RENAMED:
            now = _RENAMED[args[0]]
            typer.echo(f"kvaudit {args[0]} is called kvaudit {now} now; the old name leaves with 0.2", err=True)
            args = [*now.split(), *args[1:]]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return ["[--version] [--help]", self.subcommand_metavar]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)  # its two options stand in the first line


_TYPER: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}
app = typer.Typer(
    name="kvaudit",
    cls=Root,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure what KV-cache compression did to the alignment of a model.",
    **_TYPER,
)


def _add(found: Sequence[Command]) -> None:
    """Put every command under its heading, or into the command that holds it."""
    held = {command.name: typer.Typer(**_TYPER) for command in found if command.call is None}
    for command in found:
        place, call = held.get(command.group, app), held.get(command.name, command.call)
        if isinstance(call, typer.Typer):
            place.add_typer(call, name=command.name, cls=Listed, help=command.text, rich_help_panel=command.group)
        elif call is not None:
            options = dict(command.settings)
            place.command(command.name, context_settings=options, rich_help_panel=command.group)(call)


_add(_FOUND)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvaudit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Measure what KV-cache compression did to the alignment of a model."""


def main() -> None:
    """Entry point of the ``kvaudit`` command."""
    end_on_sigterm()
    try:
        app()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()


if __name__ == "__main__":
    main()
