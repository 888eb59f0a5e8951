"""``kvaudit pretrain``: the command that made the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from audit.commands.command_line import check_seed, say, user_errors
from audit.core.errors import RunError


def pretrain(
    out: Annotated[Path, typer.Option(help="The folder for the model.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="0 gave the model that ships.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop the recipe early.", show_default=False)] = None,
) -> None:
    """Train the small model that ships with the package, from procedural text."""
    with user_errors(f"kvaudit pretrain --out {out}"):
        _train(out, seed=seed, steps=steps)


def _train(out: Path, *, seed: int, steps: int | None) -> None:
    """Train into an empty folder; raises RunError where something is there already."""
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from audit.embedded.pretrain import Recipe, pretrain
    from audit.runs.folder import make_folder
    from audit.runs.progress import Meter

    check_seed(seed)
    make_folder(out)
    if any(out.iterdir()):
        raise RunError(f"{str(out)!r} is not empty; give another --out")
    disable_progress_bar()
    console = Console()
    total = min(steps or Recipe().steps, Recipe().steps)
    with Meter(console, "pretrain", total) as meter:
        pretrain(
            out,
            seed=seed,
            steps=steps,
            progress=lambda done, _, measures: meter.at(done, f"loss {measures['loss']:.3f}"),
        )
    say(console, f"model: {out}")
