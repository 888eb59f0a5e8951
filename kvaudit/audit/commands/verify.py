"""``kvaudit replay verify``: replay recorded rollouts and say whether their policy explains them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.base import Plugins, user_errors
from kvaudit.audit.commands.serving_again import ready_to_read, show_found
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from kvaudit.audit.replay.rollout_checks import RecordedRollouts


def verify(
    checkpoint: Annotated[Path | None, argument(help="The folder of a finished checkpoint.")] = None,
    *,
    rollouts: Annotated[
        str | None, option(help="How many of its rollouts, default all; or a file of rollouts.")
    ] = None,
    model: Annotated[str | None, option(help="The model that sampled a file.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, as it was sampled.")] = "auto",
    tolerance: Annotated[float | None, option(min=0.0, help="Nats on the worst token; default: the dtype's.")] = None,
    temperature: Annotated[
        float | None, option(min=0.0, help="Of the log-probs; default: the recorded one, or 1.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Replay recorded rollouts: does their policy explain them?

    Exits with 3 where it does not explain their log-probs.
    """
    with user_errors():
        from kvaudit.audit.rerun.measure import run_measure
        from kvaudit.audit.rerun.verify import Verify
        from kvaudit.audit.sampling.checkpoints import load_model_or_adapter

        if tolerance is not None and not math.isfinite(tolerance):
            raise SpecError(f"--tolerance is {tolerance:g}, wanted a finite number of nats")
        ready_to_read(dtype, temperature, plugin or ())
        sources, name = _sources(checkpoint, rollouts, model)
        loaded = load_model_or_adapter(name, dtype=dtype)  # type: ignore[arg-type]  # checked above
        measure = Verify(loaded, sources, tolerance=tolerance, temperature=temperature)
        raise typer.Exit(show_found(measure, run_measure(measure)))


def _sources(checkpoint: Path | None, rollouts: str | None, model: str | None) -> tuple[list[RecordedRollouts], str]:
    """The rollouts by their files, and the name of the model that is to explain them.

    ``rollouts`` is a count of a checkpoint's own, or the path of a file.
    """
    from kvaudit.audit.replay.interchange import read_rollouts
    from kvaudit.audit.rerun.finished import checkpoint_rollouts

    if checkpoint is not None:
        if model is not None or (rollouts is not None and not rollouts.isdecimal()):
            raise SpecError(
                "a checkpoint is verified by its own weights and rollouts; give CHECKPOINT [--rollouts COUNT], "
                "or --rollouts FILE --model MODEL"
            )
        return _first(checkpoint_rollouts(checkpoint), rollouts), str(checkpoint)
    if model is None or rollouts is None or rollouts.isdecimal():
        raise SpecError(
            "what to verify is missing; give CHECKPOINT [--rollouts COUNT], or --rollouts FILE --model MODEL"
        )
    return [read_rollouts(Path(rollouts))], model


def _first(sources: list[RecordedRollouts], count: str | None) -> list[RecordedRollouts]:
    if count is None:
        return sources
    left, kept = int(count), sum(len(recorded.rollouts) for recorded in sources)
    if not 1 <= left <= kept:
        raise SpecError(f"--rollouts is {count}, the checkpoint keeps {kept}; give 1 to that many")
    found: list[RecordedRollouts] = []
    for recorded in sources:
        found += [replace(recorded, rollouts=recorded.rollouts[:left])] if left > 0 else []
        left -= len(recorded.rollouts)
    return found


COMMAND = Command("verify", group="replay", order=1, call=verify, old={"verify": "replay verify"})
