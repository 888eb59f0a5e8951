"""What the commands share: options, where they print, and how errors that a user can mend end: one line, exit code 2.

Nothing heavy is imported here or on top of a command's file, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import argument, option
from kvaudit.core.errors import AuditError, DataError, SpecError
from kvaudit.core.files import plain_files
from kvaudit.core.provenance import MAX_THREADS, PROVENANCE, read_provenance
from kvaudit.core.text import clip, hide_passwords, inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.core.spec import RunSpec
    from kvaudit.reports.sections.shared.tables import Table as Rows

USAGE, _INTERRUPTED, _TERMINATED = 2, 130, 143  # exit codes; 128 + the signal's number, as of a shell
LONGEST_LINE = 2_000  # characters of an error
_WIDTH_OF_A_PIPE = 200  # characters
_MOST_SEED = 2**63 - 1  # what torch takes
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR}
_DISK_ERRORS = {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT}

SpecFile = Annotated[Path, argument(help="The run's YAML file.")]
Run = Annotated[Path, argument(help="The folder of a run.")]
RunOut = Annotated[Path | None, option(help="The run folder; by default runs/<name of the spec>.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder; starts it if there is none.")]
Limit = Annotated[int | None, option(min=1, help="At most this many items per suite; counts as another spec.")]
Anyway = Annotated[
    bool,
    typer.Option(
        "--anyway", help="Run what cannot pass, and what the pilot found nothing to measure in. Kept with the run."
    ),
]
Threads = Annotated[
    int | None,
    option(
        min=1,
        max=MAX_THREADS,
        help="Threads of this process; default: what the run began with, or the idle cores. Above 1: no other workers.",
    ),
]
Workers = Annotated[
    int | None,
    option(
        min=1,
        help="Processes of one thread each that share the work; default: idle cores if the model is embedded, else one "
        "for each GPU. A run that began with more threads has one process.",
    ),
]
LauncherText = Annotated[
    str,
    typer.Option(
        "--launcher",
        help="Where the workers are: local, or NAME:option=value of those that `list launchers` shows. Only with local "
        "does this process work too; others want --workers.",
    ),
]
Takeover = Annotated[
    bool,
    typer.Option("--takeover", help="Processes of this run on other machines are gone: take over what they claimed."),
]
Plugins = Annotated[list[Path] | None, option("--plugin", help="A Python file with policies or suites.")]


GateFile = Annotated[Path | None, option("--gate", help="A gate file; default: what the run's spec declares.")]
Waivers = Annotated[Path | None, option(help="A file of waivers: who, why, until when, which cells.")]
OnInconclusive = Annotated[str | None, option(help="block: exit with 4; warn: exit with 0 and a warning.")]


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler or ``kill`` sends it: ends like ctrl-C, so that claims and workers are let go of."""


def end_on_sigterm() -> None:
    """Make SIGTERM an exception of the main thread."""

    def stop(_: int, __: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)


@contextmanager
def user_errors(*command: object) -> Iterator[None]:
    """Print what the user can mend as one line on stderr and exit with 2; ctrl-C and SIGTERM print how to go on.

    ``command`` is what goes on, word by word: it is printed as a shell reads it.
    """
    hint = hide_passwords(shlex.join(map(str, command)))
    try:
        yield
    except AuditError as error:
        raise _failed(str(error), error.lines, error.exit_code) from None
    except KeyboardInterrupt as stop:
        what, code = ("terminated", _TERMINATED) if isinstance(stop, Terminated) else ("interrupted", _INTERRUPTED)
        typer.echo(f"{what}; continue with: {hint}" if hint else what, err=True)
        raise typer.Exit(code) from None
    except SystemExit as end:  # a task, a plug-in or a template is a program; ours end otherwise
        more = f"; what is written stays, continue with: {hint}" if hint else ""
        raise _failed(f"code that is not kvaudit's own ended the command by sys.exit({end.code!r}){more}") from end
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _failed(
                f"{str(error.filename)[:80]!r} cannot be a path ({error.strerror}); give a shorter one"
            ) from None
        if error.errno in _GONE and error.filename and not Path(error.filename).parent.exists():
            raise _failed(
                f"the folder of {str(error.filename)!r} is gone: it was moved or deleted meanwhile; put it back"
                + (f" and continue with: {hint}" if hint else "")
            ) from None
        if error.errno not in _DISK_ERRORS:
            raise
        where = f" {str(error.filename)!r}" if error.filename else ""
        more = f"; what is written stays, continue with: {hint}" if hint else ""
        raise _failed(f"cannot write{where} ({error.strerror}){more}") from None


def _failed(message: str, lines: Sequence[str] = (), code: int = USAGE) -> typer.Exit:
    for text in (f"error: {' '.join(message.split())}", *(f"  {' '.join(line.split())}" for line in lines)):
        typer.echo(inline(clip(hide_passwords(text), LONGEST_LINE)), err=True)
    return typer.Exit(code)


def say_unfinished(run: Path) -> None:
    """Say on stderr that a run is to be gone on with first, where it is a half; what follows is of that half."""
    names = {path.name for path in plain_files(run / "records", "*.json*")}
    # a file of records that has no .done.json beside it is still being written
    unsealed = sum(
        name.endswith(".jsonl") and f"{name.removesuffix('.jsonl')}.done.json" not in names for name in names
    )
    noted = read_provenance(run) if (run / PROVENANCE).is_file() else {}
    if unsealed or ("threads" in noted and "finished" not in noted):  # threads are noted by a run that works
        words = shlex.join(["kvaudit", "run", str(run / "spec.yaml"), "--out", str(run), "--resume"])
        typer.echo(f"this run is not finished; go on with it first: {inline(words)}", err=True)


def check_report_place(run: Path) -> None:
    """Raise DataError where the report's folder cannot be, because a file is there."""
    place = run / "report"
    if place.exists() and not place.is_dir():
        raise DataError(f"{str(place)!r} is a file, where the folder of the report belongs; move it away")


def check_seed(seed: int) -> None:
    """Raise SpecError for a seed beyond 63 bits."""
    if not 0 <= seed <= _MOST_SEED:
        raise SpecError(f"--seed is {seed}, wanted 0 to {_MOST_SEED}")


def wide_console() -> Console:
    """As wide as the terminal; a pipe or a log has no width, and whole lines can be searched there."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_A_PIPE)


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no colours, no breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, rows: Rows, last: str | None = None) -> None:
    """Print a table, up to the column ``last``."""
    from rich.table import Table

    width = len(rows.headers) if last is None else rows.headers.index(last) + 1
    table = Table(*rows.headers[:width])
    for row in rows.rows:
        table.add_row(*row[:width])
    console.print(table, markup=False)
    if width == len(rows.headers):
        for number, text in enumerate(rows.footnotes, 1):
            say(console, f"note {number}: {text}")


def selectors(words: Sequence[str], option: str) -> dict[str, str]:
    """``arm=naive`` words as a mapping."""
    found = dict[str, str]()
    for word in words:
        key, mark, value = word.partition("=")
        if not (mark and key and value):
            raise SpecError(f"{option} {word!r} is not KEY=VALUE, such as {option} arm=naive")
        if found.setdefault(key, value) != value:
            raise SpecError(f"{option} gives {key} as {found[key]} and as {value}; give one of them")
    return found


def set_data(spec: RunSpec) -> None:
    """Public suites find their rows through one variable, whoever names the folder."""
    from kvaudit.core.spec import expand

    if spec.data is not None:
        os.environ["KVAUDIT_DATA"] = expand("data", spec.data)
