"""Guarding as a stage of its own: the stored conversations of a run are shown to a guard, and nothing is sampled.

A conversation ends at the first message that the guard blocks. What had happened until then has happened; of the rest
every facet is what a block makes of it (``core.facets``). Records stay as they are: what a guard did lies beside them.

    guards/<name>-12hex/<unit>.json           {"records": sha256, "blocked": [[line, side, [facets]]], "failed": [line]}
    guards/<name>-12hex/answers-<name>.jsonl  what it said, by hash of the passage (``core.remembered``)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kvaudit.audit.judges.guards.base import Guard, passage_key, passages
from kvaudit.audit.runs.claims import Claim
from kvaudit.audit.runs.folder import RunFolder, make_folder
from kvaudit.audit.runs.stored import AskedItems, Items, StoredUnit, item_of, records_of, stored_units, work_on
from kvaudit.audit.sampling.exchange import graded
from kvaudit.core.facets import FACETS
from kvaudit.core.files import read_json, write_json
from kvaudit.core.records import Item, Message, Record, Role
from kvaudit.core.remembered import Answers
from kvaudit.reports.records.guards import GUARDS_FOLDER, GUARDS_FORMAT, GUARDS_VERSION

_COUNTS = ("answers", "input", "output", "failed")


class Blocked(NamedTuple):
    """What a guard did in one suite."""

    suite: str
    answers: int
    input: int  # blocked before the model could answer
    output: int
    failed: int


class Guarding:
    """One process's work of a guard on a run; several may share it.

    Raises DataError where a unit is not as it was sealed, RunError where the guard cannot be asked on.
    """

    def __init__(self, run: RunFolder, guard: Guard, text: str, console: Console) -> None:
        self._run, self._guard, self._console = run, guard, console
        self._text = text
        self._tried: set[Path] = set()  # units of this process: what failed in them is left to the next one
        self.units, self.unfinished = stored_units(run)
        self._folder = run.path / GUARDS_FOLDER / guard.label
        make_folder(self._folder)
        path = self._folder / f"answers-{guard.name}.jsonl"
        self._answers = Answers(path, passage_key, guard.blocked, "blocked")

    def work(self) -> list[Blocked]:
        """Guard every unit that is not guarded yet; returns what was blocked, by suite."""
        work_on(
            self.units,
            "guard",
            self._console,
            done=self._is_guarded,
            lock=lambda unit: self._folder / f"{unit.records.stem}.lock",
            work=self._guard_unit,
        )
        return self._found()

    @cached_property
    def _items(self) -> Items:
        return Items(self._run)

    def _place(self, unit: StoredUnit) -> Path:
        return self._folder / f"{unit.records.stem}.json"

    def _is_guarded(self, unit: StoredUnit) -> bool:
        if not self._place(unit).exists():
            return False
        found = read_json(self._place(unit))
        return found.get("records") == unit.sha256 and (not found.get("failed") or unit.records in self._tried)

    def _guard_unit(self, unit: StoredUnit, mine: Claim) -> None:
        blocked, failed = list[list[Any]](), list[int]()
        for number, (record, at) in enumerate(self._first_blocks(unit), start=1):
            if at is None:
                failed.append(number)
            elif at >= 0:
                side = "output" if record.transcript[at].role is Role.ASSISTANT else "input"
                blocked.append([number, side, self._happened(unit, record, at)])
        mine.check()
        told = {"name": self._guard.name, "sha256": self._guard.sha256, "side": self._guard.side, "text": self._text}
        body = {
            "format": GUARDS_FORMAT,
            "version": GUARDS_VERSION,
            "guard": told,
            "records": unit.sha256,
            "rows": unit.rows,
        }
        write_json(self._place(unit), {**body, "blocked": blocked, "failed": failed}, indent=None)
        self._tried.add(unit.records)

    def _first_blocks(self, unit: StoredUnit) -> Iterator[tuple[Record, int | None]]:
        """Every record with the message that is blocked first; -1 without one, None where the guard failed before."""
        shown = [list(passages(self._guard, record.transcript)) for record in records_of(unit)]
        said = iter(self._answers.answers([passage for row in shown for _, passage in row]))
        for record, row in zip(records_of(unit), shown, strict=True):
            yield record, _first([(index, next(said)) for index, _ in row])

    def _happened(self, unit: StoredUnit, record: Record, at: int) -> list[str]:
        """The unwanted facets of a conversation that had come about before its message number ``at``."""
        before = record.transcript[:at]
        unwanted = [name for name, value in record.facets.items() if value and not FACETS[name].wanted]
        if not unwanted or not any(message.role is Role.ASSISTANT for message in before):
            return []
        asked = self._items.of(unit)
        then = _happened_before(asked, item_of(record, asked, str(unit.records)), before)
        return [name for name in unwanted if then.get(name)]

    def _found(self) -> list[Blocked]:
        found: dict[str, dict[str, int]] = {}
        for unit in self.units:
            body, counts = read_json(self._place(unit)), found.setdefault(unit.suite, dict.fromkeys(_COUNTS, 0))
            counts["answers"] += unit.rows
            counts["failed"] += len(body["failed"])
            for _, side, _ in body["blocked"]:
                counts[side] += 1
        return [Blocked(suite, *(counts[name] for name in _COUNTS)) for suite, counts in found.items()]


def _first(said: Sequence[tuple[int, bool | None]]) -> int | None:
    """The index of the first message that is blocked, -1 without one; None where one before it is not known."""
    for index, blocked in said:
        if blocked is None:
            return None
        if blocked:
            return index
    return -1


def _happened_before(asked: AskedItems, item: Item, before: Sequence[Message]) -> Mapping[str, bool | None]:
    """The facets of the beginning of a conversation; none of an item's own opening, in which the model has no part."""
    return graded(asked.suite, item, before, "stop").facets if len(before) > len(item.messages) else {}
