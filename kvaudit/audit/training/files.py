"""Files that survive a kill: written beside their place, synced, renamed. Trouble with the disk is one clear line."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import PARTIAL, sync

TELEMETRY = "telemetry.jsonl"  # of a checkpoint, one row per step


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


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a folder, then rename it to ``path`` in one step; ``path`` must not exist."""
    partial = path.with_name(path.name + PARTIAL)
    with guarded(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            fill(partial)
            # what is in it first: a name that reaches the disk before its contents would pass for a whole folder
            for file in sorted(partial.iterdir()):
                sync(file)
            os.rename(partial, path)
        except BaseException:  # an interrupt too: a full disk should not be left fuller
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(path.parent)  # the name itself


def move_into(files: Path, folder: Path) -> None:
    """Move every file of ``files`` into ``folder``, replacing what is there; then remove ``files``."""
    with guarded(folder):
        for file in sorted(files.iterdir()):
            os.replace(file, folder / file.name)
        shutil.rmtree(files)
        sync(folder)


class TelemetryLog:
    """Append-only ``telemetry.jsonl``. Every line is on disk before ``append`` returns; RunError if it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Bytes on disk, 0 before the first line."""
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def count(self) -> int:
        """Rows on disk, read by their ends alone; 0 where it cannot be read, which is for others to say."""
        try:
            return self.path.read_bytes().count(b"\n")
        except OSError:
            return 0

    def rows(self) -> list[dict[str, Any]]:
        """Every row so far; raises DataError where one is damaged."""
        return _rows(self.path) if self.size else []

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line and sync it."""
        line = json.dumps(_clean(row), allow_nan=False) + "\n"
        # a kill may leave half a line: a resumed run cuts back to the size that its state names
        with guarded(self.path), self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def truncate(self, size: int) -> None:
        """Forget what was written after ``size`` bytes; raises DataError where less than that is left."""
        if self.size < size:
            raise DataError(
                f"telemetry {str(self.path)!r} has {self.size} bytes, its checkpoint says {size}; "
                "it was cut: delete the checkpoint folder to train again"
            )
        if self.size > size:
            with guarded(self.path), self.path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())

    def check_steps(self, steps: int) -> None:
        """Raise DataError unless the rows are of steps 1 to ``steps``, in order and each once."""
        if steps == 0 and not self.path.exists():
            return
        found = [row.get("step") for row in _rows(self.path)]
        for wanted, got in zip_longest(range(1, steps + 1), found):
            if got != wanted:
                raise DataError(
                    f"telemetry {str(self.path)!r} has {_named(got)} where {_named(wanted)} belongs: another process "
                    "wrote there too; delete the checkpoint folder to train again"
                )


def _named(step: Any) -> str:
    return "its end" if step is None else f"step {step}"


def _clean(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"telemetry {str(path)!r} does not exist; was this folder trained?")
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"telemetry {str(path)!r} holds a line that is not JSON ({error})") from None
    if not all(isinstance(row, dict) for row in found):
        raise DataError(
            f"telemetry {str(path)!r} holds a line that is no row; delete the checkpoint folder to train again"
        )
    return found
