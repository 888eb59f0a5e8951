"""The contract of a stage, and the context that all stages of a process are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kvaudit.audit.runs.engine_slot import EngineSlot
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.models import Models
from kvaudit.audit.runs.progress import Part, RunBar
from kvaudit.audit.runs.units import Unit
from kvaudit.core.errors import RunError
from kvaudit.core.spec import RunSpec
from kvaudit.core.text import inline


@dataclass(frozen=True)
class RunContext:
    """What a stage needs of the process that it works in.

    ``spec`` has the numbers of items that the pilot has fixed by now. ``takeover``: see ``Claims``. ``rank_command`` is
    the command, without its threads, that starts another rank of a training unit. ``asks_refused`` asks again what a
    server has refused.
    """

    run: RunFolder
    spec: RunSpec
    models: Models
    engines: EngineSlot
    bar: RunBar
    print_line: Callable[[str], None]
    takeover: bool = False
    rank_command: Sequence[str] = ()
    asks_refused: bool = False

    def sized(self, items: Mapping[str, int]) -> RunContext:
        """Return the context of a run that asks these numbers of items, by suite."""
        spec = self.spec.sized(items)
        return replace(self, spec=spec, models=self.models.resized(spec, items.keys()))

    def rows_of(self, unit: Unit, most_items: int | None = None) -> int:
        """Return the number of rows of a unit, of at most ``most_items`` items; estimated until the items are made."""
        evaluate, batches = self.spec.evaluate, self.models.batches.get((unit.suite, unit.context_tokens))
        items = evaluate.suites[unit.suite].items
        if not isinstance(items, int):
            items = evaluate.pilot_size if batches is None else sum(map(len, batches))
        items = items if most_items is None else min(items, most_items)
        return items * evaluate.samples_of(unit.suite)

    @property
    def open_suites(self) -> list[str]:
        """The suites whose number of items follows from the pilot, which has not been run yet."""
        return [name for name, suite in self.spec.evaluate.suites.items() if not isinstance(suite.items, int)]


class Stage(ABC):
    """One stage of a run. It resumes where it stopped, and other processes may work on it at the same time.

    Once it is done, its work writes nothing more, and no stage changes what an earlier one wrote. A stage keeps what it
    learns to itself or on disk; what later stages need is in the context that its work returns.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def parts(self) -> Iterable[Part]:
        """The units of work for the progress bar, as far as they are known."""
        return ()

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether all of its work is done, by any process."""

    @abstractmethod
    def work(self) -> RunContext:
        """Do or resume the work, and return the context of the stages that follow."""


@contextmanager
def explain_full_memory(work: str, settings: str) -> Iterator[None]:
    """Turn an out-of-memory error of a GPU into a RunError that names the work, and the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = inline(str(error).partition(". ")[0])
        raise RunError(
            f"the GPU's memory is too small for {work} ({reason}); finished work is kept: resume it on a larger GPU, "
            f"or begin another run with lower values of {settings}"
        ) from None
