"""``kvaudit harness tasks``: our suites as tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.command_line import Plugins, check_seed, say, user_errors, wide_console
from kvaudit.core.errors import DataError, SpecError


def tasks(
    folder: Annotated[Path, argument(metavar="DIR", help="Where the tasks go.")],
    *,
    suites: Annotated[str, option(help="Which, with commas between; by default all that can be.")] = "",
    items: Annotated[int, typer.Option(min=1, help="Of each suite.")] = 128,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt's messages, where they are made to a length.")
    ] = 512,
    model: Annotated[str, typer.Option(help="Whose tokenizer counts them.")] = "embedded",
    seed: Annotated[int, typer.Option(min=0)] = 1000,
    plugin: Plugins = None,
) -> None:
    """Write suites as tasks of lm-evaluation-harness.

    Suites of one turn become tasks for any model of it: lm_eval --include_path DIR --tasks kvaudit.
    """
    with user_errors():
        from kvaudit.audit.runs.names import load_plugins
        from kvaudit.audit.sampling.checkpoints import chat_named
        from kvaudit.audit.serving.harness.tasks import write_tasks
        from kvaudit.suites.base import SUITES

        check_seed(seed)
        load_plugins(plugin or ())
        named = [name.strip() for name in suites.split(",") if name.strip()]
        count = chat_named(model).count_tokens
        console = wide_console()
        for name in named or SUITES.all():
            suite = SUITES.get(name)()
            try:
                number = suite.held("eval", items, seed)
                written = write_tasks(folder, suite, suite.items("eval", number, seed, context_tokens, count))
            except (SpecError, DataError) as error:
                if named:
                    raise
                say(console, f"left out: {error}")
                continue
            for task in written:
                more = f", {task.left_out} more take several turns or open with a dialogue" if task.left_out else ""
                say(console, f"{task.name}: {task.items} items{more}")


COMMAND = Command("tasks", group="harness", order=2, call=tasks, old={"tasks": "harness tasks"})
