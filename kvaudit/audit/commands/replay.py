"""Commands that serve recorded answers again: ``kvaudit replay verify`` and ``mismatch``, ``explain``, ``view``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import (
    Command,
    Plugins,
    Run,
    argument,
    check_dtype,
    option,
    print_line,
    print_table,
    set_data_folder,
    typed_command,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.provenance import INPUTS, PLUGINS, check_inputs
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.audit.replay.rollout_checks import RecordedRollouts
    from kvaudit.audit.rerun.measure import Measure, ServedBatch, Total, WorkUnit
    from kvaudit.audit.runs.folder import RunFolder
    from kvaudit.audit.sampling.model import DtypeName
    from kvaudit.core.spans import AnswerKey

DIFFERS = 3  # exit code if a measure finds a difference
_FORMS = "give CHECKPOINT [--rollouts COUNT], or --rollouts FILE --model MODEL"
ReplayDtype = Annotated[str, typer.Option(help="Number format of the sampling: float32, bfloat16 or auto.")]
Temperature = Annotated[float | None, option(min=0.0, help="Temperature of log-probs. Default: as recorded, or 1.")]


def verify(
    checkpoint: Annotated[Path | None, argument(help="The folder of a finished checkpoint.")] = None,
    *,
    rollouts: Annotated[
        str | None,
        option(help="How many of the checkpoint's rollouts to verify (default: all), or a file of rollouts."),
    ] = None,
    model: Annotated[str | None, option(help="For a file of rollouts: the model that sampled them.")] = None,
    dtype: ReplayDtype = "auto",
    tolerance: Annotated[float | None, option(min=0.0, help="Most nats at a token. Default: by dtype.")] = None,
    temperature: Temperature = None,
    plugin: Plugins = None,
) -> None:
    """Replay recorded rollouts: does their policy explain them?

    Exits with 3 if it does not explain their log-probs.
    """
    with user_errors():
        from kvaudit.audit.rerun.measure import run_measure
        from kvaudit.audit.rerun.verify import Verify
        from kvaudit.audit.sampling.checkpoints import load_model_or_adapter

        if tolerance is not None and not math.isfinite(tolerance):
            raise SpecError(f"--tolerance is {tolerance:g}, wanted a finite number of nats")
        dtype_name = _prepare_replay(dtype, temperature, plugin or ())
        sources, name = _find_rollouts(checkpoint, rollouts, model)
        loaded = load_model_or_adapter(name, dtype=dtype_name)
        measure = Verify(loaded, sources, tolerance=tolerance, temperature=temperature)
        raise typer.Exit(_print_measure(measure, run_measure(measure)))


def _find_rollouts(
    checkpoint: Path | None, rollouts: str | None, model: str | None
) -> tuple[list[RecordedRollouts], str]:
    """Return the recorded rollouts, one entry per file, and the name of the model that is said to have sampled them.

    ``rollouts`` says how many of the checkpoint's rollouts to take, or is the path of a file with rollouts.
    """
    from kvaudit.audit.replay.interchange import read_rollouts
    from kvaudit.audit.rerun.measure import checkpoint_rollouts

    is_file = rollouts is not None and not rollouts.isdecimal()
    if checkpoint is not None:
        if model is not None or is_file:
            raise SpecError(f"a checkpoint is verified with its own weights and rollouts; {_FORMS}")
        return _take_first(checkpoint_rollouts(checkpoint), rollouts), str(checkpoint)
    if model is None or not is_file:
        raise SpecError(f"there is nothing to verify; {_FORMS}")
    return [read_rollouts(Path(str(rollouts)))], model


def _take_first(sources: list[RecordedRollouts], count: str | None) -> list[RecordedRollouts]:
    """Return the recorded rollouts, cut to the first ``count`` over all files; all of them if it is None.

    Raises SpecError for a count out of range.
    """
    if count is None:
        return sources
    remaining, total = int(count), sum(len(recorded.rollouts) for recorded in sources)
    if not 1 <= remaining <= total:
        raise SpecError(f"--rollouts is {count}, but the checkpoint has {total}; give a number from 1 to {total}")
    first: list[RecordedRollouts] = []
    for recorded in sources:
        if remaining > 0:
            first.append(replace(recorded, rollouts=recorded.rollouts[:remaining]))
        remaining -= len(recorded.rollouts)
    return first


def mismatch(
    rollouts: Annotated[Path, argument(help="File with one rollout per line.")],
    *,
    model: Annotated[str, option(help="The learner: the weights that sampled the rollouts.")],
    dtype: ReplayDtype = "auto",
    temperature: Temperature = None,
    json_file: Annotated[Path | None, option("--json", help="Also write the numbers to this JSON file.")] = None,
    plugin: Plugins = None,
) -> None:
    """Compare samplers' log-probs with those of the learner.

    The learner's are those of one dense pass. Exits with 3 if an alarm is raised.
    """
    with user_errors():
        from kvaudit.audit.rerun.measure import run_measure
        from kvaudit.audit.rerun.mismatch import Mismatch, survey
        from kvaudit.audit.sampling.checkpoints import load_model_or_adapter

        dtype_name = _prepare_replay(dtype, temperature, plugin or ())
        overview = survey(rollouts)
        measure = Mismatch(load_model_or_adapter(model, dtype=dtype_name), overview, temperature=temperature)
        ((_, total),) = results = run_measure(measure)
        code = _print_measure(measure, results)
        if json_file is not None:
            write_output(json_file, measure.to_json(total))
        raise typer.Exit(code)


def explain(
    run: Run,
    item: Annotated[str, argument(help="Name of an item, as in records and `view`.")],
    *,
    policy: Annotated[
        list[str] | None,
        option(
            metavar="POLICY",
            help="Policy to serve the item under, of the run or any other. Default: none. May be repeated.",
        ),
    ] = None,
    arm: Annotated[str | None, option(help="Arm that answers. Default: the reference.")] = None,
    seed: Annotated[int | None, option(help="Training seed. Default: the arm's first.")] = None,
    length: Annotated[int | None, option(help="Prompt length in tokens, if the item was asked at several.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Which of several answers to one prompt.")] = 0,
    svg: Annotated[
        Path | None,
        option(help="Draw the prompt into this SVG file, every token shaded by how much of the cache still held it."),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Serve one answer of a run again and show what was kept.

    Shows by policy, role and layer what the cache still held of the item's prompt.
    """
    with user_errors():
        from kvaudit.audit.rerun.measure import run_measure
        from kvaudit.audit.rerun.shade import AnswerPlace, Explain, match_run_policies, shading_svg
        from kvaudit.core.spec_train import BASE_ARM

        folder = _open_run(run, plugin or ())
        arm_name = arm or folder.spec.gate.reference or BASE_ARM
        first_seed = next((number for name, number in folder.spec.arms if name == arm_name), 0)
        place = AnswerPlace(item, arm_name, first_seed if seed is None else seed, length, sample)
        measure = Explain(folder, place, match_run_policies(folder, policy or ["none"]))
        results = run_measure(measure)
        _print_measure(measure, results)
        if svg is not None:
            write_output(svg, shading_svg(measure.title, [answer for _, answer in results]))
            print_line(wide_console(), inline(f"picture: {svg}"))


