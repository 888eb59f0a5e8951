"""A unit of work and its file: appended batch by batch, cut to whole batches when resumed, sealed with a sha256.

<unit>.answered    what was answered of a unit whose refused rows are asked anew, until it is sealed again
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvaudit.audit.engines import ServingMode
from kvaudit.audit.policies import Policy
from kvaudit.core.errors import DataError
from kvaudit.core.files import check_plain, in_file_name, read_json, write_json, write_whole
from kvaudit.core.provenance import check_sealed
from kvaudit.core.records import Record
from kvaudit.suites.base import SUITES

REFUSED = "refused"  # of a seal: rows that a server refused, where there are any
PILOT_FOLDER = "pilot"  # of a run: units that hold the pilot's items alone
Row = tuple[str, int]  # item id and number of the sample
Rows = Sequence[Row]  # of a batch


@dataclass(frozen=True)
class Unit:
    """The unit of work: idempotent, claimed by a lock file, resumed at a batch."""

    arm: str
    seed: int
    policy: ServingMode  # of our own cache, or an engine's condition
    suite: str
    context_tokens: int

    @property
    def together(self) -> tuple[object, ...]:
        """What units share that are played batch by batch in turn: an engine's come alone."""
        alone = None if isinstance(self.policy, Policy) else self.policy
        return self.arm, self.seed, self.suite, self.context_tokens, alone

    def identity(self, checkpoint: str) -> tuple[str, str, str]:
        """What all of its records share: the sha256 of a checkpoint, policy hash and suite version."""
        return checkpoint, self.policy.hash, SUITES.get(self.suite).version

    @property
    def name(self) -> str:
        """The file name of the unit's records, without its ending."""
        return f"{self.arm}-seed{self.seed}--{self.policy.hash}--{in_file_name(self.suite)}--{self.context_tokens}"


@dataclass(frozen=True)
class UnitFiles:
    """Where a unit's records, seal and lock lie."""

    records: Path
    seal: Path
    lock: Path
    answered: Path

    @classmethod
    def of(cls, folder: Path, unit: Unit) -> UnitFiles:
        return cls(*(folder / f"{unit.name}.{ending}" for ending in ("jsonl", "done.json", "lock", "answered")))


def sealed_records(files: UnitFiles, identity: tuple[str, str, str]) -> Mapping[Row, Record]:
    """The records of a finished unit, none of another; DataError where they are not those that were sealed, or are of
    another ``identity``.
    """
    if not files.seal.exists():
        return {}
    raw = files.records.read_bytes() if files.records.exists() else b""
    check_sealed(files.records, hashlib.sha256(raw).hexdigest(), read_json(files.seal))
    rows = [row.record for row in _readable_rows(files.records)]
    if rows:
        _check_own(files.records, rows[0], identity)
    return {(row.item_id, row.sample_index): row for row in rows}


def answered_rows(rows: Mapping[Row, Record]) -> Mapping[Row, Record]:
    """Those of items of which no sample was refused: an item is asked with all of its samples."""
    refused = {item for (item, _), record in rows.items() if record.unanswered}
    return {row: record for row, record in rows.items() if row[0] not in refused}


def kept_rows(files: UnitFiles) -> Mapping[Row, Record]:
    """What was answered of a unit whose refused rows are asked anew, nothing of any other."""
    rows = _readable_rows(files.answered) if files.answered.exists() else ()
    return {(row.record.item_id, row.record.sample_index): row.record for row in rows}


def reopen_refused(files: UnitFiles, identity: tuple[str, str, str]) -> int:
    """Open a finished unit again in which rows were refused, keeping what was answered; returns how many they were."""
    rows = sealed_records(files, identity)
    refused = sum(bool(record.unanswered) for record in rows.values())
    if refused:
        lines = "".join(record.to_json() + "\n" for record in answered_rows(rows).values())
        write_whole(files.answered, lines.encode())
        files.seal.unlink()
    return refused


class RecordFile:
    """The records of a unit under way, as a context manager. ``batches`` of them are whole, which are ``rows`` records.

    Raises DataError when the file holds records of another ``identity``: checkpoint, policy hash and suite version.
    """

    def __init__(self, files: UnitFiles, batches: Sequence[Rows], identity: tuple[str, str, str]) -> None:
        self._files, self._identity = files, identity
        self._refused = 0
        files.records.touch()
        self.batches, self.rows = self._cut(batches)
        self._size = files.records.stat().st_size
        self._out = files.records.open("ab")

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def append(self, records: Sequence[Record]) -> None:
        """Add a whole batch; on return the disk has it."""
        self._size += self._out.write("".join(record.to_json() + "\n" for record in records).encode())
        self._out.flush()
        os.fsync(self._out.fileno())
        self.batches, self.rows = self.batches + 1, self.rows + len(records)
        self._refused += sum(bool(record.unanswered) for record in records)

    def seal(self, inputs: str | None) -> None:
        """Nothing is added any more; ``inputs`` stands for what the run reads."""
        path = self._files.records
        raw = path.read_bytes()
        if len(raw) != self._size:
            raise DataError(
                f"{str(path)!r} has {len(raw)} bytes, this process left {self._size} in it: another one wrote there "
                "too; go on with --resume, which cuts it to what is whole"
            )
        digest = hashlib.sha256(raw).hexdigest()
        seal = {"records": self.rows, "sha256": digest, "checkpoint": self._identity[0], "inputs": inputs}
        write_json(self._files.seal, seal | ({REFUSED: self._refused} if self._refused else {}))
        self._files.answered.unlink(missing_ok=True)

    def _cut(self, batches: Sequence[Rows]) -> tuple[int, int]:
        """Cut the file to whole batches, so that what follows is what an unbroken run writes; how many, of how many
        rows.
        """
        rows = _readable_rows(self._files.records)
        if rows:  # the first speaks for all: nobody appends without this check
            _check_own(self._files.records, rows[0].record, self._identity)
        whole, kept, anew = 0, 0, self._files.answered.exists()
        for wanted in batches:
            batch = [row.record for row in rows[kept : kept + len(wanted)]]
            refused = sum(bool(record.unanswered) for record in batch)
            if [(record.item_id, record.sample_index) for record in batch] != list(wanted) or (anew and refused):
                break
            self._refused += refused
            whole, kept = whole + 1, kept + len(wanted)
        os.truncate(self._files.records, sum(len(row.line) for row in rows[:kept]))
        return whole, kept


def _check_own(path: Path, record: Record, ours: tuple[str, str, str]) -> None:
    theirs = (record.checkpoint, record.policy_hash, record.suite_version)
    if ours != theirs:
        raise DataError(
            f"{str(path)!r} holds records of another checkpoint, policy or suite version "
            f"({', '.join(part[:12] for part in theirs)}; now {', '.join(part[:12] for part in ours)}); "
            "delete it to evaluate again"
        )


class _Row(NamedTuple):
    line: bytes
    record: Record


def _readable_rows(path: Path) -> list[_Row]:
    """The lines of a record file up to the first that a kill or a power cut has spoilt."""
    rows: list[_Row] = []
    check_plain(path)
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = Record.from_json(line.decode())
        except (DataError, UnicodeDecodeError):
            return rows
        if not line.endswith(b"\n"):
            return rows
        rows.append(_Row(line, record))
    return rows
