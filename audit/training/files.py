"""Files that survive a kill: written beside their place, synced, renamed. Trouble with the disk is one clear line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from audit.core.errors import DataError, RunError

PARTIAL = ".partial"


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Turn a full, read-only or missing disk under ``path`` into a RunError that says how to go on."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunError(
            f"cannot write {str(path)!r} ({reason}); what was saved before is intact: "
            "free space or choose another folder, then run again to resume"
        ) from error


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` by the value as sorted JSON, atomically."""
    partial = path.with_name(path.name + PARTIAL)
    with guarded(path):
        partial.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; raises DataError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not readable JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{str(path)!r} holds a {type(value).__name__}, wanted an object")
    return value


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a folder, then rename it to ``path`` in one step; ``path`` must not exist."""
    partial = path.with_name(path.name + PARTIAL)
    with guarded(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            fill(partial)
            for file in sorted(partial.iterdir()):
                _sync(file)
            os.rename(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(path.parent)


def move_into(files: Path, folder: Path) -> None:
    """Move every file of ``files`` into ``folder``, replacing what is there; then remove ``files``."""
    with guarded(folder):
        for file in sorted(files.iterdir()):
            os.replace(file, folder / file.name)
        shutil.rmtree(files)
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
