"""How much CPU time does bookkeeping take per unit of a run, and does it grow with the number of units?

    python -m bench.bookkeeping [UNITS ...]

Takes 1 to 2 minutes; results: docs/results/bench.md. Units are claimed, sealed and counted as in a run, but by an
evaluator that asks nothing. The grid is that of examples/quickstart.yaml, with more budgets for more units.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from rich.console import Console

from kvaudit.audit.runs import models
from kvaudit.audit.runs.evaluate import RowsDone, grid
from kvaudit.audit.runs.folder import RunFolder, open_run
from kvaudit.audit.runs.models import Models
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.stages import base as stages
from kvaudit.audit.runs.units import Unit, UnitFiles
from kvaudit.core.files import write_json
from kvaudit.core.provenance import PROVENANCE
from kvaudit.core.spec import RunSpec, load_spec
from kvaudit.core.spec_train import BASE_ARM

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
MODEL = SimpleNamespace(sha256="0" * 64)


class FakeEvaluator:
    """An evaluator that writes an empty record file and its seal for each unit."""

    def __init__(self, *_: object) -> None:
        pass

    def answer_units(self, units: Sequence[Unit], run: RunFolder, progress: RowsDone, *_: object, **__: object) -> None:
        for unit in units:
            files = UnitFiles.of(run.records, unit)
            progress(unit, 0, 1)
            files.records.touch()
            write_json(files.seal, {"records": 0, "sha256": "", "checkpoint": MODEL.sha256})
            progress(unit, 1, 1)


def spec_of(units: int | None = None) -> RunSpec:
    """Return the quickstart's spec, or one with so many policies that its grid has about ``units`` units."""
    spec = load_spec(QUICKSTART, NAMES)
    if units is None:
        return spec
    policies = max(2, round(units * len(spec.evaluate.policies) / len(grid(spec))))
    fields = spec.written()
    fields["evaluate"]["policies"] = ["none", *(f"streaming:budget={64 + n},sink=40" for n in range(policies - 1))]
    fields["gate"] = {"margins": {}, "reference": "dense"}
    return RunSpec.model_validate(fields, context=NAMES)


def run_evaluation(folder: Path, spec: RunSpec) -> None:
    """Run the evaluation phase in a folder whose checkpoints have no weights."""
    run = open_run(folder, spec, resume=True)
    for arm, seed in spec.arms:
        if arm != BASE_ARM:
            run.checkpoint(arm, seed).mkdir(parents=True)
            finished = {"arm": arm, "seed": seed, "sha256": MODEL.sha256, "files": {}, "ledgers": {}}
            write_json(run.checkpoint(arm, seed) / PROVENANCE, finished)
    with (
        mock.patch.object(stages, "Evaluator", FakeEvaluator),
        mock.patch.object(models, "load_comparable", return_value=MODEL),
        mock.patch.object(Models, "base", return_value=MODEL),
    ):
        Pipeline(run, Console(quiet=True), 1).work_on("evaluate")


def main() -> None:
    for units in (None, *map(int, sys.argv[1:] or (2_500, 5_000, 10_000))):
        spec = spec_of(units)
        with tempfile.TemporaryDirectory() as folder:
            started, cpu = time.perf_counter(), time.process_time()
            run_evaluation(Path(folder) / "run", spec)
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        count = len(grid(spec))
        print(
            f"{count:6} units: {cpu:6.2f} s of CPU, {1000 * cpu / count:.2f} ms a unit; {seconds:.1f} s of wall time",
            flush=True,
        )


if __name__ == "__main__":
    main()
