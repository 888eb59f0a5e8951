"""``kvaudit pretrain``: the command that made the embedded model."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from audit.commands.console import check_seed
from audit.core.errors import RunError
from audit.embedded.pretrain import Recipe, pretrain
from audit.runs.folder import make_folder
from audit.runs.progress import Meter


def pretrain_model(out: Path, *, seed: int, steps: int | None) -> None:
    """Train into an empty folder; raises RunError where something is there already."""
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
    console.print(f"model: {out}", markup=False, highlight=False, soft_wrap=True)
