"""Hold what a run finished, checkpoints and records, to the sha256 it was finished with; no torch, for reports too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from audit.core.errors import DataError
from audit.core.files import read_json
from audit.core.provenance import PROVENANCE

_HELD = {"files": "", "ledgers": "ledgers"}  # key of provenance.json -> folder of the files it names


def check_checkpoints(run: Path) -> None:
    """Raise DataError, naming the file, where a finished checkpoint of the run lost or changed a file or a ledger."""
    for provenance in sorted((run / "checkpoints").glob(f"*/seed-*/{PROVENANCE}")):
        check_checkpoint(provenance.parent)


def check_checkpoint(folder: Path) -> None:
    """The same for one finished checkpoint; a folder that is none is refused too."""
    for path, wanted in _held(folder / PROVENANCE):
        _check(path, wanted)


def _held(provenance: Path) -> Iterator[tuple[Path, str]]:
    """Every file that the checkpoint was finished with, and its sha256."""
    story = read_json(provenance)
    if not set(_HELD) & set(story):  # as a run's, which has one of the same name
        raise DataError(
            f"{str(provenance.parent)!r} is no finished checkpoint; give the folder of one, such as "
            "RUN/checkpoints/ARM/seed-N (a run that trained nothing, as a probe, has none)"
        )
    for key, folder in _HELD.items():
        table = own_files(story.get(key), provenance)
        yield from ((provenance.parent / folder / name, digest) for name, digest in sorted(table.items()))


def own_files(table: Any, source: Path) -> dict[str, str]:
    """A table of file names and sha256 that stands in ``source``; DataError where a name leaves its folder."""
    if not isinstance(table, dict):
        raise DataError(f"{str(source)!r} has no table of files and sha256; make its folder again")
    for name, digest in table.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or not isinstance(digest, str):
            raise DataError(f"{str(source)!r} lists {name!r}, no file of that folder with its sha256; make it again")
    return table


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


def seal_of(records: Path) -> Path:
    """Where the seal of a unit's record file stands; without one the unit is not finished."""
    return records.with_suffix(".done.json")


def check_sealed(records: Path, got: str, seal: Mapping[str, Any]) -> None:
    """Raise DataError where a record file, whose bytes have the sha256 ``got``, is not the one that was sealed."""
    wanted = seal.get("sha256")
    if got != wanted:
        raise DataError(
            f"record file {str(records)!r} has sha256 {got[:12]}, its seal says {str(wanted)[:12]}; "
            "delete both and resume to evaluate the unit again"
        )
