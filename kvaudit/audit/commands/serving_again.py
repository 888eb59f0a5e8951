"""What the commands share that serve recorded items again: how a run is opened, and how what was found is shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from kvaudit.audit.commands.base import print_table, print_line, set_data_folder, wide_console
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.provenance import INPUTS, PLUGINS, check_inputs

if TYPE_CHECKING:
    from kvaudit.audit.rerun.measure import Measure, ServedBatch, Total, WorkUnit
    from kvaudit.audit.runs.folder import RunFolder

DIFFERS = 3  # exit code of a measure that decides


def opened(path: Path, plugins: Sequence[Path], threads: int | None = None) -> RunFolder:
    """The run, by the spec, the plug-ins and the threads that it began with, unless more or fewer are asked for.

    Raises DataError and RunError where these are others.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from kvaudit.audit.runs.folder import existing_run
    from kvaudit.audit.runs.launchers.local import idle_cores
    from kvaudit.audit.runs.names import load_plugins

    files = load_plugins(plugins)
    run = existing_run(path)
    if run.spec.probe is not None:
        raise SpecError(f"{str(path)!r} is a probe, and an endpoint shows no distributions; give the folder of a run")
    set_data_folder(run.spec)
    if isinstance(noted := run.provenance().get(INPUTS), dict):  # a run of an earlier version noted none
        check_inputs(PLUGINS, noted.get(PLUGINS, {}), files)
    known = run.provenance().get("threads")  # as it was begun: rounding can depend on their number
    if threads is None and isinstance(known, int) and known > 0:
        threads = min(known, os.cpu_count() or 1)
    elif threads is None:
        threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else idle_cores()
    torch.set_num_threads(threads)
    disable_progress_bar()
    return run


def ready_to_read(dtype: str, temperature: float | None, plugins: Sequence[Path]) -> None:
    """Load plug-ins before rollouts are read; raises SpecError for a dtype or a temperature of no rollout."""
    from transformers.utils.logging import set_verbosity_error

    from kvaudit.audit.runs.names import load_plugins
    from kvaudit.audit.sampling.model import DtypeName
    from kvaudit.core.spec_parts import TEMPERATURES, is_temperature

    if dtype not in get_args(DtypeName):
        raise UnknownName("dtype", dtype, get_args(DtypeName))
    if temperature is not None and not is_temperature(temperature):
        raise SpecError(f"--temperature is {temperature:g}, wanted {TEMPERATURES}")
    load_plugins(plugins)
    set_verbosity_error()  # of loading; what is wrong with a model is said in one line


def show_found(measure: Measure[WorkUnit, ServedBatch, Total], found: Sequence[tuple[WorkUnit, Total]]) -> int:
    """Print what a measure found; returns 3 where it decides and something differs, else 0."""
    console = wide_console()
    for line in measure.lines(found):
        if isinstance(line, str):
            print_line(console, line)
        else:
            print_table(console, line)
    differs = any(measure.differs(total) for _, total in found)
    return DIFFERS if measure.decides and differs else 0
