"""The A/A floor of engines: their first batches are asked twice more, once in another order.

    RUN/floor/again/UNIT.jsonl       the same requests in the same batches, by an engine that was restarted
    RUN/floor/shuffled/UNIT.jsonl    the same requests in another order, so in other batches

A compressed engine's answers can depend on the other requests in a batch. The floor counts the answers that change
between two runs of the same condition, or when only their order changes; an effect of compression must exceed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from kvaudit.audit.engines import Condition
from kvaudit.audit.runs.folder import make_folder
from kvaudit.audit.runs.progress import Part
from kvaudit.audit.runs.stages.base import RunContext, Stage, UnitWorker, is_sealed, unit_part
from kvaudit.audit.runs.units import Unit
from kvaudit.reports.records.load import FLOOR_FOLDER, SAME_ORDER, SHUFFLED


class FloorStage(Stage):
    """Asks the first items of each unit in ``units`` that an engine serves twice more: does it disagree with itself?"""

    def __init__(self, context: RunContext, worker: UnitWorker, units: Sequence[Unit]) -> None:
        super().__init__(context)
        is_asked = context.spec.evaluate.floor > 0
        self._worker = worker
        self._units = [unit for unit in units if is_asked and isinstance(unit.policy, Condition)]

    def parts(self) -> Iterator[Part]:
        for folder in self._folders:
            yield from self._folder_parts(folder)

    @property
    def is_done(self) -> bool:
        return not self.unsealed

    @property
    def unsealed(self) -> list[Unit]:
        """The unfinished units, once for each order (the same, shuffled) in which requests are still to be repeated."""
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
