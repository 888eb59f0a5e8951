"""A unit of work (a checkpoint asked one suite at one length under one policy) and its record file.

Records are appended batch by batch. A resumed process cuts the file to complete batches; a finished file is sealed with
its sha256. While refused requests of a finished unit are asked again, <unit>.answered holds the other answers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.audit.engines import ServingMode
from kvaudit.audit.policies import Policy
from kvaudit.core.errors import DataError
from kvaudit.core.files import check_plain, in_file_name, read_json, write_json, write_whole
from kvaudit.core.provenance import check_sealed, seal_path
from kvaudit.core.records import Record
from kvaudit.suites.base import SUITES

_RESTORE = "restore it, or begin anew with another --out"
REFUSED = "refused"  # key of a seal: the number of rows that a server refused, if any
PILOT_FOLDER = "pilot"  # in a run folder: units with the pilot's items only
ROUNDS_FOLDER = "rounds"  # in a run folder: a folder for each round, with units of its rows only
Row = tuple[str, int]  # item id, sample index


@dataclass(frozen=True)
class Unit:
    """The unit of work: one checkpoint, policy, suite and context length; a process locks and resumes it as a whole."""

    arm: str
    seed: int
    policy: ServingMode  # of kvaudit's own cache, or an engine's condition
    suite: str
    context_tokens: int

    @property
    def group_key(self) -> tuple[object, ...]:
        """The key that is equal for units that are answered together, batch by batch.

        They differ only in their policy of kvaudit's own cache. A unit that an engine answers has a key of its own.
        """
        condition = None if isinstance(self.policy, Policy) else self.policy
        return self.arm, self.seed, self.suite, self.context_tokens, condition

    def identity(self, checkpoint: str) -> tuple[str, str, str]:
        """Return what all records of the unit share: ``checkpoint`` (sha256), policy hash and suite version."""
        return checkpoint, self.policy.hash, SUITES.get(self.suite).version

    @property
    def name(self) -> str:
        """The name of the unit's files, without suffix."""
        return f"{self.arm}-seed{self.seed}--{self.policy.hash}--{in_file_name(self.suite)}--{self.context_tokens}"


@dataclass(frozen=True)
class UnitFiles:
    """The paths of a unit's files: records, seal, lock, and answers kept while refused requests are asked again."""

    records: Path
    seal: Path
    lock: Path
    answered: Path

    @classmethod
    def of(cls, folder: Path, unit: Unit) -> UnitFiles:
        return cls(*(folder / f"{unit.name}.{ending}" for ending in ("jsonl", "done.json", "lock", "answered")))


def sealed_records(files: UnitFiles, identity: tuple[str, str, str]) -> Mapping[Row, Record]:
    """Return the records of a finished unit by (item id, sample index); empty for an unfinished unit.

    Raises DataError if the file differs from its seal, or has records of another ``identity`` (``Unit.identity``).
    """
    if not files.seal.exists():
        return {}
    raw = files.records.read_bytes() if files.records.exists() else b""
    check_sealed(files.records, hashlib.sha256(raw).hexdigest(), read_json(files.seal))
    rows = [row.record for row in _readable_rows(files.records)]
    if rows:
        _check_identity(files.records, rows[0], identity)
    return {(row.item_id, row.sample_index): row for row in rows}


def join_files(joined: UnitFiles, parts: Sequence[UnitFiles]) -> None:
    """Write a unit's record file from those of its ``parts``, and seal it.

    Raises DataError if a part is missing, is not sealed, or differs from its seal.
    """
    contents, seals = list[bytes](), list[dict[str, Any]]()
    for part in parts:
        if missing := next((path for path in (part.records, part.seal) if not path.exists()), None):
            raise DataError(f"{str(missing)!r} is missing; {_RESTORE}")
        contents.append(part.records.read_bytes())
        seals.append(read_json(part.seal))
        check_sealed(part.records, hashlib.sha256(contents[-1]).hexdigest(), seals[-1], _RESTORE)
    raw = b"".join(contents)
    if joined.seal.exists() and read_json(joined.seal).get("sha256") == hashlib.sha256(raw).hexdigest():
        return
    refused = sum(int(seal.get(REFUSED, 0)) for seal in seals)
    write_sealed(joined.records, raw, seals[-1] | ({REFUSED: refused} if refused else {}))


def write_sealed(records: Path, raw: bytes, entries: Mapping[str, Any]) -> None:
    """Write a whole record file, then its seal, which gets the further ``entries``."""
    seal = seal_path(records)
    seal.unlink(missing_ok=True)  # an earlier seal must never stand beside new records
    write_whole(records, raw)
    write_json(seal, {**entries, "records": raw.count(b"\n"), "sha256": hashlib.sha256(raw).hexdigest()})


