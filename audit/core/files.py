"""Files that are whole or not there: JSON read with a word for what is wrong, written beside its place and renamed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from audit.core.errors import DataError, RunError

PARTIAL = ".partial"  # ends the name of what is being written beside its place
_LOCKLESS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


@contextmanager
def mutex(path: Path) -> Iterator[None]:
    """Serialise a few milliseconds of work between processes; the kernel lets go when a process dies.

    Raises RunError on a file system that has no locks.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _LOCKLESS:
                raise
            raise RunError(
                f"the file system of {str(path.parent)!r} has no locks ({error.strerror}); mount it with locks "
                "(Lustre: flock, NFS 3: lockd), or give another --out"
            ) from None
        yield


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises DataError when it is missing, torn or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DataError(f"{str(path)!r} is missing") from None
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{str(path)!r} holds a {type(value).__name__}, wanted an object")
    return value


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write a JSON file whole or not at all: synced beside its place, then renamed. ``indent`` None: on one line."""
    write_whole(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")
    sync(path.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_output(path: Path, text: str) -> None:
    """Write a file for a person, whole or not at all, with the folders above it; raises RunError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); free the disk or make the folder writable"
        ) from None
