"""Which reader a file wants: the one that recognises it."""

from __future__ import annotations

from pathlib import Path

from audit.core.errors import DataError
from audit.core.registry import Registry
from reports.records.readers.base import Log, Reader, Request

READERS: Registry[Reader] = Registry("reader", "reports.records.readers", Reader)


def read_log(path: Path, request: Request) -> Log:
    """The rows of a result file. Raises DataError for one that is missing, unreadable or of no known kind."""
    try:
        reader = _reader_of(path)
        if request.select and reader.name != "kvaudit":
            raise DataError(f"{str(path)!r} is a {reader.reads}; selectors choose cells of a kvaudit run only")
        return reader.read(path, request)
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror or error}); check the path") from None


def _reader_of(path: Path) -> Reader:
    if not path.exists():
        raise DataError(f"{str(path)!r} does not exist; give a result file or the folder of a run")
    readers = [found() for found in READERS.all().values()]
    for reader in readers:
        if reader.recognises(path):
            return reader
    known = "; ".join(reader.reads for reader in readers)
    raise DataError(f"{str(path)!r} is no result file that is known: {known}")
