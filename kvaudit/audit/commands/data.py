"""``kvaudit data``: show which public rows are present; ``kvaudit data fetch`` fetches missing ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, PlainCommand, option, print_line, print_rows, user_errors, wide_console
from kvaudit.core.text import guide_path

data = typer.Typer(rich_markup_mode=None)
_NOT_FETCHED = (
    "cannot be fetched: long_text (put any prose there, as .txt files) and the rest of math_eval (its problems have no "
    f"licence); see {guide_path('choose-suites.md')}"
)


@data.callback(invoke_without_command=True)
def show_data(context: typer.Context) -> None:
    """Print which public rows are present, with their number, licence and source; no network is used."""
    if context.invoked_subcommand is not None:
        return
    with user_errors():
        from kvaudit.suites.sources import catalogue, data_folder

        folder, missing, table = data_folder(), [], []
        for rows in catalogue():
            state = "present, but not the pinned version" if rows.changed_files(folder) else "present"
            if absent := rows.missing_files(folder):
                count = f"{len(absent)} of {len(rows.files)} files "
                state = f"{count if len(absent) < len(rows.files) else ''}missing"
                missing.append(rows.name)
            table.append([rows.name, state, rows.rows, rows.licence, rows.source_url, ", ".join(rows.suites)])
        console = wide_console()
        print_line(console, f"folder: {folder}")
        print_rows(console, ["rows", "state", "number of rows", "licence", "from", "read by"], table)
        print_line(console, _NOT_FETCHED)
        if missing:
            print_line(console, f"fetch what is missing: kvaudit data fetch {' '.join(missing)}")


@data.command("fetch", cls=PlainCommand)
def fetch_data(
    names: Annotated[list[str], typer.Argument(help="Rows to fetch, by the names that `kvaudit data` prints.")],
    *,
    mirror: Annotated[str | None, option("--from", help="Address of a mirror with REPOSITORY/COMMIT/FILE.")] = None,
) -> None:
    """Fetch public rows from where they are published.

    Each file is pinned to a commit, and its sha256 is checked.
    """
    with user_errors():
        from kvaudit.core.network import download
        from kvaudit.suites.sources import ADDRESS, check_rows, data_folder, find_rows

        console, folder = wide_console(), data_folder()
        for rows in dict.fromkeys(map(find_rows, names)):
            missing = rows.missing_files(folder)  # existing files are never overwritten
            contents = [(file, check_rows(file, download(rows.address(file, mirror or ADDRESS)))) for file in missing]
            for file, raw in contents:
                _write_file(folder / file.path, raw)
            state = f"{len(missing)} of {len(rows.files)} files fetched" if missing else "already present"
            print_line(console, f"{rows.name}: {state}, {rows.rows} rows, {rows.licence}, from {rows.source_url}")
        print_line(console, f"in {folder}")


def _write_file(path: Path, raw: bytes) -> None:
    from kvaudit.core.errors import RunError
    from kvaudit.core.files import write_whole

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, raw)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); make the folder writable, or set KVAUDIT_DATA to another"
        ) from None


COMMAND = Command("data", group="Extend", order=2, call=data, help="Show which public test data is here; fetch more.")
