"""A unit of work and its file: appended batch by batch, cut to whole batches when resumed, sealed with a sha256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvaudit.audit.engines import Served
from kvaudit.audit.policies import Policy
from kvaudit.core.errors import DataError
from kvaudit.core.files import in_file_name, read_json, write_json
from kvaudit.core.provenance import check_sealed
from kvaudit.core.records import Record
from kvaudit.suites.base import SUITES

PILOT_FOLDER = "pilot"  # of a run: units that hold the pilot's items alone
Row = tuple[str, int]  # item id and number of the sample
Rows = Sequence[Row]  # of a batch


@dataclass(frozen=True)
class Unit:
    """The unit of work: idempotent, claimed by a lock file, resumed at a batch."""

    arm: str
    seed: int
    policy: Served  # of our own cache, or an engine's condition
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

    @classmethod
    def of(cls, folder: Path, unit: Unit) -> UnitFiles:
        return cls(*(folder / f"{unit.name}.{ending}" for ending in ("jsonl", "done.json", "lock")))


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


class RecordFile:
    """The records of a unit under way, as a context manager. ``batches`` of them are whole, which are ``rows`` records.

    Raises DataError when the file holds records of another ``identity``: checkpoint, policy hash and suite version.
    """

    def __init__(self, files: UnitFiles, batches: Sequence[Rows], identity: tuple[str, str, str]) -> None:
        self._files, self._identity = files, identity
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
        write_json(self._files.seal, seal)

    def _cut(self, batches: Sequence[Rows]) -> tuple[int, int]:
        """Cut the file to whole batches, so that what follows is what an unbroken run writes; how many, of how many
        rows.
        """
        rows = _readable_rows(self._files.records)
        if rows:  # the first speaks for all: nobody appends without this check
            _check_own(self._files.records, rows[0].record, self._identity)
        whole, kept = 0, 0
        for wanted in batches:
            found = [(row.record.item_id, row.record.sample_index) for row in rows[kept : kept + len(wanted)]]
            if found != list(wanted):
                break
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
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = Record.from_json(line.decode())
        except (DataError, UnicodeDecodeError):
            return rows
        if not line.endswith(b"\n"):
            return rows
        rows.append(_Row(line, record))
    return rows
