"""Hold the finished checkpoints of a run to the hashes they were finished with; without torch, for reports too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from audit.errors import DataError
from audit.runs import PROVENANCE, read_json

_HELD = {"files": "", "ledgers": "ledgers"}  # key of provenance.json -> folder of the files it names


def check_checkpoints(run: Path) -> None:
    """Raise DataError, naming the file, where a finished checkpoint of the run lost or changed a file or a ledger."""
    for provenance in sorted((run / "checkpoints").glob(f"*/seed-*/{PROVENANCE}")):
        check_checkpoint(provenance.parent)


def check_checkpoint(folder: Path) -> None:
    """The same for one finished checkpoint."""
    for path, wanted in _held(folder / PROVENANCE):
        _check(path, wanted)


def _held(provenance: Path) -> Iterator[tuple[Path, str]]:
    """Every file that the checkpoint was finished with, and its sha256."""
    story = read_json(provenance)
    for key, folder in _HELD.items():
        table = story.get(key)
        if not isinstance(table, dict):
            raise DataError(f"{str(provenance)!r} has no table {key!r}; delete its folder to train it again")
        yield from ((provenance.parent / folder / name, str(digest)) for name, digest in sorted(table.items()))


def _check(path: Path, wanted: str) -> None:
    remedy = "put it back, or delete its checkpoint folder to train it again"
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing, its checkpoint's provenance lists it; {remedy}")
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != wanted:
        raise DataError(
            f"{str(path)!r} has sha256 {got[:12]}, its checkpoint's provenance says {wanted[:12]}; {remedy}"
        )
