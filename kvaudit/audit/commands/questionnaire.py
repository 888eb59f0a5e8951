"""``kvaudit questionnaire``: what to ask a vendor about KV compression, and whether the answers are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.base import USAGE, user_errors

QuestionsOut = Annotated[
    Path | None, option("--out", help="Write the questions: FILE.md, or FILE.json for the schema.")
]
Blank = Annotated[Path | None, option(help="Write a file of answers to fill in.")]
AnswersToCheck = Annotated[Path | None, option("--check", help="Check a file of answers.")]


def questionnaire(*, out: QuestionsOut = None, blank: Blank = None, check: AnswersToCheck = None) -> None:
    """Write the questions for a vendor, or check the answers.

    Without an option the questions are printed. Exits with 2 where answers have faults.
    """
    with user_errors():
        from json import dumps

        from kvaudit.audit.scan import questionnaire as asked
        from kvaudit.core.errors import SpecError
        from kvaudit.core.files import write_output

        if check is not None:
            if out is not None or blank is not None:
                raise SpecError("--check writes nothing; leave out --out and --blank")
            faults, summary = asked.check_answers(check)
            for fault in faults:
                typer.echo(f"{check}: {fault}", err=True)
            typer.echo(summary)
            raise typer.Exit(USAGE if faults else 0)
        if out is not None and out.suffix not in (".md", ".json"):
            raise SpecError(f"--out is {str(out)!r}, wanted a name that ends in .md or .json")
        if out is not None:
            write_output(out, asked.markdown() if out.suffix == ".md" else dumps(asked.json_schema(), indent=1) + "\n")
        if blank is not None:
            write_output(blank, dumps(asked.blank_answers(), indent=1) + "\n")
        if out is None and blank is None:
            typer.echo(asked.markdown(), nl=False)


COMMAND = Command("questionnaire", group="Disclose", order=3, call=questionnaire)
