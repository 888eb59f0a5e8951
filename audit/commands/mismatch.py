"""``kvaudit mismatch``: how far other stacks' samplers were from the learner's dense pass, with declared alarms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.command_line import Plugins, say, user_errors, wide_console
from kvaudit.audit.commands.verify import check_reading
from kvaudit.core.alarms import MISMATCH
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.audit.runs.mismatch import Mismatch, Survey
    from kvaudit.audit.sampling.model import LoadedModel

ALARM = 3
MISMATCH_FORMAT, MISMATCH_VERSION = "kvaudit.mismatch", 1


def mismatch(
    rollouts: Annotated[Path, typer.Argument(help="A file of one rollout a line.", show_default=False)],
    *,
    model: Annotated[str, typer.Option(help="The learner: the weights that sampled.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, as the learner computes.")] = "auto",
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Of the log-probs; default: the recorded one, or 1.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the numbers to this file.", show_default=False)
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Compare samplers' log-probs with the learner's dense pass; exits with 3 where an alarm rings."""
    with user_errors():
        raise typer.Exit(_mismatch(rollouts, model, dtype, temperature, json_file, tuple(plugin or ())))


def _mismatch(
    rollouts: Path, name: str, dtype: str, temperature: float | None, json_file: Path | None, plugins: tuple[Path, ...]
) -> int:
    """Print the panel; returns 0, or 3 where an alarm rings."""
    from transformers.utils.logging import set_verbosity_error

    from kvaudit.audit.runs.mismatch import measure, survey
    from kvaudit.audit.runs.names import load_plugins
    from kvaudit.audit.sampling.given import load_named
    from kvaudit.core.files import write_output

    check_reading(dtype, temperature)
    load_plugins(plugins)
    set_verbosity_error()  # of loading; what is wrong with a model is said in one line
    found = survey(rollouts)
    model = load_named(name, dtype=dtype)  # type: ignore[arg-type]  # checked above
    made = measure(model, found, temperature=temperature)
    _print(found, model, made)
    if json_file is not None:
        write_output(json_file, _json(found, model, made))
    return ALARM if made.alarms else 0


def _json(found: Survey, model: LoadedModel, made: Mismatch) -> str:
    import json

    table = {
        "format": MISMATCH_FORMAT,
        "version": MISMATCH_VERSION,
        "rollouts": found.rollouts,
        "skipped": len(found.undrawn),
        "tokens": found.tokens,
        "written_by": sorted(found.stacks),
        "model": model.name,
        "model_sha256": model.sha256,
        "dtype": _dtype(model),
        "temperature": made.temperature,
        "panel": made.panel,
        "alarms": [
            {"name": bound.name, "value": made.panel[bound.name], "least": bound.least, "most": bound.most}
            for bound in made.alarms
        ],
    }
    return json.dumps(table, indent=1, allow_nan=False) + "\n"


def _print(found: Survey, model: LoadedModel, made: Mismatch) -> None:
    from rich.table import Table

    from kvaudit.reports.layout.words import scientific

    console = wide_console()
    written = ", ".join(sorted(found.stacks))
    say(
        console, f"rollouts    {found.rollouts} of {inline(str(found.path))} ({written}), {found.tokens} sampled tokens"
    )
    say(
        console,
        f"model       {inline(model.name)} {model.sha256[:12]}, {_dtype(model)}, temperature {made.temperature:g}",
    )
    if found.undrawn:
        say(console, f"skipped     {len(found.undrawn)} without a drawn token, {found.undrawn[0]} first")
    table = Table("number", "value", "alarm")
    bounds = {bound.name: bound.words for bound in MISMATCH}
    for name, value in made.panel.items():
        table.add_row(name, scientific(value), bounds.get(name, ""))
    console.print(table, markup=False)
    for bound in made.alarms:
        say(console, f"alarm: {bound.name} is {scientific(made.panel[bound.name])}, {bound.words}: {bound.meaning}")
    if not made.alarms:
        say(console, "no alarm: the numbers keep within the bounds above")


def _dtype(model: LoadedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
