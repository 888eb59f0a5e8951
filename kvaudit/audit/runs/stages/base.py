"""The base class of a run's stages, the context of a process for all its stages, and the worker that answers units."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch

from kvaudit.audit.runs.claims import ClaimedUnits, work_on_groups
from kvaudit.audit.runs.engine_slot import EngineSlot
from kvaudit.audit.runs.evaluate import Evaluator
from kvaudit.audit.runs.folder import RunFolder, noted_value
from kvaudit.audit.runs.models import Models, Pair
from kvaudit.audit.runs.progress import Part, RunBar, policy_labels
from kvaudit.audit.runs.units import Unit, UnitFiles
from kvaudit.core.errors import RunError
from kvaudit.core.provenance import INPUTS, inputs_sha256
from kvaudit.core.spec import RunSpec
from kvaudit.core.text import inline, length_label


@dataclass(frozen=True)
class RunContext:
    """What a stage needs from its process.

    ``spec`` has the numbers of items that the pilot has fixed so far. ``takeover`` says that processes on other
    machines are gone, so that their units are free. With ``asks_refused``, requests that a server refused are sent
    again.
    """

    run: RunFolder
    spec: RunSpec
    models: Models
    engines: EngineSlot
    bar: RunBar
    print_line: Callable[[str], None]
    takeover: bool = False
    asks_refused: bool = False

    def sized(self, items: Mapping[str, int]) -> RunContext:
        """Return this context with these numbers of items to ask, by suite; their items are made anew."""
        spec = self.spec.sized(items)
        return replace(self, spec=spec, models=self.models.resized(spec, items.keys()))

    def rows_of(self, unit: Unit, most_items: int | None = None) -> int:
        """Return how many answers a unit has; with ``most_items``, how many it has to at most that many items.

        Before the items are made, the number can be an estimate.
        """
        evaluate, batches = self.spec.evaluate, self.models.batches.get((unit.suite, unit.context_tokens))
        items = evaluate.suites[unit.suite].items
        if not isinstance(items, int):
            items = evaluate.pilot_size if batches is None else sum(map(len, batches))
        items = items if most_items is None else min(items, most_items)
        return items * evaluate.samples_of(unit.suite)

    @property
    def open_suites(self) -> list[str]:
        """The suites whose number of items is ``auto`` or ``all`` until the pilot fixes it."""
        return [name for name, suite in self.spec.evaluate.suites.items() if not isinstance(suite.items, int)]


class Stage(ABC):
    """One stage of a run, such as training; it resumes where it stopped, and processes may share its work.

    Once a stage is done, its work writes nothing more, and no stage changes what an earlier one wrote. A stage keeps
    its results to itself or on disk; what later stages need is in the context that its work returns.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def parts(self) -> Iterable[Part]:
        """Return the units of work for the progress bar, as far as they are known."""
        return ()

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether all work of the stage is done, by this process or others."""

    @abstractmethod
    def work(self) -> RunContext:
        """Start or resume the work; return the context for the stages that follow."""


@contextmanager
def explain_full_memory(work: str, settings: str) -> Iterator[None]:
    """Turn a GPU's out-of-memory error in the body into a RunError that names the work and the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = inline(str(error).partition(". ")[0])
        raise RunError(
            f"the GPU's memory is too small for {work} ({reason}); finished work is kept: resume it on a larger GPU, "
            f"or begin another run with lower values of {settings}"
        ) from None


def is_sealed(folder: Path, unit: Unit) -> bool:
    """Return whether a unit's record file in this folder is finished."""
    return UnitFiles.of(folder, unit).seal.exists()


def unit_part(folder: Path, unit: Unit, size: float, rows: int) -> Part:
    """Return a unit as a part of the progress bar, where it counts as ``size`` answers.

    It is done when its file is sealed or has ``rows`` records.
    """
    files = UnitFiles.of(folder, unit)

    def done() -> float:
        share = 1.0 if files.seal.exists() else _count_lines(files.records) / max(1, rows)
        return size * min(1.0, share)

    return Part((folder, unit), size, done)


