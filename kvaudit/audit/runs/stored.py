"""The finished units of a run: their records, each file with a seal (its sha256), and their items, made again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kvaudit.audit.runs.claims import Claim, work_on_units
from kvaudit.audit.runs.endpoint_probe import counter
from kvaudit.audit.runs.evaluate import evaluation_items, suite_as_asked
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.progress import Meter, print_line
from kvaudit.audit.sampling.checkpoints import load_base_chat
from kvaudit.core.errors import DataError
from kvaudit.core.files import plain_files, read_json
from kvaudit.core.provenance import INPUTS, ROWS, check_inputs, check_sealed, seal_path, table_of
from kvaudit.core.records import Item, Record, Role
from kvaudit.core.text import length_label
from kvaudit.suites.base import CountTokens, Suite
from kvaudit.suites.sources import collect_file_hashes


@dataclass(frozen=True)
class StoredUnit:
    """A finished unit of a run: one record file with its seal; ``version`` is that of the suite that graded it."""

    records: Path
    seal: Mapping[str, Any] = field(hash=False)  # the path identifies a unit
    suite: str
    context_tokens: int
    version: str

    @property
    def sha256(self) -> str:
        """The sha256 of the record file, as stored in the seal when the file was finished."""
        return str(self.seal.get("sha256"))

    @property
    def rows(self) -> int:
        """The number of records, as stored in the seal when the file was finished."""
        return int(self.seal.get("records", 0))

    def check(self) -> None:
        """Raise DataError if the record file differs from its seal."""
        with self.records.open("rb") as file:
            check_sealed(self.records, hashlib.file_digest(file, "sha256").hexdigest(), self.seal)


class SuiteItems(NamedTuple):
    """A suite, and its items by id."""

    suite: Suite
    items: Mapping[str, Item]


class Items:
    """Makes the items of a run again from its spec; only those of the last suite and length stay in memory."""

    def __init__(self, run: RunFolder) -> None:
        tokenizers = sorted(run.path.glob("checkpoints/*/seed-*/tokenizer.json"))
        tokenizer = str(tokenizers[0].parent) if tokenizers else run.spec.model_path
        is_probe = run.spec.probe is not None
        self._run, self._count = run, counter(run.spec)[0] if is_probe else load_base_chat(tokenizer).count_tokens
        self._made: tuple[tuple[str, int], SuiteItems] | None = None

    def of(self, unit: StoredUnit) -> SuiteItems:
        """Return the suite and the items of a unit."""
        key = (unit.suite, unit.context_tokens)
        if self._made is None or self._made[0] != key:
            suite = suite_as_asked(self._run.spec, unit.suite)
            items = make_items_again(self._run, suite, unit.context_tokens, self._count)
            self._made = key, SuiteItems(suite, items)
        return self._made[1]


def make_items_again(run: RunFolder, suite: Suite, context: int, count: CountTokens) -> dict[str, Item]:
    """Return the items that a run asked of a suite at one length, made again, as {item id: item}.

    ``count`` counts the tokens of a text. Raises RunError if the public rows differ from those that the run used.
    """
    with collect_file_hashes() as rows:
        items = evaluation_items(run.sized, suite, context, count)
    inputs = run.provenance().get(INPUTS)
    if isinstance(inputs, dict):  # runs of earlier versions have none
        stored = table_of(inputs, ROWS)
        check_inputs(ROWS, {name: stored.get(name) for name in rows}, rows)
    return {item.item_id: item for item in items}


def stored_units(run: RunFolder) -> tuple[list[StoredUnit], list[str]]:
    """Return the finished units of a run, sorted by suite and length, and the names of the unfinished record files.

    Raises DataError if there is no finished unit, or one of a suite that the spec does not ask.
    """
    units, unfinished = [], []
    for records in plain_files(run.records, "*.jsonl"):
        if not seal_path(records).exists():
            unfinished.append(records.name)
            continue
        unit = read_unit(records)
        if unit.suite not in run.spec.evaluate.suites:
            raise DataError(
                f"{str(records)!r} holds suite {unit.suite!r}, which the run's spec does not ask for; remove the file "
                "and its seal"
            )
        units.append(unit)
    if not units:
        raise DataError(f"no finished units in {str(run.records)!r}; finish the run first: kvaudit run --resume")
    return sorted(units, key=lambda unit: (unit.suite, unit.context_tokens, unit.records.name)), unfinished


def read_unit(records: Path) -> StoredUnit:
    """Return the finished unit of a record file, described by its seal and its first line."""
    with records.open("rb") as lines:
        first = _record(records, 1, lines.readline())
    return StoredUnit(records, read_json(seal_path(records)), first.suite, first.context_tokens, first.suite_version)


def read_records(unit: StoredUnit) -> Iterator[Record]:
    """Yield every record of a unit; raise DataError with the line number for a line that is no record."""
    with unit.records.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield _record(unit.records, number, line)


def work_on_stored(
    units: Sequence[StoredUnit],
    phase: str,
    console: Console,
    *,
    is_done: Callable[[StoredUnit], bool],
    lock: Callable[[StoredUnit], Path],
    work: Callable[[StoredUnit, Claim], None],
) -> None:
    """Work on every unit that is not done, shared with other processes; a progress bar counts the answers.

    Each unit is checked against its seal before ``work`` is called with it.
    """
    rows_done = 0

    def check_and_work(unit: StoredUnit, claim: Claim) -> None:
        unit.check()
        work(unit, claim)

    total = sum(unit.rows for unit in units)
    with Meter(console, phase, total, sum(unit.rows for unit in units if is_done(unit))) as meter:

        def on_done(unit: StoredUnit) -> None:
            nonlocal rows_done
            rows_done += unit.rows
            meter.at(rows_done, f"{unit.suite} {length_label(unit.context_tokens)}")

        on_wait = partial(print_line, console)
        work_on_units(units, is_done=is_done, lock=lock, work=check_and_work, on_done=on_done, on_wait=on_wait)


def item_of(record: Record, suite_items: SuiteItems, where: str) -> Item:
    """Return the item that a record answers; raise DataError if the suite has no such item now, or a different one.

    ``where`` names the record's place in an error.
    """
    item = suite_items.items.get(record.item_id)
    suite = f"suite {suite_items.suite.name} of version {suite_items.suite.version}"
    if item is None or record.suite != suite_items.suite.name:
        raise DataError(
            f"{where}: item {record.item_id!r} of suite {record.suite!r} (version {record.suite_version}) is not among "
            f"those of {suite} under the run's spec; judge it with the kvaudit, tokenizer and rows that made it"
        )
    opening, answer = record.transcript[: len(item.messages)], record.transcript[len(item.messages) :]
    if opening != item.messages or not answer or answer[0].role not in (Role.THOUGHT, Role.ASSISTANT):
        raise DataError(
            f"{where}: the transcript does not begin with item {record.item_id!r} as {suite} makes it now (it was of "
            f"version {record.suite_version}); judge it with the kvaudit, tokenizer and rows that made it"
        )
    return item


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        return Record.from_json(line.decode())
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} line {number}: {error}; delete the unit and evaluate it again") from None
