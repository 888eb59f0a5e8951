"""``kvaudit scan``: which mechanisms configurations switch on. They are read as data; nothing in them is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.base import user_errors

OPEN = 3  # exit code: a compressor that nobody answers for

Paths = Annotated[list[Path], argument(help="Files or folders of configurations.")]
Declarations = Annotated[
    Path | None, option("--declared", help="Declarations; default: kvaudit.yaml on top of each folder.")
]
Json = Annotated[Path | None, option("--json", help="Write the findings there, too.")]


def scan(paths: Paths, *, declared: Declarations = None, json: Json = None) -> None:
    """Find KV compression in configuration files.

    Launch scripts are read too, and nothing is run. Exits with 3 where nobody answers for what was found.
    """
    with user_errors():
        from json import dumps

        from kvaudit.audit.scan.scan import find_declarations
        from kvaudit.audit.scan.files import find_files
        from kvaudit.audit.scan.report import report_lines, scan_table
        from kvaudit.audit.scan.scan import scan_files as scan_files
        from kvaudit.core.files import write_output

        files, skipped = find_files(paths)
        result = scan_files(files, find_declarations(paths, declared), skipped)
        for line in report_lines(result):
            typer.echo(line)
        if json is not None:
            table = scan_table(result, [path.as_posix() for path in paths])
            write_output(json, dumps(table, indent=1, allow_nan=False) + "\n")
        raise typer.Exit(OPEN if result.open else 0)


COMMAND = Command("scan", group="Disclose", order=2, call=scan)
