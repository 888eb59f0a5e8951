"""The stages of a run in their order, as one process works through them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from kvaudit.audit.engines import Condition
from kvaudit.audit.policies import POLICIES
from kvaudit.audit.runs.engine_slot import EngineSlot
from kvaudit.audit.runs.evaluate import selecting_policies, served_policies
from kvaudit.audit.runs.folder import RunFolder, check_inputs_unchanged
from kvaudit.audit.runs.launchers.local import idle_cores
from kvaudit.audit.runs.models import Models, trained_pairs
from kvaudit.audit.runs.prepare import Prepared
from kvaudit.audit.runs.progress import FoundSoFar, RunBar, print_line
from kvaudit.audit.runs.stages.base import RunContext, Stage
from kvaudit.audit.runs.stages.evaluate import EvaluateStage
from kvaudit.audit.runs.stages.pilot import PilotStage
from kvaudit.audit.runs.stages.train import TrainStage
from kvaudit.core.errors import RunError
from kvaudit.core.provenance import INPUTS, JUDGED, PLUGINS, SPEC, Digests, check_checkpoints, pilot_items
from kvaudit.core.spec import RunSpec
from kvaudit.suites.base import SUITES

STAGES: dict[str, type[Stage]] = {"train": TrainStage, "pilot": PilotStage, "evaluate": EvaluateStage}  # in this order


class Pipeline:
    """One process's work on a run folder; several processes may work on the same folder.

    Without ``prepared`` (the loaded model and items) the model is loaded when it is first needed. ``plugins`` maps file
    names to their sha256. ``takeover`` says that processes on other machines are gone, so that their units are free.
    ``processes`` is the number of processes that work on the run on this machine. With ``asks_refused``, requests that
    a server refused are sent again. Raises DataError if a finished checkpoint has changed, RunError if the run began
    with other plug-ins.
    """

    def __init__(
        self,
        run: RunFolder,
        console: Console,
        threads: int | None = None,
        prepared: Prepared | None = None,
        plugins: Digests | None = None,
        *,
        takeover: bool = False,
        processes: int = 1,
        asks_refused: bool = False,
    ) -> None:
        if JUDGED in run.provenance():
            raise RunError(
                f"{str(run.path)!r} holds the answers of another run with new grades; resume that run, then judge it "
                "again"
            )
        check_checkpoints(run.path)
        spec = run.spec.sized(pilot_items(run.provenance()))
        _check_versions(run, spec)
        check_inputs_unchanged(run, PLUGINS, plugins or {})
        if SPEC in run.provenance()[INPUTS] or not any(run.records.glob("*.done.json")):
            # every seal hashes it too, so that records of a run with other decoding are not accepted here
            check_inputs_unchanged(run, SPEC, {"spec.yaml": run.spec.sha256})
        _set_threads(run, threads)
        disable_progress_bar()  # transformers' own bars of loading and saving
        _note_names(run, spec)
        print_text, bar = partial(print_line, console), RunBar(console, FoundSoFar(spec, run.path).lines)
        self._context = RunContext(
            run=run,
            spec=spec,
            models=Models(run, spec, print_text, prepared, processes),
            engines=EngineSlot(run, spec, print_text, partial(_show_start, bar)),
            bar=bar,
            print_line=print_text,
            takeover=takeover,
            asks_refused=asks_refused,
        )

    def work_on(self, *names: str) -> None:
        """Work through the named stages under one progress bar, by default through all of them."""
        names = names or tuple(STAGES)
        with self._context.bar as bar:
            for name in names:
                bar.expect(STAGES[name](self._context).parts())
            for name in names:
                self._context = STAGES[name](self._context).work()

    @property
    def is_done(self) -> bool:
        """Whether all stages are done, by this process or others."""
        return all(stage(self._context).is_done for stage in STAGES.values())

    def check_pilot(self) -> None:
        """Raise NotMeasurable if the pilot is done and found a suite in which the reference has nothing to lose."""
        PilotStage(self._context).check()

    def check_done(self) -> None:
        """Raise RunError if the run is not done."""
        if not self.is_done:
            context = self._context
            pairs = [pair for pair in trained_pairs(context.spec) if not context.models.is_trained(pair)]
            raise RunError(
                f"all workers have stopped with {len(pairs)} checkpoints and {len(EvaluateStage(context).unsealed)} "
                f"units unfinished; finished work is kept: see {context.run.path / 'logs'} for the cause, then go on "
                "with --resume"
            )


def _check_versions(run: RunFolder, spec: RunSpec) -> None:
    """Raise RunError if a suite has another version than when the run began, since it may ask other questions."""
    versions = run.provenance().get("suite_versions", {})
    for name in spec.evaluate.suites:
        current = SUITES.get(name).version
        if versions.get(name, current) != current:
            raise RunError(
                f"{str(run.path)!r} was begun with version {versions[name]} of suite {name}, which is version "
                f"{current} here; gate and report can still read it; to ask more, give another --out"
            )


def _set_threads(run: RunFolder, threads: int | None) -> None:
    """Set torch's threads, by default to the number that the run began with, since rounding can depend on it."""
    threads = threads or run.provenance().get("threads")
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = idle_cores()  # two threads on a busy core are several times slower than one
    torch.set_num_threads(threads or torch.get_num_threads())


def _note_names(run: RunFolder, spec: RunSpec) -> None:
    """Store in provenance.json the number of threads, each policy's hash, and each suite's kind and version."""
    run.note(
        threads=run.provenance().get("threads", torch.get_num_threads()),
        policies={policy.canonical: policy.hash for policy in served_policies(spec)},
        known_policies=sorted(POLICIES.all()),
        selecting_policies=selecting_policies(spec),
        suite_kinds={name: SUITES.get(name).kind for name in spec.evaluate.suites},
        suite_versions={name: SUITES.get(name).version for name in spec.evaluate.suites},
    )


@contextmanager
def _show_start(bar: RunBar, condition: Condition) -> Iterator[None]:
    """Show on the bar that an engine is starting."""
    bar.show(f"starting {condition.engine}")
    yield
