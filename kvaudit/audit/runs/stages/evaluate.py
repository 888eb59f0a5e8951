"""The evaluation stage: ask every unit (a checkpoint, policy, suite and length), at once or in rounds.

Engines are then asked their first requests twice more, which measures their own noise (the A/A floor).

    RUN/floor/again/UNIT.jsonl       the same requests in the same batches, by an engine that was restarted
    RUN/floor/shuffled/UNIT.jsonl    the same requests in another order, so in other batches

A compressed engine's answers can depend on the other requests in a batch. The floor counts the answers that change when
the same engine setting is asked again, or when only the order changes; the report shows it beside every effect.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from kvaudit.audit.engines import Condition
from kvaudit.audit.runs.claims import Claims
from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.folder import SPEC, make_folder, utc_now
from kvaudit.audit.runs.pilot import pilot_units, with_kept_gate
from kvaudit.audit.runs.progress import Part
from kvaudit.audit.runs.stages.base import RunContext, Stage, UnitWorker, is_sealed, unit_part
from kvaudit.audit.runs.stages.rounds import RoundsStage
from kvaudit.audit.runs.units import REFUSED, Unit, UnitFiles, reopen_refused
from kvaudit.core.errors import RunError
from kvaudit.core.files import read_json
from kvaudit.core.provenance import NOISE
from kvaudit.reports.records.load import FLOOR_FOLDER, SAME_ORDER, SHUFFLED, load_run
from kvaudit.reports.verdict.drift import hidden_by_noise
from kvaudit.reports.verdict.rules import GateOverrides, declared_rules


class EvaluateStage(Stage):
    """Answers every unit of the grid, then asks engines some items twice more, to measure their noise."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._worker, rounds = UnitWorker(context), context.spec.evaluate.rounds
        self._rounds = None if rounds is None else RoundsStage(context, self._worker, rounds)
        self._grid: GridStage | RoundsStage = self._rounds or GridStage(context, self._worker)

    def parts(self) -> Iterator[Part]:
        if self._rounds is None:  # the number of rounds is not known
            yield from self._grid.parts()
            yield from self._floor.parts()

    @property
    def is_done(self) -> bool:
        return self._grid.is_done if self._rounds is not None else not self.unsealed

    @property
    def unsealed(self) -> list[Unit]:
        """The unfinished units of the grid, and those of the floor, which count once for each of its two orders."""
        spec, records = self.context.spec, self.context.run.records
        return [unit for unit in grid(spec) if not is_sealed(records, unit)] + self._floor.unsealed

    def work(self) -> RunContext:
        """Answer the unfinished units, then store when the run ended; raise RunError if the pilot is still due."""
        context, run, spec = self.context, self.context.run, self.context.spec
        if context.open_suites:
            names = ", ".join(context.open_suites)
            raise RunError(f"the number of items of {names} follows from the pilot, which has not been run")
        self._grid.work()
        self._print_refusals()
        self._floor.work()
        self._note_noise()
        if self._rounds is not None:
            self._rounds.note_end()
        declared = {arm: checkpoints.recipe.model_dump() for arm, checkpoints in spec.checkpoints.items()}
        if declared:
            run.note(declared=declared)
        reference = {
            str(seed): context.models.sha256_of((arm, seed)) for arm, seed in spec.arms if arm == spec.gate.reference
        }
        # keep the old finish time if nothing was asked now, so that an existing card still matches
        finished = None if self._grid.has_asked else run.provenance().get("finished")
        run.note(reference_sha256=reference, finished=finished or utc_now())
        return context

    @property
    def _floor(self) -> FloorStage:
        return FloorStage(self.context, self._worker, self._grid.units)

    def _note_noise(self) -> None:
        """Store which engine settings have effects that the engine's own noise hides.

        Reports read this where the repeated answers are missing.
        """
        run = self.context.run
        if self._floor.is_due and NOISE not in run.provenance():  # it follows from the repeated rows, which stay
            data = load_run(run.path)
            run.note(**{NOISE: hidden_by_noise(data, declared_rules(data, GateOverrides())[0])})

    def _print_refusals(self) -> None:
        """Print how many requests a server refused and, except in rounds, the command that sends them again."""
        run = self.context.run
        units = [unit for unit in self._grid.units if isinstance(unit.policy, Condition)]
        seals = [UnitFiles.of(run.records, unit).seal for unit in units]
        refused = sum(int(read_json(seal).get(REFUSED, 0)) for seal in seals if seal.exists())
        if refused:
            command = ["kvaudit", "run", str(run.path / SPEC), "--out", str(run.path), "--resume", "--ask-refused"]
            advice = "" if self._rounds is not None else f"; ask them again: {shlex.join(command)}"
            self.context.print_line(f"{refused} answers were refused by a server and are unscored{advice}")


