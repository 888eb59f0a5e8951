"""The loop that grades a run's stored answers again: nothing is sampled, and no grader is asked twice.

Units are claimed, so that several processes may share the work. What a grader sees of a unit it is asked in bulk,
before anything of the unit is written, and what it said is remembered by the hash of the question, so a kill loses
little. What it failed on is unscored, and asked again by the next process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic

from rich.console import Console

from kvaudit.audit.judges.base import CachedGrader, G, StoredAnswer
from kvaudit.audit.runs.claims import Claim
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.stored import Items, StoredUnit, item_of, read_records, stored_units, work_on_stored
from kvaudit.core.files import read_json
from kvaudit.core.judge_answers import Q
from kvaudit.core.records import Item, Record
from kvaudit.suites.base import Suite


class Regrading(Generic[Q, G]):
    """One process's work of a grader on a run; several may share it. A stage says what becomes of a unit's grades.

    Raises DataError where a unit is not as it was sealed, RunError where the grader cannot be asked on.
    """

    stage: ClassVar[str] = ""

    def __init__(self, run: RunFolder, console: Console) -> None:
        self._run, self._console = run, console
        self._tried: set[Path] = set()  # units of this process: what failed in them is left to the next one
        self.units, self.unfinished = stored_units(run)

    # what a stage says

    @cached_property
    def answers(self) -> CachedGrader[Q, G] | None:
        """The grader with what it said before; None where suites grade alone."""
        raise NotImplementedError

    def place(self, unit: StoredUnit) -> Path:
        """The file that a unit has once it is finished."""
        raise NotImplementedError

    def lock(self, unit: StoredUnit) -> Path:
        """What a unit is claimed by."""
        raise NotImplementedError

    def is_current(self, unit: StoredUnit, result: Mapping[str, Any]) -> bool:
        """Whether the file of a unit is of its records as they are now, by this very grader."""
        raise NotImplementedError

    def failed(self, result: Mapping[str, Any]) -> bool:
        """Whether the grader failed on some answer of a unit, by the unit's file."""
        raise NotImplementedError

    def write(self, unit: StoredUnit, mine: Claim) -> None:
        """Write what follows from a unit's grades (``graded``), its ``place`` last."""
        raise NotImplementedError

    # what all have

    def grade_units(self) -> None:
        """Grade every unit that is not finished yet, beside other processes that do the same."""
        work_on_stored(self.units, self.stage, self._console, done=self._is_done, lock=self.lock, work=self._work)

    def graded(self, unit: StoredUnit) -> Iterator[tuple[StoredAnswer, list[G | None]]]:
        """Every answer of a unit, with what the grader says of what it sees of it; an empty list where it sees none."""
        if self.answers is None:
            yield from ((answer, []) for answer in self._stored(unit))
            return
        grader = self.answers.grader
        asked = [grader.questions_of(answer) for answer in self._stored(unit)]
        questions = [question for row in asked for question in row]
        grader.check_questions(questions)
        # asked of a whole unit at once; grades come back in the order of the questions
        grades = iter(self.answers.grades(questions))
        for answer, row in zip(self._stored(unit), asked, strict=True):
            yield answer, [next(grades) for _ in row]

    def results_by_suite(self) -> dict[str, list[tuple[StoredUnit, Mapping[str, Any]]]]:
        """The finished units with what their files say."""
        found: dict[str, list[tuple[StoredUnit, Mapping[str, Any]]]] = {}
        for unit in self.units:
            found.setdefault(unit.suite, []).append((unit, read_json(self.place(unit))))
        return found

    @cached_property
    def _items(self) -> Items:
        return Items(self._run)

    def _stored(self, unit: StoredUnit) -> Iterator[StoredAnswer]:
        def asked(number: int, record: Record) -> tuple[Suite, Item]:
            made = self._items.of(unit)
            return made.suite, item_of(record, made, f"{str(unit.records)!r} line {number}")

        for number, record in enumerate(read_records(unit), start=1):
            yield StoredAnswer(record, partial(asked, number, record))

    def _is_done(self, unit: StoredUnit) -> bool:
        if not self.place(unit).exists():
            return False
        result = read_json(self.place(unit))
        return self.is_current(unit, result) and (not self.failed(result) or unit.records in self._tried)

    def _work(self, unit: StoredUnit, mine: Claim) -> None:
        self.write(unit, mine)
        self._tried.add(unit.records)
