"""Crash-safe writes (temporary name, sync, rename) with one clear error for disk trouble, and the telemetry log."""

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

TELEMETRY = "telemetry.jsonl"  # in a checkpoint folder, one row per step


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Turn a full, read-only or missing disk under ``path`` into a RunError that says how to continue."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunError(
            f"cannot write {str(path)!r} ({reason}); earlier saved work is intact: "
            "free space or choose another folder, then run again to resume"
        ) from error


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Have ``fill`` write a folder, then rename it to ``path``, which must not exist, in one step."""
    partial = path.with_name(path.name + PARTIAL)
    with guarded(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            fill(partial)
            # files before the name: a renamed folder with unsynced files would look complete after a crash
            for file in sorted(partial.iterdir()):
                sync(file)
            os.rename(partial, path)
        except BaseException:  # also on an interrupt: free the disk space again
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(path.parent)


def move_into(files: Path, folder: Path) -> None:
    """Move every file of ``files`` into ``folder``, replacing existing ones, then remove ``files``."""
    with guarded(folder):
        for file in sorted(files.iterdir()):
            os.replace(file, folder / file.name)
        shutil.rmtree(files)
        sync(folder)


class TelemetryLog:
    """Append-only ``telemetry.jsonl``; a line is on disk before ``append`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Bytes on disk, 0 before the first line."""
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def count(self) -> int:
        """Rows on disk, by counting line ends; 0 if the file cannot be read."""
        try:
            return self.path.read_bytes().count(b"\n")
        except OSError:
            return 0

    def rows(self) -> list[dict[str, Any]]:
        """Return every row so far; raises DataError for a damaged one."""
        return _read_rows(self.path) if self.size else []

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line and sync it; raises RunError if the disk refuses."""
        line = json.dumps(_json_value(row), allow_nan=False) + "\n"
        # a kill may leave half a line: a resumed run truncates to the size in its saved state
        with guarded(self.path), self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes; raises DataError if it is already shorter."""
        if self.size < size:
            raise DataError(
                f"telemetry {str(self.path)!r} has {self.size} bytes, its checkpoint expects {size}; "
                "it was cut: delete the checkpoint folder to train again"
            )
        if self.size > size:
            with guarded(self.path), self.path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())

    def check_steps(self, steps: int) -> None:
        """Raise DataError unless the rows are steps 1 to ``steps``, in order and each once."""
        if steps == 0 and not self.path.exists():
            return
        numbers = [row.get("step") for row in _read_rows(self.path)]
        for expected, number in zip_longest(range(1, steps + 1), numbers):
            if number != expected:
                names = ["the end" if step is None else f"step {step}" for step in (number, expected)]
                raise DataError(
                    f"telemetry {str(self.path)!r} has {names[0]} where {names[1]} is expected: another process "
                    "wrote to it too; delete the checkpoint folder to train again"
                )


def _json_value(value: Any) -> Any:
    """Return the value with numbers that are not finite replaced by None, which JSON can hold."""
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"telemetry {str(path)!r} does not exist; was this folder trained?")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"telemetry {str(path)!r} has a line that is not JSON ({error})") from None
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"telemetry {str(path)!r} has a line that is not a JSON object; delete the checkpoint folder to train again"
        )
    return rows
