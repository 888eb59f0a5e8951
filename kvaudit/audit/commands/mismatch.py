"""``kvaudit replay mismatch``: how far other samplers were from the learner's dense pass, with declared alarms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.base import Plugins, user_errors
from kvaudit.audit.commands.serving_again import ready_to_read, show_found


def mismatch(
    rollouts: Annotated[Path, argument(help="A file of one rollout a line.")],
    *,
    model: Annotated[str, option(help="The learner: the weights that sampled.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, as the learner computes.")] = "auto",
    temperature: Annotated[
        float | None, option(min=0.0, help="Of the log-probs; default: the recorded one, or 1.")
    ] = None,
    json_file: Annotated[Path | None, option("--json", help="Also write the numbers to this file.")] = None,
    plugin: Plugins = None,
) -> None:
    """Compare samplers' log-probs with those of the learner.

    The learner's are of one dense pass. Exits with 3 where an alarm rings.
    """
    with user_errors():
        from kvaudit.audit.rerun.measure import run_measure
        from kvaudit.audit.rerun.mismatch import Mismatch, survey
        from kvaudit.audit.sampling.checkpoints import load_model_or_adapter
        from kvaudit.core.files import write_output

        ready_to_read(dtype, temperature, plugin or ())
        found = survey(rollouts)
        loaded = load_model_or_adapter(model, dtype=dtype)  # type: ignore[arg-type]  # checked above
        measure = Mismatch(loaded, found, temperature=temperature)
        ((_, total),) = made = run_measure(measure)
        code = show_found(measure, made)
        if json_file is not None:
            write_output(json_file, measure.to_json(total))
        raise typer.Exit(code)


COMMAND = Command("mismatch", group="replay", order=2, call=mismatch, old={"mismatch": "replay mismatch"})
