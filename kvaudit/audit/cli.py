"""The command line, which collects the commands of ``kvaudit.audit.commands``.

Exit codes: 0 done (gate: PASS), 1 crash, 2 usage or input, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID, 6 NOT MEASURABLE, 130
interrupted, 143 terminated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvaudit import __version__
from kvaudit.audit.commands.base import HELP_HEADINGS, USAGE, Command, PlainCommand, end_on_sigterm, load_commands
from kvaudit.core.moved import removed_command
from kvaudit.core.text import inline

DISTRIBUTION = "kvaudit"
_COMMANDS = load_commands()
_FORMER_NAMES = {former: name for command in _COMMANDS for former, name in command.former_names.items()}


class CommandGroup(TyperGroup):
    """A group that lists its commands under headings with uncut summaries, and refuses an option given twice."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        rows: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None)
            summary = (command.help or "").partition("\n")[0].rstrip(".")
            rows.setdefault(heading if heading in HELP_HEADINGS else "Commands", []).append((name, summary))
        width = max(map(len, self.commands))
        for heading, heading_rows in rows.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in heading_rows])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and (option := _repeated_option(command, rest)) is not None:
            _refuse(f"{option} is given more than once, but only one value counts; give it once")
        return name, command, rest


def _repeated_option(command: Any, args: Sequence[str]) -> str | None:
    """Return the first option with a single value that ``args`` give twice; typer would silently use the last value."""
    # resilient_parsing: errors in the arguments are reported later, when the command is parsed
    context = command.make_context(command.name, [], resilient_parsing=True)
    _, _, order = command.make_parser(context).parse_args(list(args))
    single = [p for p in order if p.param_type_name == "option" and not (p.multiple or p.is_flag or p.count)]
    return next((str(option.opts[0]) for option in single if single.count(option) > 1), None)


def _refuse(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(USAGE)


class RootGroup(CommandGroup):
    """The command ``kvaudit``, which redirects former names of commands and refuses removed commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if (refusal := removed_command(args)) is not None:
            _refuse(refusal)
        if args and args[0] in _FORMER_NAMES:
            name = _FORMER_NAMES[args[0]]
            typer.echo(f"kvaudit {args[0]} is now kvaudit {name}; the old name will be removed in 0.2", err=True)
            args = [*name.split(), *args[1:]]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return ["[--version] [--help]", self.subcommand_metavar]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)  # the usage line shows the two options


_TYPER: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}
_SUMMARY = "Measure what KV-cache compression did to the alignment of a model."
app = typer.Typer(
    name="kvaudit", cls=RootGroup, add_completion=False, pretty_exceptions_enable=False, help=_SUMMARY, **_TYPER
)


def _add_commands(commands: Sequence[Command]) -> None:
    """Add every command to typer's ``app``, or to its group command if it belongs to one."""
    holders = {command.name: typer.Typer(**_TYPER) for command in commands if command.call is None}
    for command in commands:
        parent, call = holders.get(command.group, app), holders.get(command.name, command.call)
        if isinstance(call, typer.Typer):
            parent.add_typer(
                call, name=command.name, cls=CommandGroup, help=command.help_text, rich_help_panel=command.group
            )
        elif call is not None:
            settings: dict[str, Any] = {"context_settings": dict(command.settings), "rich_help_panel": command.group}
            parent.command(command.name, cls=PlainCommand, **settings)(call)


_add_commands(_COMMANDS)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"kvaudit {__version__}")
        raise typer.Exit


@app.callback(help=_SUMMARY)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Accept the options of ``kvaudit`` itself."""


def main() -> None:
    """Run the command line."""
    end_on_sigterm()
    try:
        app()
    except BrokenPipeError:  # the reader, such as `head`, stopped reading
        sys.stderr.close()
    except Exception as error:
        # looked for only now: reading the metadata of all packages would delay every command
        if not (unmet := unmet_requirements(DISTRIBUTION)):
            raise
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        typer.echo(f"error: {inline(message)}; {'; '.join(unmet)}: pip install --upgrade {DISTRIBUTION}", err=True)
        sys.exit(USAGE)


def unmet_requirements(distribution: str) -> list[str]:
    """Return a line for each package that a distribution requires and that is missing or too old."""
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in requires(distribution) or ()]
    except (ImportError, PackageNotFoundError):  # it runs from a folder, not installed
        return []
    unmet = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            present = version(requirement.name)
        except PackageNotFoundError:
            unmet.append(f"{requirement} is needed and not installed")
            continue
        if not requirement.specifier.contains(present, prereleases=True):
            unmet.append(f"{requirement} is needed, {present} is installed")
    return unmet


if __name__ == "__main__":
    main()
