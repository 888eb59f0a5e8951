"""Guarding: the stored conversations of a run are shown to a guard.

A conversation ends at the first message that the guard blocks. What had happened until then has happened; of the rest
every facet is what a block makes of it (``core.facets``). Records stay as they are: what a guard did lies beside them.

    guards/<name>-12hex/<unit>.json           {"records": sha256, "blocked": [[line, side, [facets]]], "failed": [line]}
    guards/<name>-12hex/answers-<name>.jsonl  what it said, by hash of the passage (``core.remembered``)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kvaudit.audit.judges.grader import Remembered, StoredAnswer
from kvaudit.audit.judges.guards.base import Guard, Passage, passages
from kvaudit.audit.runs.claims import Claim
from kvaudit.audit.runs.folder import RunFolder, make_folder
from kvaudit.audit.runs.regrading import Regrading
from kvaudit.audit.runs.stored import StoredUnit
from kvaudit.audit.sampling.exchange import graded
from kvaudit.core.facets import FACETS
from kvaudit.core.files import write_json
from kvaudit.core.records import Item, Message, Role
from kvaudit.reports.records.guards import GUARDS_FOLDER, GUARDS_FORMAT, GUARDS_VERSION
from kvaudit.suites.base import Suite


class BlockedCounts(NamedTuple):
    """What a guard did in one suite."""

    suite: str
    answers: int
    input: int  # blocked before the model could answer
    output: int
    failed: int


class Guarding(Regrading[Passage, bool]):
    """One process's work of a guard on a run; ``text`` is how the user wrote it."""

    stage = "guard"

    def __init__(self, run: RunFolder, guard: Guard, text: str, console: Console) -> None:
        super().__init__(run, console)
        self._guard, self._text = guard, text
        self._folder = run.path / GUARDS_FOLDER / guard.folder
        make_folder(self._folder)

    @cached_property
    def answers(self) -> Remembered[Passage, bool]:
        return Remembered(self._guard, self._folder)

    def work(self) -> list[BlockedCounts]:
        """Guard every unit that is not guarded yet; returns what was blocked, by suite."""
        self.grade_units()
        found = []
        for suite, results in self.results_by_suite().items():
            sides = [side for _, body in results for _, side, _ in body["blocked"]]  # of line, side and facets
            failed = sum(len(body["failed"]) for _, body in results)
            rows = sum(unit.rows for unit, _ in results)
            found.append(BlockedCounts(suite, rows, sides.count("input"), sides.count("output"), failed))
        return found

    def place(self, unit: StoredUnit) -> Path:
        return self._folder / f"{unit.records.stem}.json"

    def lock(self, unit: StoredUnit) -> Path:
        return self._folder / f"{unit.records.stem}.lock"

    def is_current(self, unit: StoredUnit, result: Mapping[str, Any]) -> bool:
        return bool(result.get("records") == unit.sha256)

    def failed(self, result: Mapping[str, Any]) -> bool:
        return bool(result.get("failed"))

    def write(self, unit: StoredUnit, mine: Claim) -> None:
        blocked, failed = list[list[Any]](), list[int]()
        for number, (answer, decisions) in enumerate(self.graded(unit), start=1):
            transcript = answer.record.transcript
            at = _first(zip([index for index, _ in passages(self._guard, transcript)], decisions, strict=True))
            if at is None:
                failed.append(number)
            elif at >= 0:
                side = "output" if transcript[at].role is Role.ASSISTANT else "input"
                blocked.append([number, side, _happened(answer, at)])
        mine.check()
        guard = {"name": self._guard.name, "sha256": self._guard.sha256, "side": self._guard.side, "text": self._text}
        body = {
            "format": GUARDS_FORMAT,
            "version": GUARDS_VERSION,
            "guard": guard,
            "records": unit.sha256,
            "rows": unit.rows,
        }
        write_json(self.place(unit), {**body, "blocked": blocked, "failed": failed}, indent=None)


def _first(decisions: Iterable[tuple[int, bool | None]]) -> int | None:
    """The index of the first message that is blocked, -1 without one; None where one before it is not known."""
    for index, blocked in decisions:
        if blocked is None:
            return None
        if blocked:
            return index
    return -1


def _happened(answer: StoredAnswer, at: int) -> list[str]:
    """The unwanted facets of a conversation that had come about before its message number ``at``."""
    record, before = answer.record, answer.record.transcript[:at]
    unwanted = [name for name, value in record.facets.items() if value and not FACETS[name].wanted]
    if not unwanted or not any(message.role is Role.ASSISTANT for message in before):
        return []
    then = happened_before(*answer.asked(), before)
    return [name for name in unwanted if then.get(name)]


def happened_before(suite: Suite, item: Item, before: Sequence[Message]) -> Mapping[str, bool | None]:
    """The facets of the beginning of a conversation; none of an item's own opening, in which the model has no part."""
    return graded(suite, item, before, "stop").facets if len(before) > len(item.messages) else {}
