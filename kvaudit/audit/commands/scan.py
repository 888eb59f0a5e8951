"""``kvaudit scan`` and ``kvaudit questionnaire``: find KV compression in configurations; ask a vendor about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import USAGE, Command, argument, option, user_errors

OPEN = 3  # exit code if a lossy mechanism is neither declared nor corrected

Paths = Annotated[list[Path], argument(help="Files or folders with configurations.")]
Declarations = Annotated[
    Path | None, option("--declared", help="Declarations. Default: kvaudit.yaml on top of each folder.")
]
Json = Annotated[Path | None, option("--json", help="Also write the findings to this JSON file.")]
QuestionsOut = Annotated[Path | None, option("--out", help="Write the questions to FILE.md, or a schema to FILE.json.")]
Blank = Annotated[Path | None, option(help="Write a file of answers to fill in.")]
AnswersToCheck = Annotated[Path | None, option("--check", help="Check a filled-in file of answers.")]


def scan(paths: Paths, *, declared: Declarations = None, json: Json = None) -> None:
    """Find KV compression in configuration files.

    Reads launch scripts too, and runs nothing. Exits with 3 if a finding is neither declared nor corrected.
    """
    with user_errors():
        from json import dumps

        from kvaudit.audit.scan.files import find_files
        from kvaudit.audit.scan.scan import find_declarations, report_lines, scan_files, scan_table
        from kvaudit.core.files import write_output

        files, skipped, left_out = find_files(paths)
        result = scan_files(files, find_declarations(paths, declared), skipped, left_out)
        for line in report_lines(result):
            typer.echo(line)
        if json is not None:
            table = scan_table(result, [path.as_posix() for path in paths])
            write_output(json, dumps(table, indent=1, allow_nan=False) + "\n")
        raise typer.Exit(OPEN if result.open else 0)


def questionnaire(*, out: QuestionsOut = None, blank: Blank = None, check: AnswersToCheck = None) -> None:
    """Write the questions for a vendor, or check the answers.

    Without an option the questions are printed. Exits with 2 if the answers have faults.
    """
    with user_errors():
        from json import dumps

        from kvaudit.audit.scan.questionnaire import blank_answers, check_answers, json_schema, markdown
        from kvaudit.core.errors import SpecError
        from kvaudit.core.files import write_output

        if check is not None:
            if out is not None or blank is not None:
                raise SpecError("--check writes nothing; leave out --out and --blank")
            faults, summary = check_answers(check)
            for fault in faults:
                typer.echo(f"{check}: {fault}", err=True)
            typer.echo(summary)
            raise typer.Exit(USAGE if faults else 0)
        if out is not None and out.suffix not in (".md", ".json"):
            raise SpecError(f"--out is {str(out)!r}, wanted a name that ends in .md or .json")
        if out is not None:
            write_output(out, markdown() if out.suffix == ".md" else dumps(json_schema(), indent=1) + "\n")
        if blank is not None:
            write_output(blank, dumps(blank_answers(), indent=1) + "\n")
        if out is None and blank is None:
            typer.echo(markdown(), nl=False)


SCAN = Command("scan", group="Disclose", order=2, call=scan)
QUESTIONNAIRE = Command("questionnaire", group="Disclose", order=3, call=questionnaire)