def _count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


class UnitWorker:
    """Answers units in this process, one checkpoint at a time, and counts their answers on the run's progress bar."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._evaluator: tuple[Pair, Evaluator] | None = None

    def work(
        self,
        phase: str,
        folder: Path,
        units: Sequence[Unit],
        parts: Callable[[], Iterable[Part]],
        rows: Mapping[str, range] | None = None,
    ) -> bool:
        """Answer the units that have no seal in ``folder`` yet; return whether there were any.

        ``phase`` names the work on the progress bar, and ``parts`` returns the units as parts of the bar. In a run in
        rounds, ``rows`` are the rows to ask, by suite.
        """
        context, bar = self._context, self._context.bar
        files = {unit: UnitFiles.of(folder, unit) for unit in units}

        def is_done(unit: Unit) -> bool:
            return files[unit].seal.exists()

        def finish(unit: Unit) -> None:
            bar.count((folder, unit), bar.size((folder, unit)))

        def answer(claimed: ClaimedUnits[Unit]) -> None:
            first, resumed = claimed.units[0], set[Unit]()
            bar.claim([(folder, unit) for unit in claimed.units])

            def report(unit: Unit, done: int, of: int) -> None:
                claimed.claim(unit).check()
                name, answers = (folder, unit), bar.size((folder, unit)) * done / max(1, of)
                if unit in resumed:
                    bar.count(name, answers)
                    bar.show(self._unit_text(phase, unit))
                else:  # the first report counts what an earlier run has answered
                    resumed.add(unit)
                    bar.resume(name, answers)

            with explain_full_memory(self._unit_text(phase, first), "evaluate.batch_tokens"):
                evaluator = self._evaluator_of((first.arm, first.seed))
                evaluator.answer_units(claimed.units, context.run, report, claimed.keep, folder=folder, rows=rows)

        is_work_left = not all(map(is_done, units))
        if is_work_left:
            context.models.base()  # makes the items, from which the parts get their sizes
        bar.expect(parts())
        with context.engines:  # an engine ends with the stage it answers in
            work_on_groups(
                # the units of a group are adjacent in the grid, as groupby requires
                [list(group) for _, group in groupby(units, lambda unit: unit.group_key)],
                is_done=is_done,
                lock=lambda unit: files[unit].lock,
                work=answer,
                on_done=finish,
                on_wait=context.print_line,
                takeover=context.takeover,
            )
        bar.claim(())
        return is_work_left

    def _evaluator_of(self, pair: Pair) -> Evaluator:
        """Return the evaluator of a checkpoint, after freeing the weights of the previous one."""
        if self._evaluator is None or self._evaluator[0] != pair:
            self._evaluator = None
            gc.collect()  # hooks and bound methods of some models keep their weights in a cycle
            context = self._context
            model = context.models.checkpoint(pair)
            inputs = inputs_sha256(noted_value(context.run, INPUTS))
            self._evaluator = (pair, Evaluator(model, context.spec, context.models.batches, inputs, context.engines))
        return self._evaluator[1]

    @cached_property
    def _labels(self) -> dict[str, str]:
        return policy_labels(self._context.spec)

    def _unit_text(self, phase: str, unit: Unit) -> str:
        """Return a unit's text on the bar, such as ``asking: agent under snapkv 96``.

        The context length is added if the suite is asked at several, arm and seed if the run has several checkpoints.
        """
        spec = self._context.spec
        text = f"{phase}: {unit.suite} under {self._labels.get(unit.policy.canonical, unit.policy.canonical)}"
        text += f", {length_label(unit.context_tokens)}" if len(spec.evaluate.contexts_of(unit.suite)) > 1 else ""
        return text + (f", {unit.arm} seed {unit.seed}" if len(spec.arms) > 1 else "")