class GridStage(Stage):
    """Answers every unit of the run; ``has_asked`` is True if this process has asked any request."""

    def __init__(self, context: RunContext, worker: UnitWorker) -> None:
        super().__init__(context)
        self._worker, self.units = worker, grid(context.spec)
        self.has_asked = False

    def parts(self) -> Iterator[Part]:
        context, evaluate = self.context, self.context.spec.evaluate
        piloted = set(pilot_units(with_kept_gate(context.spec, context.run.provenance()), self.units))
        for unit in self.units:
            rows = context.rows_of(unit)
            size = max(1, rows - context.rows_of(unit, evaluate.pilot_size)) if unit in piloted else rows
            yield unit_part(context.run.records, unit, size, rows)

    @property
    def is_done(self) -> bool:
        return all(is_sealed(self.context.run.records, unit) for unit in self.units)

    def work(self) -> RunContext:
        if self.context.asks_refused:
            self._open_refused()
        self.has_asked = self._worker.work("asking", self.context.run.records, self.units, self.parts)
        return self.context

    def _open_refused(self) -> None:
        """Reopen finished units in which the server refused requests, except units that another process has claimed."""
        context = self.context
        for unit in self.units:
            files = UnitFiles.of(context.run.records, unit)
            with Claims(takeover=context.takeover).claim(files.lock) as claim:
                if claim is not None and files.seal.exists():
                    reopen_refused(files, unit.identity(context.models.sha256_of((unit.arm, unit.seed))))


class FloorStage(Stage):
    """Asks engines the first items of each of their units twice more, to measure the engines' own noise."""

    def __init__(self, context: RunContext, worker: UnitWorker, units: Sequence[Unit]) -> None:
        super().__init__(context)
        is_asked = context.spec.evaluate.floor > 0
        self._worker = worker
        self._units = [unit for unit in units if is_asked and isinstance(unit.policy, Condition)]

    @property
    def is_due(self) -> bool:
        """Whether there is anything to ask again: the spec wants it, and an engine answers."""
        return bool(self._units)

    def parts(self) -> Iterator[Part]:
        for folder in self._folders:
            yield from self._folder_parts(folder)

    @property
    def is_done(self) -> bool:
        return not self.unsealed

    @property
    def unsealed(self) -> list[Unit]:
        """The unfinished units, each listed once for every order in which it is not finished."""
        return [unit for folder in self._folders for unit in self._units if not is_sealed(folder, unit)]

    def work(self) -> RunContext:
        for folder in self._folders:
            make_folder(folder)
            self._worker.work("asking again", folder, self._units, partial(self._folder_parts, folder))
        return self.context

    @property
    def _folders(self) -> list[Path]:
        floor = self.context.run.path / FLOOR_FOLDER
        return [floor / SAME_ORDER, floor / SHUFFLED] if self._units else []

    def _folder_parts(self, folder: Path) -> Iterator[Part]:
        for unit in self._units:
            rows = self.context.rows_of(unit, self.context.spec.evaluate.floor)
            yield unit_part(folder, unit, rows, rows)
