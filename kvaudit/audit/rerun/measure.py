"""The contract of a measure, and the one loop that serves recorded items again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from io import StringIO
from typing import Any, ClassVar, Generic, Self, TypeVar

from rich.console import Console

from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.progress import Meter
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.plugins import Registry
from kvaudit.reports.sections.shared.tables import Table

WorkUnit = TypeVar("WorkUnit")
ServedBatch = TypeVar("ServedBatch", bound=Sized)
Total = TypeVar("Total")


class Measure(ABC, Generic[WorkUnit, ServedBatch, Total]):
    """Measures recorded items that are served again. Subclass in a separate file, with a ``name``.

    A work unit is served and reduced on its own: a file of rollouts, a unit of a run, an answer under a policy. It is
    served in batches; the length of a batch is its number of recorded items.
    """

    name: ClassVar[str] = ""
    decides: ClassVar[bool] = False  # whether its command exits with code 3 if something ``differs``
    by_item: ClassVar[bool] = False  # whether progress counts items instead of work units

    @classmethod
    @abstractmethod
    def trial(cls, run: RunFolder) -> Self:
        """Return the measure of a finished run whose first arm trained on dense rollouts and kept its last ones."""

    @abstractmethod
    def units(self) -> Sequence[WorkUnit]:
        """Return all work units; those of one checkpoint are adjacent."""

    @abstractmethod
    def size(self, unit: WorkUnit) -> int:
        """Return the number of recorded items in a unit."""

    @abstractmethod
    def model(self, unit: WorkUnit) -> LoadedModel:
        """Return the model that serves a unit; adjacent units of one checkpoint share it."""

    @abstractmethod
    def serve(self, unit: WorkUnit, model: LoadedModel) -> Iterator[ServedBatch]:
        """Serve a unit again; raises DataError if anything that its items depend on has changed."""

    @abstractmethod
    def reduce(self, unit: WorkUnit, model: LoadedModel, batches: Iterator[ServedBatch]) -> Total:
        """Return the result of a unit; iterating over the batches serves them."""

    @abstractmethod
    def differs(self, total: Total) -> bool:
        """Return whether a result differs from the record beyond rounding; False if that cannot be told."""

    @abstractmethod
    def lines(self, results: Sequence[tuple[WorkUnit, Total]]) -> Iterator[str | Table]:
        """Yield what is printed of all units; text from a run or a file must be escaped onto one line."""

    def label(self, unit: WorkUnit) -> str:  # noqa: ARG002
        """Return a short label of the unit for the progress display."""
        return self.name


MEASURES: Registry[Measure[Any, Any, Any]] = Registry(
    "measure",
    "kvaudit.audit.rerun",
    Measure,  # type: ignore[type-abstract]  # registered subclasses are concrete
)


def run_measure(
    measure: Measure[WorkUnit, ServedBatch, Total], console: Console | None = None
) -> list[tuple[WorkUnit, Total]]:
    """Serve every unit and return all units with their results; ``console`` shows the progress."""
    console = console or Console(file=StringIO())
    units, results, items = measure.units(), list[tuple[WorkUnit, Total]](), 0

    def show_progress(unit: WorkUnit) -> None:
        meter.at(items if measure.by_item else len(results), measure.label(unit))

    def serve(unit: WorkUnit, model: LoadedModel) -> Iterator[ServedBatch]:
        nonlocal items
        for batch in measure.serve(unit, model):
            yield batch
            items += len(batch)  # after the yield: the batch has been reduced
            show_progress(unit)

    total = sum(map(measure.size, units)) if measure.by_item else len(units)
    with Meter(console, measure.name, total) as meter:
        for unit in units:
            show_progress(unit)
            model = measure.model(unit)
            results.append((unit, measure.reduce(unit, model, serve(unit, model))))
        meter.at(total, "all of it")
    return results
