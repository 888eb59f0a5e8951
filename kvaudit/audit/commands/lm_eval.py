"""``kvaudit harness lm-eval``: lm-evaluation-harness's own command line, which then knows the model ``kvaudit``."""

from __future__ import annotations

import sys

import typer

from kvaudit.audit.commands.base import Command
from kvaudit.audit.commands.base import user_errors
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import install_command, one_line

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on a compressed model.

    Everything is passed on: --model kvaudit --model_args 'pretrained=embedded,policy=snapkv:budget=96;window=8'.
    """
    with user_errors():
        try:
            import kvaudit.audit.serving.harness.model  # noqa: F401 - it tells the harness its name
        except ModuleNotFoundError as error:
            raise RunError(f"this needs a package more: {install_command('lm-eval')} ({error})") from error
        from lm_eval.__main__ import cli_evaluate

        sys.argv = ["kvaudit harness lm-eval", *context.args]
        try:
            cli_evaluate()
        except ValueError as error:  # what the harness raises for names and options that it does not know
            raise SpecError(f"lm-eval: {one_line(error)}") from error


COMMAND = Command(
    "lm-eval", group="harness", order=3, call=lm_eval, old={"lm-eval": "harness lm-eval"}, settings=PASSED_ON
)
