"""``kvaudit harness``: commands that work with Inspect and lm-evaluation-harness."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import USAGE, Command, Run, option, print_line, user_errors, wide_console
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.provenance import read_provenance
from kvaudit.core.text import inline, install_command, one_line


def export(run: Run, *, out: Annotated[Path, option(help="Folder to write the logs to.")]) -> None:
    """Write a run's records as Inspect logs.

    Each finished unit becomes one `.eval` file.
    """
    with user_errors("kvaudit", "harness", "export", run, "--out", out):
        try:
            from kvaudit.audit.serving.harness.inspect_log import write_logs
        except ImportError:
            raise RunError(f"a package is missing to write Inspect logs: {install_command('inspect')}") from None
        created = str(read_provenance(run).get("started") or "1970-01-01T00:00:00+00:00")
        logs = list(write_logs(run, out, created))
        print_line(
            wide_console(), f"logs: {len(logs)} in {inline(str(out))}; view them with: inspect view --log-dir DIR"
        )


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on a compressed model.

    All options go to its command line: --model kvaudit
    --model_args 'pretrained=embedded,policy=snapkv:budget=96;window=8'.
    """
    with user_errors():
        try:
            import kvaudit.audit.serving.harness.model  # noqa: F401 - registers the model "kvaudit" with the harness
        except ModuleNotFoundError as error:
            raise RunError(f"a package is missing for lm-eval: {install_command('lm-eval')} ({error})") from error
        from lm_eval.__main__ import cli_evaluate

        sys.argv = ["kvaudit harness lm-eval", *context.args]
        try:
            cli_evaluate()
        except SystemExit as end:
            if end.code == USAGE:  # it has said what is wrong
                raise typer.Exit(USAGE) from None
            if not context.args or {"-h", "--help"} & set(context.args):
                raise typer.Exit from None
            raise
        except ValueError as error:  # raised by the harness for unknown names and options
            raise SpecError(f"lm-eval: {one_line(error)}") from error


HARNESS = Command("harness", group="Extend", order=3, help="Work with Inspect and lm-evaluation-harness.")
EXPORT = Command("export", group="harness", order=1, call=export, former_names={"export": "harness export"})
LM_EVAL = Command(
    "lm-eval",
    group="harness",
    order=3,
    call=lm_eval,
    former_names={"lm-eval": "harness lm-eval"},
    settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},  # passed on
)
