"""``kvaudit replay displace``: leads every checkpoint along the reference's answers and writes displacement.json."""

from __future__ import annotations

from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.command_line import Plugins, Run, say, user_errors
from kvaudit.audit.commands.serving_again import opened, show_found


def displace(
    run: Run,
    *,
    tokens: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="At most this many tokens of a checkpoint, policy and suite.")
    ] = 16384,
    threads: Annotated[int | None, option(min=1, help="Default: what the run began with.")] = None,
    plugin: Plugins = None,
) -> None:
    """Measure how far next-token probabilities moved.

    They are compared on the reference's own answers. `report` shows it, and no gate goes by it.
    """
    with user_errors("kvaudit", "replay", "displace", run):
        from rich.console import Console

        from kvaudit.audit.again.displace import Displace
        from kvaudit.audit.again.measure import serve_again
        from kvaudit.core.conditions import condition_names
        from kvaudit.core.provenance import check_checkpoints

        begun = opened(run, plugin or (), threads)
        check_checkpoints(run)
        measure, console = Displace(begun, tokens=tokens), Console(stderr=True)
        references = begun.spec.evaluate.references
        for text in (text for text, plain in references.items() if text != plain):
            name = condition_names(references)[text]
            say(console, f"{name}: not measured, an engine shows nobody its distributions")
        found = serve_again(measure, console)
        measure.write(found)
        show_found(measure, found)


COMMAND = Command("displace", group="replay", order=3, call=displace, old={"displace": "replay displace"})
