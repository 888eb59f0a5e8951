"""The finished units of a run, read again: their records, and the items that these answer, made anew from the spec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kvaudit.audit.runs.claims import Claim, work_on_units
from kvaudit.audit.runs.evaluate import suite_as_asked, evaluation_items
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.probe.plan import counter
from kvaudit.audit.runs.progress import Meter, print_line
from kvaudit.audit.sampling.checkpoints import load_base_chat
from kvaudit.core.errors import DataError
from kvaudit.core.files import plain_files, read_json
from kvaudit.core.provenance import INPUTS, ROWS, check_inputs, check_sealed, seal_path
from kvaudit.core.records import Item, Record, Role
from kvaudit.core.text import length_label
from kvaudit.suites.base import Suite
from kvaudit.suites.sources import collect_file_hashes


@dataclass(frozen=True)
class StoredUnit:
    """A finished unit of a run; ``sha256`` is what its seal says of its records."""

    records: Path
    seal: Mapping[str, Any] = field(hash=False)  # units are told apart by their files
    suite: str
    context_tokens: int
    version: str  # of the suite that graded it before

    @property
    def sha256(self) -> str:
        return str(self.seal.get("sha256"))

    @property
    def rows(self) -> int:
        """How many records it says to hold."""
        return int(self.seal.get("records", 0))

    def check(self) -> None:
        """Raises DataError where the records are not those that were sealed."""
        with self.records.open("rb") as file:
            check_sealed(self.records, hashlib.file_digest(file, "sha256").hexdigest(), self.seal)


class SuiteItems(NamedTuple):
    """A suite and its items by id."""

    suite: Suite
    items: Mapping[str, Item]


class Items:
    """The items of a run's units, made again; those of one suite and length are in memory at a time.

    Raises DataError where public rows are others than those that the run noted.
    """

    def __init__(self, run: RunFolder) -> None:
        own = sorted(run.path.glob("checkpoints/*/seed-*/tokenizer.json"))  # which made the items, where it is kept
        tokenizer = str(own[0].parent) if own else run.spec.model_path
        probed = run.spec.probe is not None
        self._run, self._count = run, counter(run.spec)[0] if probed else load_base_chat(tokenizer).count_tokens
        self._asked: tuple[tuple[str, int], SuiteItems] | None = None

    def of(self, unit: StoredUnit) -> SuiteItems:
        """The suite and the items of a unit."""
        key = (unit.suite, unit.context_tokens)
        if self._asked is None or self._asked[0] != key:
            suite = suite_as_asked(self._run.spec, unit.suite)
            with collect_file_hashes() as rows:
                items = evaluation_items(self._run.sized, suite, unit.context_tokens, self._count)
            noted = self._run.provenance().get(INPUTS)
            if noted is not None:  # a run of an earlier version noted none; the right answers stand in these rows
                then = noted.get(ROWS, {})
                check_inputs(ROWS, {name: then[name] for name in rows if name in then}, rows)
            self._asked = key, SuiteItems(suite, {item.item_id: item for item in items})
        return self._asked[1]


def stored_units(run: RunFolder) -> tuple[list[StoredUnit], list[str]]:
    """The finished units of a run, those of one suite and length together, and the names of the unfinished."""
    found, unfinished = [], []
    for records in plain_files(run.records, "*.jsonl"):
        if not seal_path(records).exists():
            unfinished.append(records.name)
            continue
        unit = stored_unit(records)
        if unit.suite not in run.spec.evaluate.suites:
            raise DataError(
                f"{str(records)!r} holds suite {unit.suite!r}, which the run's spec does not ask for; remove the file "
                "and its seal"
            )
        found.append(unit)
    if not found:
        raise DataError(f"no finished units in {str(run.records)!r}; nothing is there to read")
    return sorted(found, key=lambda unit: (unit.suite, unit.context_tokens, unit.records.name)), unfinished


def stored_unit(records: Path) -> StoredUnit:
    """The finished unit of a record file, by its seal and its first line."""
    with records.open("rb") as lines:
        first = _record(records, 1, lines.readline())
    return StoredUnit(records, read_json(seal_path(records)), first.suite, first.context_tokens, first.suite_version)


def read_records(unit: StoredUnit) -> Iterator[Record]:
    """Every record of a unit; raises DataError for a line that is none, with its number."""
    with unit.records.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield _record(unit.records, number, line)


def work_on_stored(
    units: Sequence[StoredUnit],
    stage: str,
    console: Console,
    *,
    done: Callable[[StoredUnit], bool],
    lock: Callable[[StoredUnit], Path],
    work: Callable[[StoredUnit, Claim], None],
) -> None:
    """Take a stage through every unit that is not done, beside other processes that do the same.

    A unit is checked against its seal before ``work`` sees it. The meter counts answers.
    """
    rows, ready = sum(unit.rows for unit in units), sum(unit.rows for unit in units if done(unit))
    worked = 0

    def checked(unit: StoredUnit, mine: Claim) -> None:
        unit.check()
        work(unit, mine)

    with Meter(console, stage, rows, ready) as meter:

        def finished(unit: StoredUnit) -> None:
            nonlocal worked
            worked += unit.rows
            meter.at(worked, f"{unit.suite} {length_label(unit.context_tokens)}")

        waiting = partial(print_line, console)
        work_on_units(units, done=done, lock=lock, work=checked, finished=finished, waiting=waiting)


def item_of(record: Record, asked: SuiteItems, where: str) -> Item:
    """The item that a record answers; raises DataError where today's suite asks something else under its name."""
    item = asked.items.get(record.item_id)
    suite = f"suite {asked.suite.name} of version {asked.suite.version}"
    if item is None or record.suite != asked.suite.name:
        raise DataError(
            f"{where}: item {record.item_id!r} of suite {record.suite!r} is none that {suite} asks under the run's "
            f"spec (it was of version {record.suite_version}); judge it with the kvaudit, tokenizer and rows it is from"
        )
    opening, said = record.transcript[: len(item.messages)], record.transcript[len(item.messages) :]
    if opening != item.messages or not said or said[0].role not in (Role.THOUGHT, Role.ASSISTANT):
        raise DataError(
            f"{where}: the transcript does not open with item {record.item_id!r} as {suite} asks it now (it was of "
            f"version {record.suite_version}); judge it with the kvaudit, tokenizer and rows it is from"
        )
    return item


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        return Record.from_json(line.decode())
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} line {number}: {error}; delete the unit and evaluate it again") from None
