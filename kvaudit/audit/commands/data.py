"""``kvaudit data``: which public rows are there, and ``kvaudit data fetch`` for those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.base import print_line, user_errors, wide_console
from kvaudit.core.text import guide_path

data = typer.Typer(rich_markup_mode=None, help="Public rows that suites read: what is there, and fetching the rest.")
_OURS = (
    "not fetched for you: the rest of math_eval, whose problems have no licence of their own, and long_text, which is "
    f"any prose of yours as .txt ({guide_path('choose-suites.md')})"
)


@data.callback(invoke_without_command=True)
def show_data(context: typer.Context) -> None:
    """Print which rows are there, how many, under which licence and from where; asks no network."""
    if context.invoked_subcommand is not None:
        return
    with user_errors():
        from rich.table import Table

        from kvaudit.suites.catalogue import catalogue
        from kvaudit.suites.sources import data_folder

        folder, table = data_folder(), Table("rows", "", "how many", "licence", "from", "read by")
        for one in catalogue():
            lacks = bool(one.missing_files(folder))
            state = "lacking" if lacks else "there, other rows than these" if one.changed_files(folder) else "there"
            table.add_row(one.name, state, one.rows, one.licence, one.source_url, ", ".join(one.suites))
        console = wide_console()
        print_line(console, f"folder: {folder}")
        console.print(table, markup=False)
        print_line(console, _OURS)
        if lacking := [one.name for one in catalogue() if one.missing_files(folder)]:
            print_line(console, f"what lacks: kvaudit data fetch {' '.join(lacking)}")


@data.command("fetch")
def fetch_data(
    names: Annotated[list[str], typer.Argument(help="What to fetch, by the names that `kvaudit data` shows.")],
    *,
    mirror: Annotated[
        str | None, option("--from", help="Another address with the same paths, REPOSITORY/COMMIT/FILE.")
    ] = None,
) -> None:
    """Fetch rows by name from where they are published.

    They are pinned to a commit and held to a sha256.
    """
    with user_errors():
        from kvaudit.core.network import download
        from kvaudit.suites.catalogue import ADDRESS, check_rows, find_rows
        from kvaudit.suites.sources import data_folder

        console, folder = wide_console(), data_folder()
        for rows in dict.fromkeys(map(find_rows, names)):
            lacking = rows.missing_files(folder)  # a file that is there is never written over
            found = [(file, check_rows(file, download(rows.address(file, mirror or ADDRESS)))) for file in lacking]
            for file, raw in found:
                _write(folder / file.path, raw)
            done = f"{len(lacking)} of {len(rows.files)} files fetched" if lacking else "there already, nothing fetched"
            print_line(console, f"{rows.name}: {done}, {rows.rows} rows, {rows.licence}, from {rows.source_url}")
        print_line(console, f"in {folder}")


def _write(path: Path, raw: bytes) -> None:
    from kvaudit.core.errors import RunError
    from kvaudit.core.files import write_whole

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, raw)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); make the folder writable, or set KVAUDIT_DATA to another"
        ) from None


COMMAND = Command(
    "data", group="Extend", order=2, call=data, help="Show which public test data is there, and fetch the rest."
)