def view(
    run: Run,
    *,
    out: Annotated[Path | None, option(help="Folder to write the pages to. Default: RUN/view.")] = None,
    shade: Annotated[
        int,
        typer.Option(
            min=0,
            help="Serve up to this many changed answers again, to shade their prompts by what the cache still held; "
            "0 loads no model.",
        ),
    ] = 1000,
    plugin: Plugins = None,
) -> None:
    """Write pages of the answers that a run lost or gained.

    Answers are side by side, each with what the cache still held of its prompt.
    """
    with user_errors(*typed_command()):
        from kvaudit.reports.page.view.folder import RunView
        from kvaudit.reports.records.load import load_run
        from kvaudit.reports.verdict.comparison import comparison_of

        data, folder, console = load_run(run), out or run / "view", wide_console()
        pages = RunView(data, comparison_of(data.spec, data.records, data.provenance))
        pages.write(folder)
        print_line(console, inline(f"view: {folder / 'index.html'}"))
        print_line(console, f"{len(pages.flips)} flips of {len({flip.item for flip in pages.flips})} items")
        if pages.is_servable and (unshaded := pages.missing_shades(shade)):
            try:
                _shade_answers(run, unshaded, plugin or ())
            finally:
                pages.write_shades(folder)  # after an interruption too, for the answers that were served
        shaded, compressed = pages.shaded_counts()
        hint = f"; shade the others with --shade {compressed}" if shaded < compressed else ""
        if compressed:
            print_line(console, f"{shaded} of the {compressed} flips whose caches lost something are shaded{hint}")


