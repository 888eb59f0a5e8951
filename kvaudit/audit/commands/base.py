"""The class that declares a command, and the options, printing and one-line errors that commands share.

A file of this package declares a command by a module-level ``Command``. Nothing heavy is imported here or at the top
of a command's file, so that ``--help`` answers at once.

    def scan(paths: Paths) -> None:
        \"\"\"Find KV compression in configurations.\"\"\"

    SCAN = Command("scan", group="Disclose", order=2, call=scan)
"""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import pkgutil
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from kvaudit.core.errors import AuditError, DataError, SpecError, UnknownName
from kvaudit.core.files import plain_files
from kvaudit.core.provenance import (
    ENDED,
    JUDGED,
    LOOKS,
    MAX_THREADS,
    PROVENANCE,
    check_checkpoints,
    read_provenance,
    table_of,
)
from kvaudit.core.text import clip, hide_passwords, inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.audit.sampling.model import DtypeName
    from kvaudit.core.spec import RunSpec
    from kvaudit.reports.sections.shared.tables import Table

HELP_HEADINGS = ("Audit", "Look", "Disclose", "Serve and ask", "Stored answers", "Extend")  # in the order of the help
USAGE, _INTERRUPTED, _TERMINATED = 2, 130, 143  # exit codes; 128 + the signal's number, as in a shell
LONGEST_LINE = 2_000  # characters of an error
_PIPE_WIDTH = 200  # characters
_MOST_SEED = 2**63 - 1  # the largest that torch accepts
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR}
_DISK_ERRORS = {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT}

# for parameters without a default, or whose help names it
option, argument = partial(typer.Option, show_default=False), partial(typer.Argument, show_default=False)


class PlainCommand(TyperCommand):
    """A typer command whose help writes ``<str>``, not ``<list[str]>``, for an argument that may be repeated."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_rows = formatter.write_dl
        formatter.write_dl = lambda rows: write_rows([(_without_list(label), text) for label, text in rows])
        super().format_options(ctx, formatter)


def _without_list(label: str) -> str:
    return re.sub(r"<list\[(.+)\]>", lambda found: f"<{found[1].lower()}>", label)


@dataclass(frozen=True)
class Command:
    """A command and its place in the help.

    The first line of its function's docstring is its summary. A command without ``call`` is a group; it holds the
    commands whose ``group`` is its name. ``former_names`` maps a name of an earlier release, which still works, to the
    words typed now.
    """

    name: str
    _: KW_ONLY
    group: str  # a heading of the help, or the command that holds this one
    order: int  # in its group
    call: Callable[..., None] | typer.Typer | None = None
    help: str = ""  # of a command without a function
    former_names: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of typer's context

    @property
    def help_text(self) -> str:
        """The text of the command's ``--help``."""
        return self.help or inspect.getdoc(self.call) or ""

    @property
    def sort_key(self) -> tuple[int, int]:
        """The command's place in the help: (number of its heading, order below it).

        Members of a group command have no heading, and come last.
        """
        return HELP_HEADINGS.index(self.group) if self.group in HELP_HEADINGS else len(HELP_HEADINGS), self.order


def load_commands(package: str = "kvaudit.audit.commands") -> list[Command]:
    """Import every file of a package; return the commands that they declare, in the order of the help."""
    root = importlib.import_module(package)
    modules = (importlib.import_module(entry.name) for entry in pkgutil.iter_modules(root.__path__, f"{package}."))
    commands = [value for module in modules for value in vars(module).values() if isinstance(value, Command)]
    return sorted(commands, key=lambda command: (*command.sort_key, command.name))


