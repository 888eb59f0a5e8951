"""How was the embedded model made, and how is the larger one for long contexts made? From procedural text alone.

    python -m bench.pretraining --out FOLDER [--size embedded|mid] [--steps N] [--resume]

Takes hours on one core; docs/study.md and docs/results/study.md use the larger model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from bench.pretraining.pretrain import UNFINISHED, begin, complete
from bench.pretraining.recipes import SIZES
from kvaudit.audit.commands.base import Resume, check_seed, print_line, user_errors
from kvaudit.audit.runs.folder import make_folder
from kvaudit.audit.runs.progress import Meter
from kvaudit.core.errors import RunError, UnknownName


def pretrain(
    out: Annotated[Path, typer.Option(help="The folder for the model.", show_default=False)],
    size: Annotated[
        str,
        typer.Option(
            help="embedded: what ships, up to 224 tokens; mid: five times the parameters, up to 1,088 tokens."
        ),
    ] = "embedded",
    seed: Annotated[int, typer.Option(min=0, help="0 gave the model that ships.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop the recipe early.", show_default=False)] = None,
    resume: Resume = False,
) -> None:
    """Train the small model that ships with the package, or a larger one, from procedural text."""
    with user_errors("python", "-m", "bench.pretraining", "--out", out, "--size", size, "--seed", seed, "--resume"):
        _train(out, size=size, seed=seed, steps=steps, resume=resume)


def _train(out: Path, *, size: str, seed: int, steps: int | None, resume: bool) -> None:
    """Train into an empty folder, or one with a state; raises RunError if the folder has anything else."""

    check_seed(seed)
    if size not in SIZES:
        raise UnknownName("--size", size, SIZES)
    make_folder(out)
    if any(out.iterdir()) and not resume:
        raise RunError(f"{str(out)!r} is not empty; give another --out, or --resume where a training stopped")
    if any(out.iterdir()) and not (out / UNFINISHED).exists():
        raise RunError(
            f"{str(out)!r} has no {UNFINISHED} to go on from: it is finished, or none of ours; give another --out"
        )
    disable_progress_bar()
    console, training = Console(), begin(out, size=size, seed=seed)
    total = min(steps or training.recipe.steps, training.recipe.steps)
    with Meter(console, "pretrain", total, done=training.steps) as meter:
        complete(
            training,
            out,
            steps=steps,
            progress=lambda done, _, measures: meter.at(done, f"loss {measures['loss']:.3f}"),
        )
    print_line(console, f"model: {out}")


if __name__ == "__main__":
    typer.run(pretrain)