def _shade_answers(path: Path, unshaded: Mapping[str, set[AnswerKey]], plugins: Sequence[Path]) -> None:
    """Serve again the answers that differ from the reference's; store which prompt tokens the cache still held.

    ``unshaded`` has, by record file, the keys of the answers for which this is not stored yet.
    """
    from rich.console import Console

    from kvaudit.audit.rerun.measure import run_measure
    from kvaudit.audit.rerun.shade import Shade

    run_measure(Shade(_open_run(path, plugins), unshaded), Console(stderr=True))


def _open_run(path: Path, plugins: Sequence[Path]) -> RunFolder:
    """Open a run and set its data folder and number of threads, as when it was started.

    Raises DataError and RunError if the plug-ins differ from those with which it was started.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from kvaudit.audit.runs.folder import existing_run
    from kvaudit.audit.runs.launchers.local import idle_cores
    from kvaudit.audit.runs.names import load_plugins

    files = load_plugins(plugins)
    run = existing_run(path)
    if run.spec.probe is not None:
        raise SpecError(f"{str(path)!r} is a probe, and an endpoint returns no distributions; give the folder of a run")
    set_data_folder(run.spec)
    provenance = run.provenance()
    if isinstance(inputs := provenance.get(INPUTS), dict):  # runs of an earlier version have none
        check_inputs(PLUGINS, inputs.get(PLUGINS, {}), files)
    threads = provenance.get("threads")  # kept because rounding can depend on it
    if isinstance(threads, int) and threads > 0:
        torch.set_num_threads(min(threads, os.cpu_count() or 1))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(idle_cores())
    disable_progress_bar()
    return run


def _prepare_replay(dtype: str, temperature: float | None, plugins: Sequence[Path]) -> DtypeName:
    """Check the options of a replay and load its plug-ins; return the dtype."""
    from transformers.utils.logging import set_verbosity_error

    from kvaudit.audit.runs.names import load_plugins
    from kvaudit.core.spec_parts import TEMPERATURES, is_temperature

    dtype_name = check_dtype(dtype)
    if temperature is not None and not is_temperature(temperature):
        raise SpecError(f"--temperature is {temperature:g}, wanted {TEMPERATURES}")
    load_plugins(plugins)
    set_verbosity_error()  # loading warns on several lines; kvaudit's own errors have one
    return dtype_name


def _print_measure(measure: Measure[WorkUnit, ServedBatch, Total], results: Sequence[tuple[WorkUnit, Total]]) -> int:
    """Print the results of serving records again.

    Returns exit code 3 if the ``measure`` is a pass-or-fail check that found a difference, else 0.
    """
    console = wide_console()
    for line in measure.lines(results):
        if isinstance(line, str):
            print_line(console, line)
        else:
            print_table(console, line)
    return DIFFERS if measure.decides and any(measure.differs(total) for _, total in results) else 0


REPLAY = Command(
    "replay", group="Stored answers", order=1, help="Serve recorded answers again, and measure what changed."
)
VERIFY = Command("verify", group="replay", order=1, call=verify, former_names={"verify": "replay verify"})
MISMATCH = Command("mismatch", group="replay", order=2, call=mismatch, former_names={"mismatch": "replay mismatch"})
VIEW = Command("view", group="Look", order=1, call=view)
EXPLAIN = Command("explain", group="Look", order=2, call=explain)
