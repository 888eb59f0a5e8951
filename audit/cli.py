"""The command line: collects the commands, each a file of ``kvaudit.audit.commands`` with its options.

Exit codes: 0 done (gate: PASS), 1 crash, 2 usage or input, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID, 6 NOT MEASURABLE,
130 interrupted, 143 terminated.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvaudit import __version__
from kvaudit.audit.commands.adjudicate import adjudicate
from kvaudit.audit.commands.card import card
from kvaudit.audit.commands.check import check_setting, init_spec
from kvaudit.audit.commands.command_line import end_on_sigterm
from kvaudit.audit.commands.compare import compare
from kvaudit.audit.commands.data import data
from kvaudit.audit.commands.displace import displace
from kvaudit.audit.commands.explain import explain
from kvaudit.audit.commands.export import export
from kvaudit.audit.commands.gate import gate
from kvaudit.audit.commands.generate import generate
from kvaudit.audit.commands.guard import guard
from kvaudit.audit.commands.judge import judge
from kvaudit.audit.commands.listing import listing
from kvaudit.audit.commands.lm_eval import PASSED_ON, lm_eval
from kvaudit.audit.commands.mismatch import mismatch
from kvaudit.audit.commands.pin import pin
from kvaudit.audit.commands.plan import plan
from kvaudit.audit.commands.probe import probe
from kvaudit.audit.commands.questionnaire import questionnaire
from kvaudit.audit.commands.recipe import recipe
from kvaudit.audit.commands.remedy import remedy
from kvaudit.audit.commands.report import report
from kvaudit.audit.commands.run import evaluate, join, run, train
from kvaudit.audit.commands.scan import scan
from kvaudit.audit.commands.serve import serve
from kvaudit.audit.commands.show import show
from kvaudit.audit.commands.tasks import tasks
from kvaudit.audit.commands.verify import verify
from kvaudit.audit.commands.view import view

app = typer.Typer(
    name="kvaudit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure what KV-cache compression did to the alignment of a model.",
)
app.add_typer(listing, name="list")
app.add_typer(data, name="data")
_VERDICTS = (report, view, gate, card, pin, adjudicate, compare, plan)
_DECLARED = (scan, questionnaire)
_RUNS = (
    run,
    join,
    train,
    evaluate,
    remedy,
    judge,
    guard,
    displace,
    explain,
    probe,
    show,
    export,
    verify,
    recipe,
    mismatch,
)
_MODELS = (generate, serve, tasks)
for command in (*_VERDICTS, *_RUNS, *_MODELS, *_DECLARED):
    app.command()(command)

app.command("check")(check_setting)
app.command("init")(init_spec)
app.command("lm-eval", context_settings=PASSED_ON)(lm_eval)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvaudit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Measure what KV-cache compression did to the alignment of a model."""


def main() -> None:
    """Entry point of the ``kvaudit`` command."""
    end_on_sigterm()
    try:
        app()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()


if __name__ == "__main__":
    main()