def answered_rows(rows: Mapping[Row, Record]) -> Mapping[Row, Record]:
    """Return the records of items without a refused sample; of every other item, all samples are asked again."""
    refused = {item for (item, _), record in rows.items() if record.unanswered}
    return {row: record for row, record in rows.items() if row[0] not in refused}


def written_seconds(files: UnitFiles, rows: range) -> float:
    """Return for how many seconds a unit's answers in the lines ``rows`` (from 0) took; a missing line counts as 0."""
    written = _readable_rows(files.records) if files.records.exists() else []
    return sum(row.record.seconds for row in written[rows.start : rows.stop])


def kept_rows(files: UnitFiles) -> Mapping[Row, Record]:
    """Return the answers that a unit keeps while its refused requests are sent again, by row; empty for other units."""
    rows = _readable_rows(files.answered) if files.answered.exists() else ()
    return {(row.record.item_id, row.record.sample_index): row.record for row in rows}


def reopen_refused(files: UnitFiles, identity: tuple[str, str, str]) -> None:
    """If the server refused requests of a finished unit, remove its seal, so that these are sent again.

    The answers to items without a refused sample are kept. ``identity`` is that of the unit (``Unit.identity``).
    """
    rows = sealed_records(files, identity)
    if any(record.unanswered for record in rows.values()):
        lines = "".join(record.to_json() + "\n" for record in answered_rows(rows).values())
        write_whole(files.answered, lines.encode())
        files.seal.unlink()


class RecordFile:
    """The record file of an unfinished unit, as a context manager.

    ``batches`` is the number of complete batches in the file, ``rows`` the number of their records. Raises DataError if
    the file holds records of another ``identity`` (``Unit.identity``).
    """

    def __init__(self, files: UnitFiles, batches: Sequence[Sequence[Row]], identity: tuple[str, str, str]) -> None:
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
        """Append the records of a complete batch, and return once they are on disk."""
        self._size += self._out.write("".join(record.to_json() + "\n" for record in records).encode())
        self._out.flush()
        os.fsync(self._out.fileno())
        self.batches, self.rows = self.batches + 1, self.rows + len(records)
        self._refused += sum(bool(record.unanswered) for record in records)

    def seal(self, inputs: str | None) -> None:
        """Write the seal, which marks the file as finished; ``inputs`` is the hash of the run's inputs."""
        path = self._files.records
        raw = path.read_bytes()
        if len(raw) != self._size:
            raise DataError(
                f"{str(path)!r} has {len(raw)} bytes, but this process wrote {self._size}: another process has written "
                "to it; go on with --resume, which cuts it to complete batches"
            )
        digest = hashlib.sha256(raw).hexdigest()
        seal = {"records": self.rows, "sha256": digest, "checkpoint": self._identity[0], "inputs": inputs}
        write_json(self._files.seal, seal | ({REFUSED: self._refused} if self._refused else {}))
        self._files.answered.unlink(missing_ok=True)

    def _cut(self, batches: Sequence[Sequence[Row]]) -> tuple[int, int]:
        """Cut the file after its last complete batch; return how many batches and rows remain in it.

        ``batches`` are the (item id, sample) of the rows of every batch that the file is to hold.
        """
        rows = _readable_rows(self._files.records)
        if rows:  # the first row is enough, since every process checks before it appends
            _check_identity(self._files.records, rows[0].record, self._identity)
        complete, length, asks_refused = 0, 0, self._files.answered.exists()
        for expected in batches:
            batch = [row.record for row in rows[length : length + len(expected)]]
            refused = sum(bool(record.unanswered) for record in batch)
            names = [(record.item_id, record.sample_index) for record in batch]
            if names != list(expected) or (asks_refused and refused):
                break
            self._refused += refused
            complete, length = complete + 1, length + len(expected)
        os.truncate(self._files.records, sum(len(row.line) for row in rows[:length]))
        return complete, length


def _check_identity(path: Path, record: Record, expected: tuple[str, str, str]) -> None:
    identity = (record.checkpoint, record.policy_hash, record.suite_version)
    if identity != expected:
        raise DataError(
            f"{str(path)!r} holds records of another checkpoint, policy or suite version "
            f"({', '.join(part[:12] for part in identity)}; now {', '.join(part[:12] for part in expected)}); "
            "delete it to evaluate again"
        )


class _Row(NamedTuple):
    line: bytes
    record: Record


def _readable_rows(path: Path) -> list[_Row]:
    """Read the rows of a record file up to the first one that a kill or a power cut has damaged."""
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