def expand_options(call: Callable[..., None]) -> Callable[..., None]:
    """Return ``call`` with each dataclass parameter replaced by one option for each of its fields (a decorator).

    Commands can then share a group of options by one declaration.
    """
    hints = get_type_hints(call, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(call).parameters.items():
        if name not in groups:
            keyword = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.append(keyword)
            continue
        field_hints = get_type_hints(groups[name], include_extras=True)
        for entry in fields(groups[name]):
            keyword = inspect.Parameter(
                entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=field_hints[entry.name]
            )
            parameters.append(keyword)

    @wraps(call)
    def collect_options(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{entry.name: values.pop(entry.name) for entry in fields(group)})
        call(**values)

    collect_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    return collect_options


SpecFile = Annotated[Path, argument(help="The spec, a YAML file.")]
Run = Annotated[Path, argument(help="The folder of a run.")]
RunOut = Annotated[Path | None, option(help="Run folder to write. Default: runs/NAME, the name of the spec.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the folder, or start it if there is none.")]
Limit = Annotated[int | None, option(min=1, help="Ask at most this many items per suite; this changes the spec.")]
Threads = Annotated[
    int | None,
    option(
        min=1,
        max=MAX_THREADS,
        help="Threads of this process. Default: as many as the run started with, else all idle cores. With more than "
        "1 there is no second worker.",
    ),
]
Plugins = Annotated[
    list[Path] | None,
    option("--plugin", metavar="FILE", help="Python file with plug-ins, such as policies. May be repeated."),
]
Dtype = Annotated[str, typer.Option(help="Number format of the weights: float32, bfloat16 or auto.")]


def typed_command(*, resume: bool = False) -> list[str]:
    """Return the words of the command line as it was typed, with ``--resume`` added if ``resume`` and it is missing."""
    words = ["kvaudit", *sys.argv[1:]]
    return [*words, "--resume"] if resume and "--resume" not in words else words


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception: handled like ctrl-C, so that locks on units of work are released and workers stopped."""


def end_on_sigterm() -> None:
    """Make SIGTERM raise ``Terminated`` in the main thread."""

    def stop(_: int, __: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)


@contextmanager
def user_errors(*command: object) -> Iterator[None]:
    """Print an error of the body, if the user can fix it, as one line on stderr; exit with its code, usually 2.

    ``command`` holds the words of the command that continues the work. It is printed after ctrl-C or SIGTERM.
    """
    hint = hide_passwords(shlex.join(map(str, command)))
    advice = f"; finished work is kept; continue with: {hint}" if hint else ""
    try:
        yield
    except AuditError as error:
        raise _fail(str(error), error.lines, error.exit_code) from None
    except KeyboardInterrupt as stop:
        event, code = ("terminated", _TERMINATED) if isinstance(stop, Terminated) else ("interrupted", _INTERRUPTED)
        typer.echo(f"{event}; continue with: {hint}" if hint else event, err=True)
        raise typer.Exit(code) from None
    except SystemExit as end:  # from a plug-in, task or template; kvaudit itself raises typer.Exit
        if isinstance(end.__context__, BrokenPipeError):  # from rich: the reader, such as `head`, stopped reading
            raise typer.Exit(1) from None
        raise _fail(f"code outside kvaudit ended the command by sys.exit({end.code!r}){advice}") from end
    except OSError as error:
        path = f" {str(error.filename)!r}" if error.filename else ""
        if error.errno == errno.ENAMETOOLONG:
            raise _fail(f"{path[1:81]} cannot be a path ({error.strerror}); give a shorter one") from None
        if error.errno in _GONE and error.filename and _is_gone(Path(error.filename).parent):
            more = f" and continue with: {hint}" if hint else ""
            raise _fail(f"the folder of{path} is gone: it was moved or deleted meanwhile; restore it{more}") from None
        if error.errno not in _DISK_ERRORS:
            raise
        raise _fail(f"cannot write{path} ({error.strerror}){advice}") from None


def _is_gone(folder: Path) -> bool:
    """Return whether a folder is gone, or goes within a second (it may be about to be deleted file by file)."""
    until = time.monotonic() + 1.0
    while is_there := folder.exists():
        if time.monotonic() >= until:
            break
        time.sleep(0.05)
    return not is_there


def _fail(message: str, lines: Sequence[str] = (), code: int = USAGE) -> typer.Exit:
    for text in (f"error: {' '.join(message.split())}", *(f"  {' '.join(line.split())}" for line in lines)):
        typer.echo(inline(clip(hide_passwords(text), LONGEST_LINE)), err=True)
    return typer.Exit(code)


def check_run(run: Path) -> None:
    """Raise DataError if a run's checkpoints differ from their stored hashes; warn on stderr if it is unfinished."""
    check_checkpoints(run)
    names = {path.name for path in plain_files(run / "records", "*.json*")}
    # a file of records is still being written until its .done.json exists
    unsealed = sum(
        name.endswith(".jsonl") and f"{name.removesuffix('.jsonl')}.done.json" not in names for name in names
    )
    provenance = read_provenance(run) if (run / PROVENANCE).is_file() else {}
    has_begun, looks = "threads" in provenance, table_of(provenance, LOOKS)
    if unsealed or (has_begun and provenance.get("finished") is None) or (looks and ENDED not in looks):
        typer.echo(f"this run is not finished; finish it first: {inline(_finish_command(run, provenance))}", err=True)


def _finish_command(run: Path, provenance: Mapping[str, Any]) -> str:
    """Return the command that finishes a run; for a judged run it names the judge without its options."""
    judged = provenance.get(JUDGED)
    if not isinstance(judged, dict):
        return shlex.join(["kvaudit", "run", str(run / "spec.yaml"), "--out", str(run), "--resume"])
    # by default its folder is inside that of the run that was judged; otherwise only that run's name is known
    origin = run.parent.parent if run.parent.name == "judged" else judged.get("from")
    command = shlex.join(["kvaudit", "grade", "judge", str(origin), "--out", str(run)])
    judge = judged.get("judge")
    return f"{command} --judge {judge.get('name')}, with the options it had" if isinstance(judge, dict) else command


def check_report_folder(run: Path) -> None:
    """Raise DataError if there is a file where the folder of the report should be."""
    folder = run / "report"
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{str(folder)!r} is a file, but the report's folder goes there; move the file away")


def check_seed(seed: int) -> None:
    """Raise SpecError for a seed beyond 63 bits."""
    if not 0 <= seed <= _MOST_SEED:
        raise SpecError(f"--seed is {seed}, wanted 0 to {_MOST_SEED}")


def check_dtype(dtype: str) -> DtypeName:
    """Return the value of ``--dtype``; raise UnknownName for any other."""
    from kvaudit.audit.sampling.model import DtypeName

    if dtype not in get_args(DtypeName):
        raise UnknownName("dtype", dtype, get_args(DtypeName))
    return cast(DtypeName, dtype)


def wide_console() -> Console:
    """Return a console on stdout: as wide as the terminal, or wide enough for whole rows in a pipe or log."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def print_line(console: Console, text: str) -> None:
    """Print a line unchanged: no markup, colours or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_rows(console: Console, headings: Sequence[str], rows: Iterable[Sequence[str]], *, fold: bool = False) -> None:
    """Print rows as a table; ``fold`` wraps long cells instead of cutting them."""
    from rich.table import Table

    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold" if fold else "ellipsis")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table of a report and its footnotes."""
    print_rows(console, table.headers, table.rows)
    for number, text in enumerate(table.footnotes, 1):
        print_line(console, f"note {number}: {text}")


def parse_pairs(words: Sequence[str], name: str) -> dict[str, str]:
    """Return the KEY=VALUE words of the option ``name`` as a mapping; raise SpecError for other words."""
    pairs = dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if not (equals and key and value):
            raise SpecError(f"{name} is {word!r}, wanted KEY=VALUE")
        if pairs.setdefault(key, value) != value:
            raise SpecError(f"{name} gives {key} as {pairs[key]} and as {value}; give one of them")
    return pairs


def set_data_folder(spec: RunSpec) -> None:
    """Let suites read public rows from the folder that the spec names, if it names one."""
    from kvaudit.core.spec import expand

    if spec.data is not None:
        os.environ["KVAUDIT_DATA"] = expand("data", spec.data)
